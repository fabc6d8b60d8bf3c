"""Adapters of a checkpoint: written alone, or merged into the weights one layer at a time, by peft's own arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.export.blueprint import adapted_blueprint, blueprint_name
from ds_trainer.checkpoint.export.checkpoint_weights import CheckpointWeights
from ds_trainer.checkpoint.weights.adapters import computed_prompts, write_adapters
from ds_trainer.checkpoint.weights.description import ModelDescription
from ds_trainer.checkpoint.weights.saved_names import sections_of
from ds_trainer.checkpoint.weights.weight_files import Weight
from ds_trainer.engine.weights import saved_tensors
from ds_trainer.utils.errors import ConfigError


def export_adapters(
    source: CheckpointWeights, description: ModelDescription, directory: Path, dtype: torch.dtype | None
) -> None:
    """Write the adapters alone, as ``save_model`` does.

    Raises:
        ConfigError: the model cannot be made from the checkpoint's files.
    """
    model = adapted_blueprint(source.checkpoint, description, description.wrapped)
    wanted = [tensor for tensor in description.tensors if tensor.adapter]
    whole = {tensor.name: source.read(tensor, tensor.weight(dtype).dtype) for tensor in wanted}
    model.load_state_dict(whole, strict=False, assign=True)
    shapes = {tensor.name: tensor.shape for tensor in wanted}
    write_adapters(model, whole, shapes, computed_prompts(model), directory)


class MergedWeights:
    """The weights of a checkpoint with its active adapters merged into them.

    Args:
        source: the weights.
        description: of the same checkpoint.
        dtype: type to merge in and to write; None keeps each tensor's own.

    Attributes:
        sections: what there is to write.

    Raises:
        ConfigError: the model cannot be made from the checkpoint's files, or its adapters cannot be merged.
    """

    def __init__(self, source: CheckpointWeights, description: ModelDescription, dtype: torch.dtype | None) -> None:
        self._source, self._active = source, description.active
        self._dtype = dtype
        self._tensors = {blueprint_name(t.name, description.wrapped, True): t for t in description.tensors}
        self._model = self._with_types(adapted_blueprint(source.checkpoint, description, wrapped=True))
        if not hasattr(self._model, "merge_and_unload"):
            kinds = sorted({str(config["peft_type"]) for config in description.adapters.values()})
            raise ConfigError(
                f"{source.checkpoint}: adapters of the kind {', '.join(kinds)} cannot be merged into weights. Leave "
                "--merge-lora out: the adapters are exported alone."
            )
        # What merging gives, tensor for tensor, without any numbers.
        merged = copy.deepcopy(self._model).merge_and_unload(adapter_names=self._active)
        weights = [Weight(name, tuple(t.shape), t.dtype) for name, t in saved_tensors(merged).items()]
        self.sections = sections_of(merged, weights)

    def _with_types(self, model: Any) -> Any:
        """``model`` with its tensors, still on meta, of the types that the checkpoint's have."""
        types = {
            name: torch.empty(t.shape, dtype=t.weight(self._dtype).dtype, device="meta")
            for name, t in self._tensors.items()
        }
        model.load_state_dict(types, strict=False, assign=True)
        model.tie_weights() if hasattr(model, "tie_weights") else None
        return model

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of these names; a layer with adapters is in memory while one of its tensors is asked for."""
        base = self._model.get_base_model()
        path = ""
        merged: dict[str, torch.Tensor] = {}
        for name in names:
            around = _adapted_around(base, name)
            if around is None:
                described = self._tensors[f"base_model.model.{name}"]
                yield name, self._source.read(described, described.weight(self._dtype).dtype)
                continue
            if around != path:
                merged.clear()
                path, merged = around, self._merge(base.get_submodule(around), around)
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
            whole = _unwrap(layer, self._active)
        return {f"{path}.{name}": tensor.detach().contiguous() for name, tensor in whole.state_dict().items()}


def _adapted_around(base: nn.Module, name: str) -> str | None:
    """The path of the outermost module with an adapter around the tensor ``name``; None where there is none."""
    module, parts = base, name.split(".")
    for depth, part in enumerate(parts[:-1]):
        module = getattr(module, part)
        if hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer"):
            return ".".join(parts[: depth + 1])
    return None


def _unwrap(layer: Any, active: list[str]) -> nn.Module:
    """What peft leaves in the place of a layer with adapters when it merges them."""
    unload: Callable[..., nn.Module] | None = getattr(layer, "unload_and_optionally_merge_module", None)
    if unload is not None:
        return unload(merge=True, safe_merge=False, adapter_names=active)
    layer.merge(safe_merge=False, adapter_names=active)
    base: nn.Module = layer.get_base_layer()
    return base
