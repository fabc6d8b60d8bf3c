"""``prepare``: tokenizes a source once, and finds the result again by its content.

A prepared dataset is a directory named after its key. It is written beside that name, flushed to the disk, listed in a
manifest, and renamed last: it exists whole or not at all.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ds_trainer.samples.prepared.block_file import BlockFileRecord, BlockWriter, DamagedDataset, writing
from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.samples.prepared.key import check_unchanged, content_key, file_states, known_digest_of_files
from ds_trainer.samples.prepared.manifest import LENGTHS_FILE, OFFSETS_FILE, DatasetManifest
from ds_trainer.samples.prepared.once import Waiting, WriterHeartbeat, made_once, published
from ds_trainer.samples.prepared.shard import Encode, ShardResult, token_dtype
from ds_trainer.samples.prepared.workers import SHARD_BYTES, Part, tasks_of, write_shards
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import user_path
from ds_trainer.utils.logging import EVERY_RANK, get_logger
from ds_trainer.utils.units import counted

logger = get_logger(__name__)

_MOST_PROBLEMS = 20
_MOST_NAMES = 100  # of what is counted by names that the data brings
_TQDM_EVERY = 0.5


class NothingPrepared(ConfigError):
    """No record gave a sample.

    Attributes:
        records: that were read.
    """

    def __init__(self, records: int) -> None:
        super().__init__(
            f"There is nothing to train on: {counted(records, 'record was', 'records were')} read, none gave a sample."
        )
        self.records = records


@dataclass(frozen=True)
class PreparationReport:
    """What it took to write a dataset.

    Attributes:
        manifest: the facts about the dataset.
        directory: where it is.
        source_bytes: size of the source files.
        seconds: wall-clock time of encoding and writing.
        cpu_seconds: CPU time of all processes that encode.
        processes: their number.
    """

    manifest: DatasetManifest
    directory: Path
    source_bytes: int
    seconds: float
    cpu_seconds: float
    processes: int

    def text(self) -> str:
        """A few lines for a terminal."""
        made, seconds = self.manifest, max(self.seconds, 1e-9)
        others = [f"{count:,} {name}" for name, count in made.counts.items() if count and name != "samples"]
        processes = counted(self.processes, "process", "processes")
        lines = [
            f"{counted(made.samples, 'sample')}, {counted(made.tokens, 'token')}, {made.trained_tokens:,} of them "
            f"trained on ({made.trained_tokens / max(made.tokens, 1):.1%}); {', '.join(others)}",
            f"{made.bytes / 1e6:,.1f} MB from {self.source_bytes / 1e6:,.1f} MB of source",
            f"{self.seconds:,.1f} s in {processes}, {made.tokens / seconds:,.0f} tokens/s; "
            f"{made.tokens / max(self.cpu_seconds, 1e-9):,.0f} tokens/s per core",
            f"in {self.directory}",
        ]
        return "\n".join(lines)


def default_directory() -> Path:
    """Where datasets are prepared unless another directory is named: ``~/.cache/ds_trainer/prepared``."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "ds_trainer" / "prepared"


