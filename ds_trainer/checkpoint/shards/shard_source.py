"""Reads the shards of all ranks of a checkpoint as one source. Any layout reads only the elements that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ds_trainer.checkpoint.protocol.writer_group import WriterGroup
from ds_trainer.checkpoint.shards.shard_file import ShardFile, shard_key
from ds_trainer.checkpoint.shards.shard_map import ShardMap, build_shard_map
from ds_trainer.engine.state.buffers import Shapes
from ds_trainer.engine.state.state_shards import BUFFER, MASTER, WEIGHT, StateSource
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError


class ShardSource:
    """Reads shards from the files of a checkpoint (:class:`ds_trainer.engine.state.state_shards.StateSource`).

    Opens a file only when something in it is needed. Without a ``shard_map``, files are searched in the order of
    ``paths``, and the search stops as soon as all elements are found.

    Args:
        paths: all shard files. In the same layout, the files that this rank wrote come first.
        extras: this rank's states that do not have their parameter's shape, by parameter.
        shard_map: tells which file holds which elements; for another layout.
        opened: files of ``paths`` that are open already.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        extras: Mapping[str, dict[str, Any]] = MappingProxyType({}),
        shard_map: ShardMap | None = None,
        opened: Sequence[ShardFile] = (),
    ) -> None:
        self.directory = paths[0].parent
        self._paths = paths
        self._extras = extras
        self._map = shard_map
        self._opened = {file.path.name: file for file in opened}

    def _open(self, path: Path) -> ShardFile:
        if path.name not in self._opened:
            self._opened[path.name] = ShardFile(path)
        return self._opened[path.name]

    def _files(self, names: Sequence[str] | None) -> Iterator[ShardFile]:
        """The files of these names, or all files, each opened when it is reached."""
        yield from map(self._open, self._paths if names is None else [self.directory / name for name in names])

    def _file_with(self, name: str) -> ShardFile | None:
        """A file with shards of a tensor; one that is already open if possible."""
        for file in self._opened.values():
            if name in file.kinds:
                return file
        names = None if self._map is None else self._map.files_with(name)[:1]
        return next((file for file in self._files(names) if name in file.kinds), None)

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        """Kinds of state of a tensor, with their types; empty where it is unknown."""
        if self._map is not None:
            return self._map.kinds(name)
        file = self._file_with(name)
        return {} if file is None else file.kinds[name]

    def fill(self, name: str, kind: str, wanted: ShardSlice, target: torch.Tensor) -> None:
        """Read into ``target``, a flat tensor of ``len(wanted)`` elements. Other types are converted.

        Raises:
            ConfigError: the tensor has another shape in the checkpoint, or some elements are in none of its files.
        """
        key, missing = shard_key(name, kind), len(wanted)
        if missing == 0:
            return
        if kind == BUFFER:  # every rank has one of its own
            files: Iterable[ShardFile] = self._files_of_one_rank()
        else:
            files = self._files(None if self._map is None else self._map.files(name, kind, wanted))
        for file in files:
            present = file.slices.get(key)
            if present is None:
                continue
            if present.shape != wanted.shape:
                raise ConfigError(
                    f"{name} has the shape {list(wanted.shape)} in this model, but {list(present.shape)} in "
                    f"{file.path}. Create the model from the configuration that it was saved with."
                )
            missing -= copy_common(target, wanted, file.tensor(key), present) if len(present) else 0
            if missing <= 0:
                return
        raise ConfigError(
            f"{self.directory}: {missing} of {len(wanted)} elements of {name} ({kind}) are in none of its files. The "
            "saved model has no such parameter, or files of some ranks are missing."
        )

    def scalars(self, name: str) -> dict[str, Any]:
        """Optimizer states of a tensor that are plain numbers."""
        file = self._file_with(name)
        return {} if file is None else file.scalars.get(name, {})

    def extras(self, name: str) -> dict[str, Any]:
        """Further plain states of a tensor."""
        return self._extras.get(name, {})

    def buffers(self) -> Shapes:
        """Shapes and dtypes of the persistent buffers of the first rank of the files: this one, in the same layout."""
        return {
            name: (file.slices[shard_key(name, BUFFER)].shape, kinds[BUFFER])
            for file in self._files_of_one_rank()
            for name, kinds in file.kinds.items()
            if BUFFER in kinds
        }

    def _files_of_one_rank(self) -> Iterator[ShardFile]:
        prefix = self._paths[0].name.partition(".")[0]
        yield from (self._open(path) for path in self._paths if path.name.partition(".")[0] == prefix)


def open_shard_source(directory: Path, names: Sequence[str], writer_group: WriterGroup | None = None) -> ShardSource:
    """Returns a source for any layout. Each rank reads some headers, and the ranks exchange them. Collective.

    Args:
        directory: the checkpoint.
        names: its shard files.
        writer_group: the ranks that see the same ``directory``; default: all.
    """
    opened: dict[str, ShardFile] = {}

    def read(name: str) -> ShardFile:
        return opened.setdefault(name, ShardFile(directory / name))

    if writer_group is None:
        assigned, ranks = slice(distributed.rank(), None, distributed.world_size()), None
    else:
        assigned, ranks = writer_group.work_slice(), writer_group.ranks
    shard_map = build_shard_map(names, assigned, ranks, read, distributed.gather_objects)
    return ShardSource([directory / name for name in names], shard_map=shard_map, opened=list(opened.values()))


class WeightsOnlySource:
    """A source without optimizer states (:class:`ds_trainer.engine.state.state_shards.StateSource`)."""

    def __init__(self, source: StateSource) -> None:
        self._source = source

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        """Kinds of state of a tensor, with their types; empty where it is unknown."""
        kinds = self._source.kinds(name)
        return {kind: dtype for kind, dtype in kinds.items() if kind in (MASTER, WEIGHT, BUFFER)}

    def fill(self, name: str, kind: str, wanted: ShardSlice, target: torch.Tensor) -> None:
        """Write the elements of a shard into ``target``."""
        self._source.fill(name, kind, wanted, target)

    def scalars(self, name: str) -> dict[str, Any]:
        """Optimizer states of a tensor that are plain numbers."""
        return {}

    def extras(self, name: str) -> dict[str, Any]:
        """Further plain states of a tensor."""
        return {}

    def buffers(self) -> Shapes:
        """Shapes and dtypes of the persistent buffers."""
        return self._source.buffers()
