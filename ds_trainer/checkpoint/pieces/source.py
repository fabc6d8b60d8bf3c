"""The pieces of all ranks of a checkpoint as one source, of which any layout reads just what it will hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ds_trainer.checkpoint.pieces.file import PiecesFile, key_of
from ds_trainer.checkpoint.pieces.piece_map import PieceMap, map_together
from ds_trainer.checkpoint.protocol.sharing import Sharing
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT, Source
from ds_trainer.parallel.places import Place, copy_common
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError


class PiecesSource:
    """Reads pieces from the files of a checkpoint (:class:`ds_trainer.engine.state.pieces.Source`).

    A file is opened when something of it is needed. What the first of ``paths`` hold needs no other file; without a
    ``piece_map`` the others are looked into one after the other.

    Args:
        paths: all files of pieces. In the same layout those come first that this rank wrote.
        extras: this rank's states of another shape than their parameters', by parameter.
        piece_map: says which file holds what; where the layout is another one.
        opened: files of ``paths`` that are open already.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        extras: Mapping[str, dict[str, Any]] = MappingProxyType({}),
        piece_map: PieceMap | None = None,
        opened: Sequence[PiecesFile] = (),
    ) -> None:
        self.directory = paths[0].parent
        self._paths = paths
        self._extras = extras
        self._map = piece_map
        self._opened = {file.path.name: file for file in opened}

    def _open(self, path: Path) -> PiecesFile:
        if path.name not in self._opened:
            self._opened[path.name] = PiecesFile(path)
        return self._opened[path.name]

    def _files(self, names: Sequence[str] | None) -> Iterator[PiecesFile]:
        """The files of these names, or one after the other of those there are."""
        yield from map(self._open, self._paths if names is None else [self.directory / name for name in names])

    def _that_knows(self, name: str) -> PiecesFile | None:
        """A file with pieces of a tensor; one that is open, if there is one."""
        for file in self._opened.values():
            if name in file.kinds:
                return file
        names = None if self._map is None else self._map.files_with(name)[:1]
        return next((file for file in self._files(names) if name in file.kinds), None)

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        if self._map is not None:
            return self._map.kinds(name)
        file = self._that_knows(name)
        return {} if file is None else file.kinds[name]

    def fill(self, name: str, kind: str, place: Place, target: torch.Tensor) -> None:
        """Read into ``target``, a flat tensor of ``len(place)`` elements; other types are converted.

        Raises:
            ConfigError: the tensor there has another shape, or some of it is nowhere.
        """
        key, missing = key_of(name, kind), len(place)
        if missing == 0:
            return
        for file in self._files(None if self._map is None else self._map.files(name, kind, place)):
            given = file.places.get(key)
            if given is None:
                continue
            if given.shape != place.shape:
                raise ConfigError(
                    f"{name} has the shape {list(place.shape)} here, and {list(given.shape)} in {file.path}: the model "
                    "is another one. Make it from the configuration that was saved."
                )
            missing -= copy_common(target, place, file.tensor(key), given) if len(given) else 0
            if missing <= 0:
                return
        raise ConfigError(
            f"{self.directory}: {missing} of {len(place)} elements of {name} ({kind}) are in none of its files. It "
            "was saved of a model that has no such parameter, or by fewer ranks than it says."
        )

    def scalars(self, name: str) -> dict[str, Any]:
        file = self._that_knows(name)
        return {} if file is None else file.scalars.get(name, {})

    def extras(self, name: str) -> dict[str, Any]:
        return self._extras.get(name, {})


def shared_source(directory: Path, names: Sequence[str], sharing: Sharing | None = None) -> PiecesSource:
    """A source for any layout: the ranks read some headers each and tell each other who has what. Collective.

    Args:
        directory: the checkpoint.
        names: its files of pieces.
        sharing: the ranks that see the same ``directory``; default: all.
    """
    opened: dict[str, PiecesFile] = {}

    def read(name: str) -> PiecesFile:
        return opened.setdefault(name, PiecesFile(directory / name))

    share = slice(distributed.rank(), None, distributed.world_size()) if sharing is None else sharing.share()
    ranks = None if sharing is None else sharing.ranks
    piece_map = map_together(names, share, ranks, read, distributed.gather_objects)
    return PiecesSource([directory / name for name in names], piece_map=piece_map, opened=list(opened.values()))


class OnlyWeights:
    """A source without the states of its optimizer (:class:`ds_trainer.engine.state.pieces.Source`)."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        kinds = self._source.kinds(name)
        return {kind: dtype for kind, dtype in kinds.items() if kind in (MASTER, WEIGHT, BUFFER)}

    def fill(self, name: str, kind: str, place: Place, target: torch.Tensor) -> None:
        self._source.fill(name, kind, place, target)

    def scalars(self, name: str) -> dict[str, Any]:
        return {}

    def extras(self, name: str) -> dict[str, Any]:
        return {}
