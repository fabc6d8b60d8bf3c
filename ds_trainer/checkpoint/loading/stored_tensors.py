"""Which tensors the weight files of a directory hold, and at which bytes. No element is read."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch

from ds_trainer.checkpoint.loading.weight_index import files_of_index, indexed_files
from ds_trainer.checkpoint.pieces.element_types import TYPES
from ds_trainer.checkpoint.weights.geometry import contiguous_strides
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, SINGLE_FILE, WeightFilesError, read_header
from ds_trainer.utils.errors import ConfigError, did_you_mean

BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
_BY_NAME = {written: dtype for dtype, written in TYPES.items()}


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        path: the file.
        dtype: type of the elements; None for a type that torch does not have.
        type_name: the same as the file calls it.
        shape: of the whole tensor.
        strides: between elements along each dimension, in elements.
        offset: byte of the file at which the first element lies.
    """

    path: Path
    dtype: torch.dtype | None
    type_name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements; 0 for a type that torch does not have."""
        return self.numel * (self.dtype.itemsize if self.dtype else 0)


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model directory by its key in the files.

    The files are searched in the order of transformers: ``model.safetensors``, its index, ``pytorch_model.bin``, its
    index.

    Raises:
        ConfigError: there are no weight files, a file of the index is missing, or a file is damaged.
    """
    for single, index in ((SINGLE_FILE, INDEX_FILE), (BIN_FILE, BIN_INDEX_FILE)):
        if (directory / single).is_file():
            return _read_file(directory / single)
        if (directory / index).is_file():
            return _read_indexed(directory, index)
    raise ConfigError(
        f"{directory} has no weights: none of {SINGLE_FILE}, {INDEX_FILE}, {BIN_FILE}, {BIN_INDEX_FILE} is there."
        f"{_other_weights(directory)} Name the directory of a saved model."
    )


def _other_weights(directory: Path) -> str:
    if not directory.is_dir():
        return " There is no such directory."
    others = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf"))
    return f" It has {', '.join(others[:5])}." if others else ""


def _read_indexed(directory: Path, index: str) -> dict[str, StoredTensor]:
    where, paths = files_of_index(directory / index), indexed_files(directory / index)
    found: dict[str, StoredTensor] = {}
    for path in paths:
        found.update(_read_file(path))
    lost = [key for key in where if key not in found]
    if lost:
        raise ConfigError(
            f"{directory / index} says that {where[lost[0]]} has {lost[0]}, which it has not."
            f"{did_you_mean(lost[0], found)} The index belongs to other files."
        )
    return found


def _read_file(path: Path) -> dict[str, StoredTensor]:
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_bin(path)


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    try:
        entries = read_header(path)
    except WeightFilesError as error:
        raise ConfigError(f"{error} Copy or download it again.") from None
    found = {}
    with path.open("rb") as stream:
        position = 8 + int.from_bytes(stream.read(8), "little")
    for key, entry in sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        dtype = _BY_NAME.get(entry["dtype"])
        if dtype is not None and end - begin != math.prod(shape) * dtype.itemsize:
            raise ConfigError(
                f"{path} is damaged: its header gives {key} {end - begin} bytes, and {list(shape)} of {entry['dtype']} "
                f"are {math.prod(shape) * dtype.itemsize}."
            )
        if begin != position:
            raise ConfigError(f"{path} is damaged: by its header {key} begins at byte {begin}, not at {position}.")
        position = end
        found[key] = StoredTensor(path, dtype, entry["dtype"], shape, contiguous_strides(shape), begin)
    return found


def _why_not(path: Path, said: str) -> str:
    """torch names the first thing that it does not unpickle, and advises to unpickle everything."""
    if refused := re.search(r"(?:GLOBAL|class) ([\w.]+)", said):
        return (
            f"{path} holds more than tensors and plain values: {refused[1]}, which can run code when it is loaded. It "
            "was not run. Use safetensors files of the model, from a source that you trust."
        )
    return f"{path} is damaged ({said.splitlines()[0][:200]}). Copy or download it again."


def _read_bin(path: Path) -> dict[str, StoredTensor]:
    """What ``torch.save`` wrote: tensors that have places in the file and no elements come out of a fake mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not is_zipfile(path):
        raise ConfigError(
            f"{path} is damaged, or in the format of torch before 1.6, which cannot be read in parts. Convert it once: "
            "load it with from_pretrained and write it again with save_pretrained."
        )
    try:
        with FakeTensorMode():
            content: Any = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ConfigError(_why_not(path, str(error))) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__} instead of tensors by name.")
    size = path.stat().st_size
    found = {}
    for key, tensor in content.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        storage = tensor.untyped_storage()
        begin = storage._checkpoint_offset
        if begin is None or begin + storage.nbytes() > size:
            raise ConfigError(f"{path} is damaged: the elements of {key} are not in it.")
        offset = begin + int(tensor.storage_offset()) * tensor.dtype.itemsize
        kind = TYPES.get(tensor.dtype, str(tensor.dtype))
        found[key] = StoredTensor(path, tensor.dtype, kind, tuple(tensor.shape), tensor.stride(), offset)
    return found
