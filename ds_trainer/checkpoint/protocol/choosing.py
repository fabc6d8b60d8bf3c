"""Which checkpoint to resume from: ranks look at it together, each at a share of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ds_trainer.checkpoint.protocol.crc32 import finished
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.files import FileRecord, damage, damaged, part_of_checksum
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint, Manifest
from ds_trainer.checkpoint.protocol.sharing import Messages, Sharing
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_DIVIDED = 64 * 2**20
"""Bytes from which a file that is no rank's own is read by all ranks, a part by each, where they share it."""


class Checkpoint(NamedTuple):
    """A checkpoint all of whose files are as they were written."""

    path: Path
    manifest: Manifest


def verified(path: Path, sharing: Sharing, messages: Messages) -> Checkpoint:
    """The checkpoint at ``path``, after all its files were read and compared with its manifest. Collective.

    Raises:
        BrokenCheckpoint: it is damaged, on some node; the message names what is wrong.
    """
    manifest, wrong, parts = None, [], {}
    try:
        manifest = Manifest.read(path)
        whole, divided = _share(manifest, sharing)
        wrong = [said for record in whole if (said := damage(path, record))]
        wrong += [said for record in divided if (said := damage(path, record, sum_up=False))]
        if not wrong:
            at = sharing.ranks.index(sharing.rank), len(sharing.ranks)
            parts = {record.name: part_of_checksum(path / record.name, record.size, *at) for record in divided}
    except (BrokenCheckpoint, OSError) as error:
        wrong = [str(error)]
    told = messages.gather_to_main((None if manifest is None else manifest.save_id, wrong, parts))
    verdict: Any = None
    if told is not None:
        problems = list(dict.fromkeys(said for _, more, _ in told for said in more))
        if not problems and manifest is not None:
            problems = list(_damaged_in_parts(manifest, [one for *_, one in told]))
        verdict = problems, len({said for said, *_ in told}) > 1
    problems, differ = messages.broadcast_object(verdict)
    if problems or manifest is None:
        raise BrokenCheckpoint(f"{path} cannot be resumed from: {'; '.join(problems)}.")
    if differ:
        raise BrokenCheckpoint(f"{path} cannot be resumed from: on other nodes it is another one, of another save.")
    if manifest.nodes != sharing.nodes:
        raise BrokenCheckpoint(
            f"{path} cannot be resumed from: it is the part of node {manifest.node} of {manifest.nodes} "
            f"(save_on_each_node), and this run has {sharing.nodes} directories."
        )
    return Checkpoint(path, manifest)


def _damaged_in_parts(manifest: Manifest, told: Iterable[Mapping[str, int]]) -> Iterator[str]:
    """Of the files of which every rank has read a part, those that are damaged."""
    found: dict[str, int] = {}
    for parts in told:
        for name, part in parts.items():
            found[name] = found.get(name, 0) ^ part
    for name, all_parts in found.items():
        record = manifest.files[name]
        if (crc32 := finished(all_parts, record.size)) != record.crc32:
            yield damaged(record, crc32)


def _share(manifest: Manifest, sharing: Sharing) -> tuple[list[FileRecord], list[FileRecord]]:
    """The files that this rank reads, and those of which every rank reads a part.

    The first are those of the rank of its number, which it will need, and some of the rest; the others are large.
    """
    own: list[FileRecord] = []
    rest: list[FileRecord] = []
    divided: list[FileRecord] = []
    for record in sorted(manifest.files.values(), key=lambda record: record.size):
        of_rank = re.search(r"rank_?(\d+)\.|_(\d{5})\.", record.name)
        writer = int(of_rank[1] or of_rank[2]) if of_rank else -1
        if writer == sharing.rank:
            own.append(record)
        elif writer not in sharing.ranks:
            (divided if record.size >= _DIVIDED and sharing.nodes == 1 else rest).append(record)
    return own + rest[sharing.share()], divided


def newest_valid(directory: CheckpointDirectory, sharing: Sharing, messages: Messages) -> Checkpoint:
    """The newest checkpoint of ``directory`` that is undamaged on all nodes; damaged ones are warned of. Collective.

    Raises:
        BrokenCheckpoint: there is none; the message names what is wrong with each.
    """
    seen = directory.entries() if sharing.commits else []
    for entry in seen:
        if entry.manifest is None:
            logger.warning("%s is passed over: %s", entry.path.name, entry.problem)
    told = messages.gather_to_main(
        [(entry.path.name, entry.manifest and entry.manifest.save_id, entry.problem) for entry in seen]
        if sharing.commits
        else None
    )
    verdict: Any = None
    if told is not None:
        entries = [[tuple(entry) for entry in found] for found in told if found is not None]
        common = set.intersection(*({(name, save_id) for name, save_id, _ in found} for found in entries))
        # The order is the first directory's: generations are the same everywhere.
        whole = [(name, (name, save_id) in common) for name, save_id, problem in reversed(entries[0]) if not problem]
        verdict = whole, [problem for found in entries for _, _, problem in found if problem]
    candidates, problems = messages.broadcast_object(verdict)
    for name, everywhere in candidates:
        if not everywhere:
            problems.append(f"{name} is not on all nodes")
        else:
            try:
                return verified(directory.path / name, sharing, messages)
            except BrokenCheckpoint as error:
                problems.append(str(error))
        if sharing.rank == 0:
            logger.warning("%s is passed over: %s", name, problems[-1])
    raise BrokenCheckpoint(
        f"resume_from_checkpoint=True, but {directory.path} holds no checkpoint that is whole. "
        f"{' '.join(problems) or 'There is none.'} Start without it, or give the path of another checkpoint."
    )
