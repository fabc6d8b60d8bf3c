"""Which file of a checkpoint holds which elements: read once by all ranks together, a few headers each."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ds_trainer.checkpoint.pieces.element_types import TYPES, type_of
from ds_trainer.checkpoint.pieces.file import PiecesFile
from ds_trainer.parallel.places import Place


class _Tensor(NamedTuple):
    """What a file says of a tensor, but for which elements it holds."""

    name: str
    slice: Place  # without elements
    kinds: tuple[tuple[str, str], ...]  # with the type of their elements


_Layout = tuple[_Tensor, ...]
Runs = npt.NDArray[np.int64]
"""First and last element (exclusive) of each tensor of a layout: int64 ``[tensors, 2]``."""


@dataclass(frozen=True)
class _Listing:
    """Files that hold runs of the same slices of the same tensors: most of a checkpoint's do."""

    files: list[str]
    tensors: _Layout
    columns: Mapping[tuple[str, str], list[int]]  # by tensor and kind
    runs: Runs  # [files, tensors, 2]


class PieceMap:
    """Knows of every element of a checkpoint's tensors which file it is in.

    It takes 16 bytes for each tensor in each file; the headers of the files, of which every rank would have to read
    all, are a hundred times as large.

    Args:
        files: of each file, by name, what :func:`summary` gave.
    """

    def __init__(self, files: Mapping[str, tuple[_Layout, Runs]]) -> None:
        alike: dict[int, list[str]] = {}  # by identity: comparing layouts takes longer than all the rest
        for name, (layout, _) in files.items():
            alike.setdefault(id(layout), []).append(name)
        self._listings = []
        for names in alike.values():
            layout = files[names[0]][0]
            self._listings.append(_Listing(names, layout, _columns(layout), np.stack([files[n][1] for n in names])))
        self._kinds: dict[str, dict[str, torch.dtype]] = {}
        for listing in self._listings:
            for tensor in listing.tensors:
                kinds = self._kinds.setdefault(tensor.name, {})
                for kind, dtype in tensor.kinds:
                    kinds.setdefault(kind, type_of(dtype))

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        """What there is of a tensor, with the type of its elements."""
        return self._kinds.get(name, {})

    def files(self, name: str, kind: str, place: Place) -> list[str]:
        """The files with elements of ``place``; of a tensor of another shape, one that says so."""
        found = []
        for listing in self._listings:
            for column in listing.columns.get((name, kind), ()):
                cut, runs = listing.tensors[column].slice, listing.runs[:, column]
                if cut.shape != place.shape:
                    return listing.files[:1]
                if cut == place.run(0, 0):
                    held = np.flatnonzero((runs[:, 0] < place.stop) & (runs[:, 1] > place.start))
                else:  # slices of another tensor-parallel size
                    some = np.flatnonzero(runs[:, 0] < runs[:, 1]).tolist()
                    held = np.array([i for i in some if any(place.common(cut.run(*runs[i].tolist())))], np.int64)
                found += [listing.files[index] for index in held.tolist()]
        return found

    def files_with(self, name: str) -> list[str]:
        """All files that know a tensor."""
        return [
            file
            for listing in self._listings
            if any(tensor.name == name for tensor in listing.tensors)
            for file in listing.files
        ]


def _columns(layout: _Layout) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for column, tensor in enumerate(layout):
        for kind, _ in tensor.kinds:
            found.setdefault((tensor.name, kind), []).append(column)
    return found


def summary(file: PiecesFile) -> tuple[_Layout, Runs]:
    """What a file holds: tensors and slices, and which elements of these."""
    kinds: dict[tuple[str, Place], list[tuple[str, str]]] = {}
    for key, place in file.places.items():
        name, _, kind = key.rpartition("/")
        kinds.setdefault((name, place), []).append((kind, TYPES[file.dtype(key)]))
    ordered = sorted(kinds, key=lambda at: (at[0], at[1].start, at[1].stop, sorted(kinds[at])))
    layout = tuple(_Tensor(name, place.run(0, 0), tuple(sorted(kinds[name, place]))) for name, place in ordered)
    runs = [(place.start, place.stop) for _, place in ordered]
    return layout, np.array(runs, np.int64).reshape(-1, 2)


def map_together(
    names: Sequence[str],
    share: slice,
    ranks: Sequence[int] | None,
    read: Callable[[str], PiecesFile],
    gather: Callable[[Any], list[Any]],
) -> PieceMap:
    """The map of the files ``names``, of which each rank reads the headers of some. Collective.

    Args:
        names: of the files.
        share: of ``names``, what this rank reads.
        ranks: those that share the directory; None for all.
        read: opens a file.
        gather: what every rank says, in rank order.
    """
    own: dict[bytes, dict[str, Runs]] = {}  # tensors and slices are said once for all files that have the same
    for name in names[share]:
        layout, runs = summary(read(name))
        own.setdefault(zlib.compress(pickle.dumps(layout), 1), {})[name] = runs
    layouts: dict[bytes, _Layout] = {}
    found: dict[str, tuple[_Layout, Runs]] = {}
    for rank, said in enumerate(gather(own)):
        for packed, files in said.items() if ranks is None or rank in ranks else ():
            if packed not in layouts:
                layouts[packed] = pickle.loads(zlib.decompress(packed))
            found.update({name: (layouts[packed], runs) for name, runs in files.items()})
    return PieceMap(found)
