"""Single elements of the tensors in the weight files of a model, by the libraries that own the formats."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import numpy as np
import torch

from ds_trainer.checkpoint.loading.element_origins import Indices
from ds_trainer.checkpoint.loading.weight_index import indexed_files
from ds_trainer.utils.errors import ConfigError

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights of a model, in the order in which transformers looks for them."""

_PAGE = 4096


class FileTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]


@dataclass
class SampledFiles:
    """The weights in ``directory``, of which only the elements that are asked for are read.

    Attributes:
        tensors: what there is, by name.
        reads: pages of 4 KiB that were read; neighbors count once.
    """

    directory: Path

    def __post_init__(self) -> None:
        self.reads = 0
        self._open: dict[Path, Any] = {}
        self._recent: tuple[str, torch.Tensor] | None = None
        self.tensors: dict[str, FileTensor] = {}
        for path in weight_files(self.directory):
            file = self._file(path)
            if isinstance(file, dict):
                self.tensors.update({name: FileTensor(path, tuple(tensor.shape)) for name, tensor in file.items()})
            else:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                self.tensors.update({name: FileTensor(path, shape) for name, shape in shapes.items()})

    @property
    def bytes_read(self) -> int:
        """Bytes of the pages that were read."""
        return self.reads * _PAGE

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                if path.suffix == ".safetensors":
                    from safetensors import safe_open

                    self._open[path] = safe_open(str(path), framework="pt")
                else:
                    self._open[path] = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
            except Exception as error:  # each library has errors of its own
                raise ConfigError(f"{path} cannot be read as a weight file: {error}") from error
        return self._open[path]

    def whole(self, name: str) -> torch.Tensor:
        """The tensor, mapped: its pages are read when they are touched."""
        file = self._file(self.tensors[name].path)
        return file[name] if isinstance(file, dict) else file.get_tensor(name)

    def dtype(self, name: str) -> torch.dtype:
        """Type of the elements."""
        return self._mapped(name).dtype

    def _mapped(self, name: str) -> torch.Tensor:
        if self._recent is None or self._recent[0] != name:
            tensor = self.whole(name)
            _no_read_ahead(tensor)
            self._recent = (name, tensor)
        return self._recent[1]

    def at(self, name: str, indices: Indices) -> torch.Tensor:
        """Elements ``indices`` of the flattened tensor, in float64."""
        tensor = self._mapped(name)
        self.reads += len(np.unique(indices * tensor.element_size() // _PAGE))
        if tensor.dim() == 0:
            return tensor.to(torch.float64).expand(len(indices))
        return tensor[torch.unravel_index(torch.from_numpy(indices), tensor.shape)].to(torch.float64)


def weight_files(directory: Path) -> list[Path]:
    """The files of the weights in ``directory``; empty where it has none.

    Raises:
        ConfigError: an index is damaged, or names a file that is not there.
    """
    found = next((directory / name for name in FILES if (directory / name).is_file()), None)
    if found is None or found.suffix != ".json":
        return [] if found is None else [found]
    return indexed_files(found)


def _no_read_ahead(tensor: torch.Tensor) -> None:
    """Ask the kernel to read single pages of a mapped tensor: by itself it reads megabytes around each.

    Advice only; what is not mapped, or cannot be advised, is read as well.
    """
    if not hasattr(mmap, "MADV_RANDOM") or tensor.numel() == 0:
        return
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.untyped_storage().nbytes() - begin - _offset(tensor)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_RANDOM)


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()
