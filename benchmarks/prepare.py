"""Measures tokenizing into a prepared dataset, beside ``datasets.map`` with the same tokenizer.

The text is Python's own standard library, file by file, repeated with a different first line until there are enough
tokens; the tokenizer is a byte-level BPE of 16,000 tokens trained on a part of it. Both write the same samples to the
disk with the same number of processes, in turns, so that other load affects both. What a round wrote is removed after
it. The rate per core is tokens divided by the CPU time of all processes (those that encode and the one that directs
them), which other load affects less than the wall clock.

    python benchmarks/prepare.py                       2 million tokens a round, three rounds
    python benchmarks/prepare.py --tokens 100000000 --rounds 3 --out benchmarks/results/prepare.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.samples.prepared.prepare import prepare
from ds_trainer.samples.prepared.workers import Part
from ds_trainer.samples.sources.record import Record

VOCABULARY = 16_000
OURS, THEIRS, THEIRS_BATCHED = "prepare", "datasets.map", "datasets.map, batched"
WAYS = (OURS, THEIRS, THEIRS_BATCHED)
_FILE_BYTES = 8 * 2**20


def texts() -> list[str]:
    """The files of the standard library."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def train_tokenizer(path: Path) -> Tokenizer:
    """A byte-level BPE, saved to ``path``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts()[:120], trainer)
    tokenizer.save(str(path))
    return tokenizer


def write_source(directory: Path, tokens: int, tokenizer: Tokenizer) -> tuple[list[Path], int]:
    """jsonl files with about ``tokens`` tokens, and their number of samples. Parts of about 2,000 characters."""
    parts = [text[start : start + 2000] for text in texts() for start in range(0, len(text), 2000)]
    each = sum(len(tokenizer.encode(part).ids) for part in parts[::20]) / len(parts[::20])
    samples = int(tokens / (each + 8))
    directory.mkdir()
    paths: list[Path] = []
    stream = None
    for number in range(samples):
        if stream is None or stream.tell() > _FILE_BYTES:
            if stream is not None:
                stream.close()
            paths.append(directory / f"part-{len(paths):04d}.jsonl")
            stream = paths[-1].open("w", encoding="utf-8")
        stream.write(json.dumps({"text": f"# sample {number}\n{parts[number % len(parts)]}"}) + "\n")
    if stream is not None:
        stream.close()
    return paths, samples


class Encode:
    """One text at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, record: Record) -> dict[str, Any]:
        ids = np.asarray(self.tokenizer.encode(record.fields["text"]).ids, np.int32)
        return {"input_ids": ids, "labels": ids}


def read_lines(path: str) -> Iterator[Record]:
    name = os.path.basename(path)
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            yield Record(f"{name}:{number}", "text", json.loads(line))


def run_ours(paths: list[Path], tokenizer: Tokenizer, directory: Path, processes: int) -> tuple[int, int]:
    """Tokens, and bytes on disk."""
    parts = [Part(path.stat().st_size, partial(read_lines, str(path))) for path in paths]
    dataset = prepare(
        parts,
        Encode(tokenizer),
        directory,
        files=paths,
        identity={"tokenizer": tokenizer.to_str()},
        vocab_size=VOCABULARY,
        processes=processes,
    )
    return dataset.tokens, dataset.manifest.bytes


