"""Reads single elements of the tensors in a model's weight files, using the libraries that define the formats."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import numpy as np
import torch

from ds_trainer.checkpoint.loading.weight_index import indexed_files
from ds_trainer.checkpoint.weights.element_tracer import Indices
from ds_trainer.utils.errors import ConfigError

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weight files of a model, in transformers' search order."""

_PAGE = 4096


class _FileEntry(NamedTuple):
    """The file and the shape of a tensor."""

    path: Path
    shape: tuple[int, ...]


@dataclass
class SampledFiles:
    """The weights in ``directory``; only the requested elements are read.

    Attributes:
        tensors: file and shape of each tensor, by name.
        reads: pages of 4 KiB that were read; elements on the same page count once.
    """

    directory: Path

    def __post_init__(self) -> None:
        self.reads = 0
        self._open: dict[Path, Any] = {}
        self._recent: tuple[str, torch.Tensor] | None = None
        self.tensors: dict[str, _FileEntry] = {}
        for path in weight_files(self.directory):
            file = self._file(path)
            if isinstance(file, dict):
                self.tensors.update({name: _FileEntry(path, tuple(tensor.shape)) for name, tensor in file.items()})
            else:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                self.tensors.update({name: _FileEntry(path, shape) for name, shape in shapes.items()})

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
            except Exception as error:  # each library raises its own types
                raise ConfigError(
                    f"{path} cannot be read as a weight file: {error}. Copy or download it again."
                ) from error
        return self._open[path]

    def whole(self, name: str) -> torch.Tensor:
        """Returns the memory-mapped tensor; its pages are read on access."""
        file = self._file(self.tensors[name].path)
        return file[name] if isinstance(file, dict) else file.get_tensor(name)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of the elements."""
        return self._mapped(name).dtype

    def _mapped(self, name: str) -> torch.Tensor:
        if self._recent is None or self._recent[0] != name:
            tensor = self.whole(name)
            _no_read_ahead(tensor)
            self._recent = (name, tensor)
        return self._recent[1]

    def elements(self, name: str, indices: Indices) -> torch.Tensor:
        """Returns the elements ``indices`` of the flattened tensor as float64."""
        tensor = self._mapped(name)
        self.reads += len(np.unique(indices * tensor.element_size() // _PAGE))
        if tensor.dim() == 0:
            return tensor.to(torch.float64).expand(len(indices))
        return tensor[torch.unravel_index(torch.from_numpy(indices), tensor.shape)].to(torch.float64)


def weight_files(directory: Path) -> list[Path]:
    """Returns the weight files in ``directory``; empty if there are none.

    Raises:
        ConfigError: an index is damaged, or lists a missing file.
    """
    first = next((directory / name for name in FILES if (directory / name).is_file()), None)
    if first is None or first.suffix != ".json":
        return [] if first is None else [first]
    return indexed_files(first)


def _no_read_ahead(tensor: torch.Tensor) -> None:
    """Advise the kernel to read single pages of a mapped tensor; by default it reads megabytes around each.

    Only a hint: a tensor that is not mapped, or on a system without ``madvise``, is still read correctly.
    """
    if not hasattr(mmap, "MADV_RANDOM") or tensor.numel() == 0:
        return
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.untyped_storage().nbytes() - begin - _offset(tensor)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_RANDOM)


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()
