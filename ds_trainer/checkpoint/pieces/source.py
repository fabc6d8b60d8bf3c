"""The pieces of all ranks of a checkpoint as one source, of which any layout reads just what it will hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.pieces.file import PiecesFile, key_of
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT, Source
from ds_trainer.parallel.places import Place, copy_common
from ds_trainer.utils.errors import ConfigError


class PiecesSource:
    """Reads pieces from the files of a checkpoint (:class:`ds_trainer.engine.state.pieces.Source`).

    Args:
        paths: all files of pieces.
        own: those of them to look into first, as this rank wrote them in the same layout; whatever is found whole
            there needs no other file.
        extras: this rank's states of another shape than their parameters', by parameter.
    """

    def __init__(self, paths: Sequence[Path], own: Sequence[Path], extras: dict[str, dict[str, Any]]) -> None:
        self.directory = paths[0].parent
        self._own = [PiecesFile(path) for path in own]
        self._paths = [path for path in paths if path not in own]
        self._others: list[PiecesFile] | None = None
        self._extras = extras
        self._kinds: dict[str, dict[str, torch.dtype]] = {}
        self._list(self._own)

    def _list(self, files: Sequence[PiecesFile]) -> None:
        for file in files:
            for key in file.places:
                name, _, kind = key.rpartition("/")
                self._kinds.setdefault(name, {}).setdefault(kind, file.dtype(key))

    def _files(self) -> Iterator[PiecesFile]:
        yield from self._own
        if self._others is None:
            self._others = [PiecesFile(path) for path in self._paths]
            self._list(self._others)
        yield from self._others

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        if name not in self._kinds:
            list(self._files())
        return self._kinds.get(name, {})

    def fill(self, name: str, kind: str, place: Place, target: torch.Tensor) -> None:
        """Read into ``target``, a flat tensor of ``len(place)`` elements; other types are converted.

        Raises:
            ConfigError: the tensor there has another shape, or some of it is nowhere.
        """
        key, missing = key_of(name, kind), len(place)
        for file in self._files():
            if missing == 0:
                return
            given = file.places.get(key)
            if given is None:
                continue
            if given.shape != place.shape:
                raise ConfigError(
                    f"{name} has the shape {list(place.shape)} here, and {list(given.shape)} in {file.path}: the model "
                    "is another one. Make it from the configuration that was saved."
                )
            missing -= copy_common(target, place, file.tensor(key), given)
        if missing:
            raise ConfigError(
                f"{self.directory}: {missing} of {len(place)} elements of {name} ({kind}) are in none of its files. It "
                "was saved of a model that has no such parameter, or by fewer ranks than it says."
            )

    def scalars(self, name: str) -> dict[str, Any]:
        for file in self._files():
            if name in file.scalars:
                return file.scalars[name]
        return {}

    def extras(self, name: str) -> dict[str, Any]:
        return self._extras.get(name, {})


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
