"""Which checkpoint to resume from: ranks look at it together, each at a share of its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.files import FileRecord, damage
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint, Manifest
from ds_trainer.checkpoint.protocol.sharing import Gather, Sharing
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class Checkpoint(NamedTuple):
    """A checkpoint all of whose files are as they were written."""

    path: Path
    manifest: Manifest


def verified(path: Path, sharing: Sharing, gather: Gather) -> Checkpoint:
    """The checkpoint at ``path``, after all its files were read and compared with its manifest. Collective.

    Raises:
        BrokenCheckpoint: it is damaged, on some node; the message names what is wrong.
    """
    manifest, wrong = None, []
    try:
        manifest = Manifest.read(path)
        wrong = [said for record in _share(manifest, sharing) if (said := damage(path, record))]
    except BrokenCheckpoint as error:
        wrong = [str(error)]
    told = gather((None if manifest is None else (manifest.save_id, manifest.nodes), wrong))
    problems = list(dict.fromkeys(said for _, more in told for said in more))
    if problems or manifest is None:
        raise BrokenCheckpoint(f"{path} cannot be resumed from: {'; '.join(problems)}.")
    if len({said for said, _ in told}) > 1:
        raise BrokenCheckpoint(f"{path} cannot be resumed from: on other nodes it is another one, of another save.")
    if manifest.nodes != sharing.nodes:
        raise BrokenCheckpoint(
            f"{path} cannot be resumed from: it is the part of node {manifest.node} of {manifest.nodes} "
            f"(save_on_each_node), and this run has {sharing.nodes} directories."
        )
    return Checkpoint(path, manifest)


def _share(manifest: Manifest, sharing: Sharing) -> list[FileRecord]:
    """The files that this rank reads: those of the rank of its number, which it will need, and some of the rest."""
    own, rest = [], []
    for record in sorted(manifest.files.values(), key=lambda record: record.size):
        of_rank = re.search(r"rank_?(\d+)\.|_(\d{5})\.", record.name)
        writer = int(of_rank[1] or of_rank[2]) if of_rank else -1
        if writer == sharing.rank:
            own.append(record)
        elif writer not in sharing.ranks:
            rest.append(record)
    return own + rest[sharing.share()]


def newest_valid(directory: CheckpointDirectory, sharing: Sharing, gather: Gather) -> Checkpoint:
    """The newest checkpoint of ``directory`` that is undamaged on all nodes; damaged ones are warned of. Collective.

    Raises:
        BrokenCheckpoint: there is none; the message names what is wrong with each.
    """
    seen = directory.entries() if sharing.commits else []
    for entry in seen:
        if entry.manifest is None:
            logger.warning("%s is passed over: %s", entry.path.name, entry.problem)
    told = gather(
        [(entry.path.name, entry.manifest and entry.manifest.save_id, entry.problem) for entry in seen]
        if sharing.commits
        else None
    )
    common = set.intersection(*({(name, save_id) for name, save_id, _ in found} for found in told if found is not None))
    problems = [problem for found in told for _, _, problem in found or () if problem]
    # The order is the first directory's: generations are the same everywhere.
    for name, save_id, problem in reversed(told[0]):
        if problem:
            continue
        if (name, save_id) not in common:
            problems.append(f"{name} is not on all nodes")
        else:
            try:
                return verified(directory.path / name, sharing, gather)
            except BrokenCheckpoint as error:
                problems.append(str(error))
        if sharing.rank == 0:
            logger.warning("%s is passed over: %s", name, problems[-1])
    raise BrokenCheckpoint(
        f"resume_from_checkpoint=True, but {directory.path} holds no checkpoint that is whole. "
        f"{' '.join(problems) or 'There is none.'} Start without it, or give the path of another checkpoint."
    )
