"""Selects the checkpoint to resume from. The ranks verify it together; each reads a part of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.crc32 import finalize
from ds_trainer.checkpoint.protocol.file_records import FileRecord, describe_mismatch, find_damage, partial_checksum
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE, BrokenCheckpoint, Manifest
from ds_trainer.checkpoint.protocol.other_formats import CheckpointFormat
from ds_trainer.checkpoint.protocol.writer_group import Communicator, WriterGroup
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.logging import EVERY_RANK, get_logger

if TYPE_CHECKING:
    from ds_trainer.checkpoint.converters.transformers_reader import RunningModel

logger = get_logger(__name__)

SPLIT_BYTES = 64 * 2**20
"""Size from which a file that belongs to no single rank is read by all ranks of a shared directory, a part each."""


class VerifiedCheckpoint(NamedTuple):
    """A checkpoint whose files all match its manifest."""

    path: Path
    manifest: Manifest


def resolve(
    requested: Path | None,
    output_dir: Path,
    writer_group: WriterGroup,
    trusted: bool = False,
    running_model: Callable[[], RunningModel] | None = None,
) -> VerifiedCheckpoint:
    """Returns the checkpoint to resume from: ``requested``, or the newest valid one in ``output_dir``. Collective.

    A checkpoint of DeepSpeed or transformers is converted into a hidden directory of ``output_dir``: the result then
    has another path than ``requested``, and the leader of ``writer_group`` removes it after use.

    Args:
        requested: a checkpoint of any format; None for the newest valid one.
        output_dir: the parent of the ``checkpoint-N`` directories.
        writer_group: the ranks that share ``output_dir``.
        trusted: unpickle arbitrary objects in checkpoints of other formats.
        running_model: describes the model of this run, for checkpoints whose optimizer states have numbers.

    Raises:
        BrokenCheckpoint: it is damaged, or there is no valid one.
        ConfigError: it holds weights only, or cannot be converted; on all ranks.
    """
    if requested is None:
        checkpoint = newest_valid_checkpoint(CheckpointDirectory(output_dir), writer_group, distributed)
        checkpoint.manifest.check_resumable(checkpoint.path)
        return checkpoint
    path = requested
    if not (requested / MANIFEST_FILE).is_file():
        path = _converted(requested, output_dir, writer_group, trusted, running_model)
    try:
        checkpoint = verify_checkpoint(path, writer_group, distributed)
        checkpoint.manifest.check_resumable(path)
    except BaseException:
        if path != requested and writer_group.is_leader:
            disk.remove_tree(path)
        raise
    return checkpoint


def _converted(
    requested: Path,
    output_dir: Path,
    writer_group: WriterGroup,
    trusted: bool,
    running_model: Callable[[], RunningModel] | None,
) -> Path:
    """Converts a checkpoint of another format on the leader of each group; returns the path of this rank's group."""
    from ds_trainer.checkpoint.converters.checkpoint_import import import_hidden
    from ds_trainer.checkpoint.converters.conversion import other_format_at

    problem = converted = None
    if writer_group.is_leader:
        try:
            foreign = other_format_at(requested)
            logger.info("%s has the format of %s: converting it first.", requested, foreign.format.value)
            model = running_model() if running_model and foreign.format is CheckpointFormat.HF_TRAINER else None
            name = (writer_group.node, writer_group.nodes, "converted")
            converted, made = import_hidden(foreign, CheckpointDirectory(output_dir), trusted, *name, model)
            if distributed.rank() == 0:
                print("\n  ".join([f"Converted from {requested}:", *made.notes]), flush=True)
        except ConfigError as error:
            problem = str(error)
    reports = distributed.gather_objects((problem, converted))
    if problems := [message for message, _ in reports if message is not None]:
        if converted is not None:
            disk.remove_tree(converted)
        raise ConfigError(list(dict.fromkeys(problems)))
    path: Path = reports[writer_group.leader][1]
    return path


