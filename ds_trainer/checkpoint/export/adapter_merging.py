"""Exports the adapters of a checkpoint, alone or merged into the weights layer by layer with peft's arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.export.checkpoint_weights import WholeTensors
from ds_trainer.checkpoint.export.meta_model import adapted_meta_model, meta_model_name
from ds_trainer.checkpoint.weights.adapter_files import computed_prompts, write_adapters
from ds_trainer.checkpoint.weights.model_description import ModelDescription
from ds_trainer.checkpoint.weights.saved_names import sections_of
from ds_trainer.checkpoint.weights.weight_files import WeightSpec
from ds_trainer.engine.weights import saved_tensors
from ds_trainer.utils.errors import ConfigError


def export_adapters(
    source: WholeTensors, description: ModelDescription, directory: Path, dtype: torch.dtype | None
) -> None:
    """Write only the adapters, as ``save_model`` does.

    Raises:
        ConfigError: the model cannot be built from the checkpoint's files.
    """
    model = adapted_meta_model(source.checkpoint, description, description.wrapped)
    adapters = [tensor for tensor in description.tensors if tensor.adapter]
    whole = {tensor.name: source.read(tensor, tensor.weight(dtype).dtype) for tensor in adapters}
    model.load_state_dict(whole, strict=False, assign=True)
    shapes = {tensor.name: tensor.shape for tensor in adapters}
    write_adapters(model, whole, shapes, computed_prompts(model), directory)


class MergedWeights:
    """Weights with the active adapters of their model merged into them.

    Args:
        source: the weights.
        description: the description of the same checkpoint.
        dtype: dtype for merging and writing; None keeps each tensor's dtype.

    Attributes:
        sections: the sections to write.

    Raises:
        ConfigError: the model cannot be built from the checkpoint's files, or its adapters cannot be merged.
    """

    def __init__(self, source: WholeTensors, description: ModelDescription, dtype: torch.dtype | None) -> None:
        self._source, self._active = source, description.active
        self._dtype = dtype
        self._tensors = {meta_model_name(t.name, description.wrapped, True): t for t in description.tensors}
        # `model` with the dtypes of the checkpoint's tensors, still on meta.
        model = adapted_meta_model(source.checkpoint, description, wrapped=True)
        tensors = {
            name: torch.empty(t.shape, dtype=t.weight(self._dtype).dtype, device="meta")
            for name, t in self._tensors.items()
        }
        model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights() if hasattr(model, "tie_weights") else None
        self._model = model
        if not hasattr(self._model, "merge_and_unload"):
            types = sorted({str(config["peft_type"]) for config in description.adapters.values()})
            raise ConfigError(
                f"{source.checkpoint}: adapters of type {', '.join(types)} cannot be merged into the weights. Use the "
                "adapters with their base model (export them without --merge-lora)."
            )
        # The tensors that merging produces, on meta.
        merged = copy.deepcopy(self._model).merge_and_unload(adapter_names=self._active)
        weights = [WeightSpec(name, tuple(t.shape), t.dtype) for name, t in saved_tensors(merged).items()]
        self.sections = sections_of(merged, weights)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors ``names``; a layer with adapters is in memory while its tensors are requested."""
        base = self._model.get_base_model()
        path = ""
        merged: dict[str, torch.Tensor] = {}
        for name in names:
            layer_path = _enclosing_adapter_layer(base, name)
            if layer_path is None:
                described = self._tensors[f"base_model.model.{name}"]
                yield name, self._source.read(described, described.weight(self._dtype).dtype)
                continue
            if layer_path != path:
                merged.clear()
                path, merged = layer_path, self._merge(base.get_submodule(layer_path), layer_path)
            yield name, merged[name]

    def _merge(self, module: Any, path: str) -> dict[str, torch.Tensor]:
        layer = copy.deepcopy(module)
        prefix = f"base_model.model.{path}."
        real = {
            name.removeprefix(prefix): self._source.read(tensor, tensor.weight(self._dtype).dtype)
            for name, tensor in self._tensors.items()
            if name.startswith(prefix)
        }
        layer.load_state_dict(real, assign=True)
        with torch.no_grad():
            whole = _merged_layer(layer, self._active)
        return {f"{path}.{name}": tensor.detach().contiguous() for name, tensor in whole.state_dict().items()}


def _enclosing_adapter_layer(base: nn.Module, name: str) -> str | None:
    """Returns the path of the outermost module with an adapter that contains ``name``; None if there is none."""
    module, parts = base, name.split(".")
    for depth, part in enumerate(parts[:-1]):
        module = getattr(module, part)
        if hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer"):
            return ".".join(parts[: depth + 1])
    return None


def _merged_layer(layer: Any, active: list[str]) -> nn.Module:
    """Merges a layer's adapters and returns the module by which peft replaces the layer."""
    unload: Callable[..., nn.Module] | None = getattr(layer, "unload_and_optionally_merge_module", None)
    if unload is not None:
        return unload(merge=True, safe_merge=False, adapter_names=active)
    layer.merge(safe_merge=False, adapter_names=active)
    base: nn.Module = layer.get_base_layer()
    return base
