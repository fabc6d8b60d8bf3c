"""Maps elements to the checkpoint files that hold them. The ranks build the map together from the files' headers."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ds_trainer.checkpoint.shards.element_types import TYPES, type_of
from ds_trainer.checkpoint.shards.shard_file import ShardFile
from ds_trainer.parallel.shard_slices import ShardSlice


class _TensorSummary(NamedTuple):
    """The description of a tensor in a file, without the run of elements that the file holds."""

    name: str
    slice: ShardSlice  # with an empty run
    kinds: tuple[tuple[str, str], ...]  # with the names of their element types


_FileSummary = tuple[_TensorSummary, ...]
Runs = npt.NDArray[np.int64]
"""First and last element (exclusive) of each tensor of a file: int64 ``[tensors, 2]``."""


@dataclass(frozen=True)
class _FileGroup:
    """Files that hold runs of the same slices of the same tensors. Most files of a checkpoint form one group."""

    files: list[str]
    tensors: _FileSummary
    columns: Mapping[tuple[str, str], list[int]]  # by tensor name and kind
    runs: Runs  # [files, tensors, 2]


class ShardMap:
    """Knows the file that holds each element of a checkpoint's tensors.

    Takes 16 bytes per tensor and file. The headers of the files, which every rank would have to read otherwise, are a
    hundred times as large.

    Args:
        files: results of :func:`shard_summary`, by file name.
    """

    def __init__(self, files: Mapping[str, tuple[_FileSummary, Runs]]) -> None:
        same: dict[int, list[str]] = {}  # by identity: comparing summaries takes longer than everything else here
        for name, (tensors, _) in files.items():
            same.setdefault(id(tensors), []).append(name)
        self._groups = []
        for names in same.values():
            tensors = files[names[0]][0]
            self._groups.append(_FileGroup(names, tensors, _columns(tensors), np.stack([files[n][1] for n in names])))
        self._kinds: dict[str, dict[str, torch.dtype]] = {}
        for group in self._groups:
            for tensor in group.tensors:
                kinds = self._kinds.setdefault(tensor.name, {})
                for kind, dtype in tensor.kinds:
                    kinds.setdefault(kind, type_of(dtype))

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        """Returns the kinds of state that exist for a tensor, with their element types."""
        return self._kinds.get(name, {})

    def files(self, name: str, kind: str, wanted: ShardSlice) -> list[str]:
        """Returns the files with elements of ``wanted``; if the tensor has another shape there, one such file."""
        result = []
        for group in self._groups:
            for column in group.columns.get((name, kind), ()):
                slice_, runs = group.tensors[column].slice, group.runs[:, column]
                if slice_.shape != wanted.shape:
                    return group.files[:1]
                if slice_ == wanted.run(0, 0):
                    matches = np.flatnonzero((runs[:, 0] < wanted.stop) & (runs[:, 1] > wanted.start))
                else:  # written with another tensor-parallel size
                    nonempty = np.flatnonzero(runs[:, 0] < runs[:, 1]).tolist()
                    overlapping = [i for i in nonempty if any(wanted.common(slice_.run(*runs[i].tolist())))]
                    matches = np.array(overlapping, np.int64)
                result += [group.files[index] for index in matches.tolist()]
        return result

    def files_with(self, name: str) -> list[str]:
        """Returns all files with a shard of a tensor, empty shards included."""
        return [
            file
            for group in self._groups
            if any(tensor.name == name for tensor in group.tensors)
            for file in group.files
        ]


def _columns(tensors: _FileSummary) -> dict[tuple[str, str], list[int]]:
    columns: dict[tuple[str, str], list[int]] = {}
    for column, tensor in enumerate(tensors):
        for kind, _ in tensor.kinds:
            columns.setdefault((tensor.name, kind), []).append(column)
    return columns


def shard_summary(file: ShardFile) -> tuple[_FileSummary, Runs]:
    """Returns the tensors and slices that a file holds, and which run of elements of each."""
    kinds: dict[tuple[str, ShardSlice], list[tuple[str, str]]] = {}
    for key, slice_ in file.slices.items():
        name, _, kind = key.rpartition("/")
        kinds.setdefault((name, slice_), []).append((kind, TYPES[file.dtype(key)]))
    ordered = sorted(kinds, key=lambda entry: (entry[0], entry[1].start, entry[1].stop, sorted(kinds[entry])))
    tensors = tuple(
        _TensorSummary(name, slice_.run(0, 0), tuple(sorted(kinds[name, slice_]))) for name, slice_ in ordered
    )
    runs = [(slice_.start, slice_.stop) for _, slice_ in ordered]
    return tensors, np.array(runs, np.int64).reshape(-1, 2)


def build_shard_map(
    names: Sequence[str],
    assigned: slice,
    ranks: Sequence[int] | None,
    read: Callable[[str], ShardFile],
    gather: Callable[[Any], list[Any]],
) -> ShardMap:
    """Returns the map of the files ``names``. Each rank reads the headers of some of them. Collective.

    Args:
        names: the files' names.
        assigned: the part of ``names`` that this rank reads.
        ranks: the ranks that share the directory; None for all.
        read: opens a file.
        gather: returns the values of all ranks, in rank order.
    """
    local: dict[bytes, dict[str, Runs]] = {}  # a summary is sent once for all files that have it
    for name in names[assigned]:
        tensors, runs = shard_summary(read(name))
        local.setdefault(zlib.compress(pickle.dumps(tensors), 1), {})[name] = runs
    summaries: dict[bytes, _FileSummary] = {}
    files: dict[str, tuple[_FileSummary, Runs]] = {}
    for rank, by_summary in enumerate(gather(local)):
        for packed, runs_of in by_summary.items() if ranks is None or rank in ranks else ():
            if packed not in summaries:
                summaries[packed] = pickle.loads(zlib.decompress(packed))
            files.update({name: (summaries[packed], runs) for name, runs in runs_of.items()})
    return ShardMap(files)