def verify_checkpoint(path: Path, writer_group: WriterGroup, communicator: Communicator) -> VerifiedCheckpoint:
    """Read all files of the checkpoint at ``path`` and compare them with its manifest. Collective.

    Raises:
        BrokenCheckpoint: it is damaged on some node; the message says what is wrong.
    """
    manifest, problems, parts = None, [], {}
    try:
        manifest = Manifest.read(path)
        whole, split = _assign_files(manifest, writer_group)
        problems = [problem for record in whole if (problem := find_damage(path, record))]
        problems += [problem for record in split if (problem := find_damage(path, record, compare_checksum=False))]
        if not problems:
            part = writer_group.ranks.index(writer_group.rank), len(writer_group.ranks)
            parts = {record.name: partial_checksum(path / record.name, record.size, *part) for record in split}
    except (BrokenCheckpoint, OSError) as error:
        problems = [str(error)]
    results = communicator.gather_to_main((None if manifest is None else manifest.save_id, problems, parts))
    verdict: Any = None
    if results is not None:
        problems = list(dict.fromkeys(problem for _, of_rank, _ in results for problem in of_rank))
        if not problems and manifest is not None:
            problems = list(_checksum_mismatches(manifest, [parts for *_, parts in results]))
        verdict = problems, len({save_id for save_id, *_ in results}) > 1
    problems, differ = communicator.broadcast_object(verdict)
    if problems or manifest is None:
        raise BrokenCheckpoint(f"{path} cannot be resumed from: {listed(problems, 8, '; ')}.")
    if differ:
        raise BrokenCheckpoint(f"{path} cannot be resumed from: other nodes hold a checkpoint of another save.")
    if manifest.nodes != writer_group.nodes:
        raise BrokenCheckpoint(
            f"{path} cannot be resumed from: it is the part of node {manifest.node} of {manifest.nodes} "
            f"(save_on_each_node), and this run has {writer_group.nodes} directories."
        )
    return VerifiedCheckpoint(path, manifest)


def _checksum_mismatches(manifest: Manifest, parts_by_rank: Iterable[Mapping[str, int]]) -> Iterator[str]:
    """Describes the damaged files among those that the ranks read in parts."""
    combined: dict[str, int] = {}
    for parts in parts_by_rank:
        for name, part in parts.items():
            combined[name] = combined.get(name, 0) ^ part
    for name, value in combined.items():
        record = manifest.files[name]
        if (crc32 := finalize(value, record.size)) != record.crc32:
            yield describe_mismatch(record, crc32)


def _assign_files(manifest: Manifest, writer_group: WriterGroup) -> tuple[list[FileRecord], list[FileRecord]]:
    """Returns the files that this rank reads as a whole, and those of which every rank reads a part.

    A rank reads the files of its own number, which it will load anyway, and some of the others. Large files that belong
    to no rank are read in parts.
    """
    of_this_rank: list[FileRecord] = []
    others: list[FileRecord] = []
    split: list[FileRecord] = []
    for record in sorted(manifest.files.values(), key=lambda record: record.size):
        match = re.search(r"rank_?(\d+)\.|_(\d{5})\.", record.name)
        writer = int(match[1] or match[2]) if match else -1
        if writer == writer_group.rank:
            of_this_rank.append(record)
        elif writer not in writer_group.ranks:
            (split if record.size >= SPLIT_BYTES and writer_group.nodes == 1 else others).append(record)
    return of_this_rank + others[writer_group.work_slice()], split


def newest_valid_checkpoint(
    directory: CheckpointDirectory, writer_group: WriterGroup, communicator: Communicator
) -> VerifiedCheckpoint:
    """Returns the newest undamaged checkpoint on all nodes; warns of each damaged one. Collective.

    Raises:
        BrokenCheckpoint: there is none; the message says what is wrong with each checkpoint.
    """
    entries = directory.entries() if writer_group.is_leader else []
    for entry in entries:
        if entry.manifest is None:
            logger.warning("Skipping %s: %s", entry.path.name, entry.problem, extra=EVERY_RANK)
    by_rank = communicator.gather_to_main(
        [(entry.path.name, entry.manifest and entry.manifest.save_id, entry.problem) for entry in entries]
        if writer_group.is_leader
        else None
    )
    verdict: Any = None
    if by_rank is not None:
        listings = [[tuple(entry) for entry in listing] for listing in by_rank if listing is not None]
        common = set.intersection(*({(name, save_id) for name, save_id, _ in listing} for listing in listings))
        # The first directory's order counts: generations are the same in all directories.
        intact = [(name, (name, save_id) in common) for name, save_id, problem in reversed(listings[0]) if not problem]
        verdict = intact, [problem for listing in listings for _, _, problem in listing if problem]
    candidates, problems = communicator.broadcast_object(verdict)
    for name, on_all_nodes in candidates:
        if not on_all_nodes:
            problems.append(f"{name} is not on all nodes")
        else:
            try:
                return verify_checkpoint(directory.path / name, writer_group, communicator)
            except BrokenCheckpoint as error:
                problems.append(str(error))
        logger.warning("Skipping %s: %s", name, problems[-1])
    raise BrokenCheckpoint(
        f"The run cannot be resumed: {directory.path} holds no valid checkpoint. "
        f"{listed(problems, 8, ' ') or 'It has no checkpoint-N directory.'} Give the path of another checkpoint; to "
        "begin at step 0, move these elsewhere or set another output_dir."
    )
