"""Lists the tensors in the weight files of a directory and their byte offsets. No element is read."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch

from ds_trainer.checkpoint.loading.weight_index import indexed_files, read_weight_map
from ds_trainer.checkpoint.shards.element_types import TYPES
from ds_trainer.checkpoint.weights.strided_views import contiguous_strides
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, SINGLE_FILE, WeightFilesError, read_header
from ds_trainer.utils.errors import ConfigError, did_you_mean

BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
_BY_NAME = {written: dtype for dtype, written in TYPES.items()}


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        path: the file.
        dtype: dtype of the elements; None for a type that torch does not have.
        type_name: the file's name for the dtype.
        shape: full shape.
        strides: distance between elements along each dimension, in elements.
        offset: byte offset of the first element in the file.
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
        """Bytes of all elements; 0 for a type that torch does not have."""
        return self.numel * (self.dtype.itemsize if self.dtype else 0)


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Returns every tensor in a model directory by its key in the files.

    Files are searched in transformers' order: ``model.safetensors``, its index, ``pytorch_model.bin``, its index.

    Raises:
        ConfigError: there are no weight files, a file in the index is missing, or a file is damaged.
    """
    for single, index in ((SINGLE_FILE, INDEX_FILE), (BIN_FILE, BIN_INDEX_FILE)):
        if (directory / single).is_file():
            return _read_file(directory / single)
        if (directory / index).is_file():
            return _read_indexed(directory, index)
    raise ConfigError(
        f"{directory} has no weights: found none of {SINGLE_FILE}, {INDEX_FILE}, {BIN_FILE}, {BIN_INDEX_FILE}."
        f"{_other_weights(directory)} Pass the directory of a saved model."
    )


def _other_weights(directory: Path) -> str:
    if not directory.is_dir():
        return " The directory does not exist."
    others = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf"))
    return f" It contains {', '.join(others[:5])}." if others else ""


def _read_indexed(directory: Path, index: str) -> dict[str, StoredTensor]:
    weight_map, paths = read_weight_map(directory / index), indexed_files(directory / index)
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        tensors.update(_read_file(path))
    missing = [key for key in weight_map if key not in tensors]
    if missing:
        raise ConfigError(
            f"{directory / index} lists {missing[0]} in {weight_map[missing[0]]}, but that file does not contain it."
            f"{did_you_mean(missing[0], tensors)} The index belongs to other files; copy or download the model again."
        )
    return tensors


def _read_file(path: Path) -> dict[str, StoredTensor]:
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_bin(path)


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    try:
        entries = read_header(path)
    except (WeightFilesError, OSError) as error:
        raise ConfigError(f"{error} Copy or download it again.") from None
    tensors = {}
    with path.open("rb") as stream:
        position = 8 + int.from_bytes(stream.read(8), "little")
    for key, entry in sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        dtype = _BY_NAME.get(entry["dtype"])
        if dtype is not None and end - begin != math.prod(shape) * dtype.itemsize:
            raise ConfigError(
                f"{path} is damaged: its header assigns {end - begin} bytes to {key}, but {list(shape)} of "
                f"{entry['dtype']} takes {math.prod(shape) * dtype.itemsize}. Copy or download it again."
            )
        if begin != position:
            raise ConfigError(f"{path} is damaged: its header places {key} at byte {begin} instead of {position}.")
        position = end
        tensors[key] = StoredTensor(path, dtype, entry["dtype"], shape, contiguous_strides(shape), begin)
    return tensors


def _unpickling_problem(path: Path, message: str) -> str:
    """torch's message names the first global that it does not unpickle, and recommends disabling the check."""
    if rejected := re.search(r"(?:GLOBAL|class) ([\w.]+)", message):
        return (
            f"{path} contains more than tensors and plain values: {rejected[1]} can run code when it is loaded. It was "
            "not run. Use safetensors files of the model from a source that you trust."
        )
    return f"{path} is damaged ({message.splitlines()[0][:200]}). Copy or download it again."


def _read_bin(path: Path) -> dict[str, StoredTensor]:
    """Read a ``torch.save`` file in fake mode, which yields tensors with file offsets and no elements."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not is_zipfile(path):
        raise ConfigError(
            f"{path} is damaged, or in the format of torch before 1.6, which cannot be read in parts. Convert it once: "
            "load it with from_pretrained and save it with save_pretrained."
        )
    try:
        with FakeTensorMode():
            content: Any = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ConfigError(_unpickling_problem(path, str(error))) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains a {type(content).__name__} instead of a dictionary of tensors.")
    size = path.stat().st_size
    tensors = {}
    for key, tensor in content.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        storage = tensor.untyped_storage()
        begin = storage._checkpoint_offset
        if begin is None or begin + storage.nbytes() > size:
            raise ConfigError(
                f"{path} is damaged: it does not contain the elements of {key}. Copy or download it again."
            )
        offset = begin + int(tensor.storage_offset()) * tensor.dtype.itemsize
        kind = TYPES.get(tensor.dtype, str(tensor.dtype))
        tensors[key] = StoredTensor(path, tensor.dtype, kind, tuple(tensor.shape), tensor.stride(), offset)
    return tensors
