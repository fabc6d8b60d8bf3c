"""Merges the adapters of a saved model into its base, layer by layer: a directory that needs no PEFT to load."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.export.checkpoint_export import ExportResult, write_model
from ds_trainer.checkpoint.weights.model_description import DescribedTensor, description_files
from ds_trainer.engine.loading.weight_source import attached_weight_source
from ds_trainer.engine.weights import saved_tensors
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.recipes.saved_model import SavedModel
from ds_trainer.recipes.tokenizers import ByteTokenizer
from ds_trainer.training.loading.model_files import ADAPTER_CONFIG
from ds_trainer.training.loading.pretrained import from_pretrained
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import new_output, parse_json


class LoadedWeights:
    """Full tensors of a model on meta, read from the files of the base when they are asked for.

    Args:
        model: what :func:`ds_trainer.from_pretrained` returned.
        checkpoint: a directory with its configuration.
    """

    def __init__(self, model: Any, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._source = attached_weight_source(model)
        self._tensors = saved_tensors(model)
        # Files name a tied weight once; the model's source knows it by the first name of the parameter.
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = {name: first.get(id(tensor), name) for name, tensor in self._tensors.items()}

    def read(self, tensor: DescribedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the full tensor, converted to ``dtype``."""
        present = self._tensors[tensor.name]
        if not present.is_meta:
            return present.detach().to(dtype)
        shape = tuple(present.shape)
        flat = torch.empty(present.numel(), dtype=dtype)
        if self._source is None:
            raise ConfigError(f"{self.checkpoint}: no file has the weights of {tensor.name}.")
        self._source.fill(self._names[tensor.name], ShardSlice.whole(shape), flat)
        return flat.view(shape)


def merge_adapters(
    saved: SavedModel, directory: Path, max_shard_bytes: int, dtype: torch.dtype | None = None
) -> ExportResult:
    """Write the base of ``saved`` with its adapters merged, and its tokenizer or processor, to ``directory``.

    One layer is in memory at a time. The arithmetic is PEFT's, in the dtype in which the weights are written.

    Args:
        saved: a model with adapters.
        directory: must not exist, or be empty.
        max_shard_bytes: maximum size of one weight file.
        dtype: dtype of the weights; None: that of the base.

    Raises:
        ConfigError: there are no adapters, they cannot be merged, or the base does not fit them.
    """
    if saved.base is None:
        raise ConfigError(f"{saved.directory} has full weights: there is nothing to merge.")
    new_output(directory, "--to", "directory")
    with _naming_base(saved) as adapters, tempfile.TemporaryDirectory() as temporary:
        model = from_pretrained(adapters, dtype=dtype)
        if getattr(model.get_base_model(), "is_quantized", False):
            raise ConfigError(
                f"The base model in {saved.base} is quantized, and adapters cannot be merged into it exactly. Give the "
                "unquantized base with --base DIR."
            )
        described = Path(temporary)
        for file in description_files(model, _tokenizer(saved)):
            (described / file.name).parent.mkdir(parents=True, exist_ok=True)
            with (described / file.name).open("wb") as stream:
                file.write(stream)
        return write_model(LoadedWeights(model, described), described, directory, max_shard_bytes)


def _tokenizer(saved: SavedModel) -> Any:
    if saved.is_bytes:
        return ByteTokenizer()
    if not (saved.tokenizer_directory / "tokenizer_config.json").is_file():
        return None
    import transformers

    reader = "AutoProcessor" if saved.has_processor else "AutoTokenizer"
    return getattr(transformers, reader).from_pretrained(saved.tokenizer_directory, local_files_only=True)


@contextmanager
def _naming_base(saved: SavedModel) -> Iterator[Path]:
    """A copy of the adapters whose configuration names the base that was found, without its copies of the base."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        values = parse_json((saved.directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        (folder / ADAPTER_CONFIG).write_text(
            json.dumps({**values, "base_model_name_or_path": str(saved.base)}), encoding="utf-8"
        )
        for path in saved.directory.glob("adapter_model.*"):
            try:
                (folder / path.name).symlink_to(path.resolve())
            except OSError:  # a file system without links
                shutil.copyfile(path, folder / path.name)
        yield folder