def prepare(
    parts: Sequence[Part],
    encode: Encode,
    directory: str | os.PathLike[str],
    *,
    files: Sequence[str | os.PathLike[str]],
    identity: Mapping[str, Any],
    vocab_size: int | None = None,
    processes: int | None = None,
    verify: bool = False,
    waiting: Waiting = Waiting(),  # noqa: B008  (frozen)
) -> PreparedDataset:
    """The samples of ``parts``, from ``directory`` if they were prepared before, else encoded and written there.

    Ranks may all call it, before or after the process group exists: one of those that share the directory writes, the
    others wait for it without a collective.

    Args:
        parts: the source; its records are read only if they have to be encoded.
        encode: gives the samples of a record (``input_ids`` and ``labels``, one number per token): one, an iterable of
            some, None, or an object with ``samples`` and ``notices``, names that are counted. It can be pickled if
            there are several processes.
        directory: holds prepared datasets of any content.
        files: the files behind ``parts``, in order; their content is part of the key.
        identity: everything else that decides the samples: tokenizer, options of reading and encoding, code
            (:func:`~ds_trainer.samples.prepared.key.digest_of_tokenizer`,
            :func:`~ds_trainer.samples.prepared.key.digest_of_code`).
        vocab_size: all ids are below it; up to 65,536, a token takes two bytes instead of four.
        processes: that encode; default: the cores of this process, but not more than there are shards.
        verify: read a dataset that is there and compare all checksums now, instead of block by block when it is read.
        waiting: times of processes that wait.

    Returns:
        The dataset. Its ``report`` says what it took, or is None if it was there.

    Raises:
        NothingPrepared: no record gave a sample.
        ConfigError: files cannot be read, records cannot be encoded (up to 20 of them), or the directory cannot be
            written.
    """
    root = user_path(directory, f"data.prepared_dir={directory!s}")
    names = [os.fspath(file) for file in files]
    states = file_states(names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
    sources = known_digest_of_files(names, states, root, processes or cores, waiting)
    key, content = content_key(sources, identity, token_dtype(vocab_size))
    final = root / key[:32]
    damage: list[str] = []

    def find() -> PreparedDataset | None:
        if not final.exists():
            return None
        try:
            dataset = PreparedDataset(final, key)
            if verify:
                dataset.verify()
        except DamagedDataset as error:
            damage[:] = [str(error)]
            return None
        return dataset

    def make(heartbeat: WriterHeartbeat) -> PreparedDataset:
        if damage:  # all processes have found it; this one repairs it
            logger.warning("%s It is prepared again.", damage[0], extra=EVERY_RANK)
        size = sum(state.size for state in states)
        most = -(-size // SHARD_BYTES) if all(part.size is not None for part in parts) else cores
        workers, began = max(1, processes or min(cores, most)), time.perf_counter()
        logger.info(
            "Tokenizing %.1f MB of source in %s, to %s.", size / 1e6, counted(workers, "process", "processes"), final
        )
        with published(final, lambda: _is_whole(final, key)) as partial:
            index = _Index(partial)
            with _progress(size, heartbeat) as report:
                index.add_all(write_shards(partial, tasks_of(parts), encode, vocab_size, workers, report))
            check_unchanged(names, states)
            manifest = index.manifest(key, content, token_dtype(vocab_size))
            manifest.write(partial)
        seconds = time.perf_counter() - began
        dataset = PreparedDataset(final, key)
        dataset.report = PreparationReport(manifest, final, size, seconds, index.cpu_seconds, workers)
        return dataset

    return made_once(final, find, make, waiting)


class _Index:
    """Collects the results of the shards, in order: lengths and offsets go to their files at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lengths = BlockWriter(directory / LENGTHS_FILE)
        self._offsets = BlockWriter(directory / OFFSETS_FILE)
        self._results: list[ShardResult] = []
        self._tokens = 0
        self.cpu_seconds = 0.0

    def add_all(self, results: Generator[ShardResult, None, None]) -> None:
        """Add all results.

        Raises:
            ConfigError: with the problems of records.
        """
        problems: list[str] = []
        try:
            for result in results:
                problems += result.problems
                if len(problems) >= _MOST_PROBLEMS:
                    break
                self._add(result)
        except ConfigError as error:  # of the reader of a large file, or of a disk
            problems += error.problems
        if problems:
            results.close()
            self._lengths.close()
            self._offsets.close()
            raise ConfigError(problems[:_MOST_PROBLEMS])

    def _add(self, result: ShardResult) -> None:
        self.cpu_seconds += result.seconds
        ends = self._tokens + np.cumsum(result.lengths, dtype=np.int64)
        self._lengths.write(result.lengths.astype("<i4").tobytes())
        self._offsets.write((ends - result.lengths).astype("<i8").tobytes())
        self._tokens += result.record.tokens
        result.lengths = result.lengths[:0]
        self._results.append(result)

    def manifest(self, key: str, content: Mapping[str, Any], dtype: str) -> DatasetManifest:
        """The manifest of all shards; the files of shards without a sample are removed.

        Raises:
            NothingPrepared: there is no sample.
        """
        lengths: BlockFileRecord = self._lengths.finish()
        offsets: BlockFileRecord = self._offsets.finish()
        counts = sum((result.counts for result in self._results), Counter[str]())
        if not self._tokens:
            raise NothingPrepared(counts["records"])
        for result in self._results:
            if not result.record.samples:
                (self._directory / result.record.file_name).unlink()
        return DatasetManifest(
            key=key,
            content=content,
            dtype=dtype,
            trained_tokens=sum(result.trained_tokens for result in self._results),
            counts=dict(sorted(_few(counts).items())),
            lengths=lengths,
            offsets=offsets,
            shards=tuple(result.record for result in self._results if result.record.samples),
        )


def _few(counts: Counter[str]) -> dict[str, int]:
    """``counts`` with the most frequent of the names that the data itself brings (they have a colon)."""
    brought = Counter({name: count for name, count in counts.items() if ":" in name})
    kept = {name: count for name, count in counts.items() if ":" not in name}
    return {**kept, **dict(sorted(brought.items(), key=lambda entry: (-entry[1], entry[0]))[:_MOST_NAMES])}


@contextmanager
def _progress(source_bytes: int, heartbeat: WriterHeartbeat) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, and the words that waiting processes log."""
    tokens = done = 0  # the bar does not count where there is no terminal
    began = time.perf_counter()
    with tqdm(
        total=source_bytes, unit="B", unit_scale=True, desc="tokenizing", disable=None, mininterval=_TQDM_EVERY
    ) as bar:

        def report(size: int, further: int) -> None:
            nonlocal tokens, done
            tokens, done = tokens + further, done + size
            rate = tokens / max(time.perf_counter() - began, 1e-9)
            bar.set_postfix_str(f"{tokens / 1e6:,.1f}M tokens, {rate:,.0f} tokens/s", refresh=False)
            bar.update(size)
            heartbeat.doing = f"tokenizing: {counted(tokens, 'token')}, {done / max(source_bytes, 1):.0%} of the source"

        yield report


def _is_whole(directory: Path, key: str) -> bool:
    try:
        PreparedDataset(directory, key).verify()
    except DamagedDataset:
        return False
    return True