def _map_one(row: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    ids = tokenizer.encode(row["text"]).ids
    return {"input_ids": ids, "labels": ids}


def _map_many(rows: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    ids = [encoding.ids for encoding in tokenizer.encode_batch(rows["text"])]
    return {"input_ids": ids, "labels": ids}


def run_theirs(
    paths: list[Path], tokenizer: Tokenizer, directory: Path, processes: int, batched: bool
) -> tuple[int, int]:
    """Tokens, and bytes on disk, of the same with ``datasets``: reading jsonl, then ``map``, then the cache."""
    import datasets

    datasets.disable_progress_bars()
    source = datasets.load_dataset(
        "json", data_files=[str(path) for path in paths], split="train", cache_dir=str(directory), num_proc=processes
    )
    mapped = source.map(
        partial(_map_many if batched else _map_one, tokenizer=tokenizer),
        batched=batched,
        num_proc=processes,
        remove_columns=["text"],
        cache_file_name=str(directory / "mapped.arrow"),
    )
    import pyarrow.compute as pc

    tokens = sum(pc.sum(pc.list_value_length(chunk)).as_py() for chunk in mapped.data.column("input_ids").chunks)
    return tokens, sum(path.stat().st_size for path in directory.glob("mapped*.arrow"))


def measured(run: Callable[[Path], tuple[int, int]], directory: Path) -> dict[str, float]:
    """Seconds, CPU seconds, tokens and bytes of one run; what it wrote is removed."""

    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    cpu_before, began = cpu(), time.perf_counter()
    tokens, size = run(directory)
    result = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": cpu() - cpu_before,
        "tokens": tokens,
        "bytes": size,
    }
    shutil.rmtree(directory)
    return result


def label_storage() -> dict[str, dict[str, float]]:
    """Ways to keep which tokens of a conversation are trained on: bytes per sample and microseconds to read one."""
    random = np.random.default_rng(0)
    samples = []
    for _ in range(2000):
        turns = random.integers(20, 200, 2 * int(random.integers(1, 5)))
        samples.append((turns, np.repeat(np.arange(len(turns)) % 2 == 1, turns)))
    masks = [mask for _, mask in samples]
    offsets = np.cumsum([0, *map(len, masks)])
    bits = np.packbits(np.concatenate(masks), bitorder="little")
    labels = np.concatenate(masks).astype(np.int32)
    runs = [np.asarray(turns, np.uint16) for turns, _ in samples]

    def of_bits(index: int) -> Any:
        start, length = int(offsets[index]), len(masks[index])
        first, shift = divmod(start, 8)
        return np.unpackbits(bits[first : (start + length + 7) // 8], bitorder="little")[shift : shift + length]

    ways: dict[str, tuple[float, Callable[[int], Any]]] = {
        "int32 per token": (4 * len(labels), lambda index: labels[offsets[index] : offsets[index + 1]].copy()),
        "one bit per token": (len(bits), of_bits),
        "runs, uint16, and an offset": (
            sum(2 * len(run) + 8 for run in runs),
            lambda index: np.repeat(np.arange(len(runs[index])) % 2 == 1, runs[index]),
        ),
    }
    found = {}
    for name, (size, read) in ways.items():
        assert all((np.asarray(read(index)) != 0).tolist() == masks[index].tolist() for index in range(50))
        began = time.process_time()
        for index in range(len(samples)):
            read(index)
        found[name] = {
            "bytes": size / len(samples),
            "microseconds": (time.process_time() - began) / len(samples) * 1e6,
        }
    return found


def read_rate(dataset: PreparedDataset) -> dict[str, float]:
    """Microseconds of CPU to read a sample in random order: the first time (with its checksums), and again."""
    order = np.random.default_rng(0).permutation(len(dataset))[:20_000].tolist()
    rates = {}
    for name in ("first", "again"):
        began = time.process_time()
        for index in order:
            dataset[index]
        rates[name] = (time.process_time() - began) / len(order) * 1e6
    return rates


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory(dir=options.directory) as made:
        root = Path(made)
        tokenizer = train_tokenizer(root / "tokenizer.json")
        paths, samples = write_source(root / "source", options.tokens, tokenizer)
        size = sum(path.stat().st_size for path in paths)
        print(f"{samples:,} samples, {size / 1e6:,.0f} MB in {len(paths)} files", flush=True)
        load = [os.getloadavg()[0]]
        for number in range(options.rounds):
            ways = options.only if number % 2 == 0 else options.only[::-1]
            for name in ways:
                run: Callable[[Path], tuple[int, int]]
                if name == OURS:
                    run = lambda path: run_ours(paths, tokenizer, path, options.processes)  # noqa: E731
                else:
                    batched = name == THEIRS_BATCHED
                    run = lambda path, b=batched: run_theirs(paths, tokenizer, path, options.processes, b)  # noqa: E731
                result = measured(run, root / "out")
                rounds[name].append(result)
                print(f"{number} {name}: {result['tokens'] / result['cpu_seconds']:,.0f} tokens/s per core", flush=True)
            load.append(os.getloadavg()[0])
        run_ours(paths, tokenizer, root / "read", options.processes)
        (directory,) = (path for path in (root / "read").iterdir() if path.is_dir())
        reading = read_rate(PreparedDataset(directory))
    tokens = {result["tokens"] for results in rounds.values() for result in results}
    assert len(tokens) == 1, f"not the same tokens: {tokens}"
    return {
        "samples": samples,
        "tokens": tokens.pop(),
        "source_bytes": size,
        "processes": options.processes,
        "load_average": load,
        "rounds": rounds,
        "microseconds_a_sample": reading,
        "labels": label_storage(),
    }


def rates(result: dict[str, Any], name: str, clock: str) -> list[float]:
    """Tokens per second and core of each round."""
    cores = 1 if clock == "cpu_seconds" else result["processes"]
    return [entry["tokens"] / entry[clock] / cores for entry in result["rounds"][name]]


def table(result: dict[str, Any]) -> str:
    """The results as tables in Markdown."""
    lines = [
        "| | tokens/s per core (CPU time) | lowest to highest | tokens/s per process (wall clock) | bytes per token |",
        "|---|---|---|---|---|",
    ]
    for name in result["rounds"]:
        cpu, wall = (rates(result, name, clock) for clock in ("cpu_seconds", "seconds"))
        size = result["rounds"][name][0]["bytes"] / result["tokens"]
        lines.append(
            f"| `{name}` | {statistics.median(cpu):,.0f} | {min(cpu):,.0f} to {max(cpu):,.0f} | "
            f"{statistics.median(wall):,.0f} | {size:.2f} |"
        )
    lines += ["", "| labels as | bytes per sample | µs to read a sample |", "|---|---|---|"]
    for name, values in result["labels"].items():
        lines.append(f"| {name} | {values['bytes']:,.0f} | {values['microseconds']:.1f} |")
    first, again = (result["microseconds_a_sample"][name] for name in ("first", "again"))
    lines += ["", f"Reading a sample: {first:.0f} µs of CPU the first time, with checksums; {again:.0f} µs again."]
    return "\n".join(lines)


def main() -> int:
    """Measure, print the tables, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS, help="default: all, in turns")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--directory", help="for the files: some GB for 100 million tokens")
    parser.add_argument("--out", help="file for the results")
    options = parser.parse_args()
    result = measure(options)
    print(table(result))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
