"""Giving one parameter of a model its elements: where they come from, and how the parameter stays the same object.

An optimizer is built before the engine, over parameters that may still be on the meta device. It must find the same
objects afterwards. So nothing here makes a new parameter; only what a parameter points to is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.loading.weight_source import WeightSource
from ds_trainer.engine.state.units import UnknownState, place_of
from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError

_SHOWN = 5  # names in a message


def set_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """``parameter.data = data``, also where the parameter is on meta, which torch refuses to assign over.

    The parameter keeps its identity, its attributes and its hooks.
    """
    if not parameter.is_meta or data.is_meta:
        parameter.data = data
        return
    held: Any = parameter
    # Python's side of the tensor stays (attributes, weak references of recurrent layers); torch's side is exchanged.
    torch._C._swap_tensor_impl(held, nn.Parameter(data, requires_grad=parameter.requires_grad))
    # Hooks are listed on Python's side and called from torch's: assigning the lists connects them again.
    held._backward_hooks = held._backward_hooks
    held._post_accumulate_grad_hooks = held._post_accumulate_grad_hooks


def engine_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type of ``tensor`` in an engine whose weights are ``dtype``; None: every one keeps its own.

    The rule of DeepSpeed 0.19.8 (``runtime/engine.py``, ``CASTABLE_DTYPES``): what is stored in 8 bits or less stays.
    """
    from deepspeed.runtime.engine import CASTABLE_DTYPES

    return dtype if dtype is not None and tensor.dtype in CASTABLE_DTYPES else tensor.dtype


def check_source(model: nn.Module, source: WeightSource | None) -> None:
    """Refuse a model on meta of which something is unknown.

    Raises:
        ConfigError: nothing says what the weights of some parameters, or the numbers of some buffers, are.
    """
    owner = type(model).__name__

    def unknown(named: Iterable[tuple[str, torch.Tensor]], saved: set[str] | None = None) -> list[str]:
        found = []
        for name, tensor in named:
            known = source is not None and source.has(name) and (saved is None or name in saved)
            if tensor.is_meta and not known:
                found.append(name)
        return found

    problems = []
    if parameters := unknown(model.named_parameters()):
        problems.append(
            f"{len(parameters)} parameters of {owner} are on the meta device, and nothing says what their weights are: "
            f"{_first(parameters)}. Load the model with ds_trainer.from_pretrained, build it with its weights, or say "
            "where they come from (ds_trainer.engine.loading.weight_source.attach_weights)."
        )
    if buffers := unknown(model.named_buffers(), _saved_buffers(model)):
        problems.append(
            f"{len(buffers)} buffers of {owner} are on the meta device, and no file has them: {_first(buffers)}. "
            "Build the model with real buffers (ds_trainer.engine.loading.empty_model.empty_model)."
        )
    if problems:
        raise ConfigError(problems)


def fill_from(source: WeightSource, name: str, places: Sequence[Place], flat: torch.Tensor) -> None:
    """Write the elements of ``places``, runs of the slice that ``flat`` is, to their places in it."""
    for place in places:
        if len(place):
            source.fill(name, place, flat[place.start : place.stop])


def held_here(name: str, parameter: torch.Tensor, tp_rank: int) -> Place:
    """All that this tensor-parallel rank holds of a parameter on meta.

    Raises:
        ConfigError: DeepSpeed does not say how it cut the parameter, or the layer keeps it in another shape.
    """
    shape = tuple(parameter.shape)
    try:
        place = place_of(parameter, tp_rank)
    except UnknownState as error:
        raise ConfigError(
            f"{name} is on the meta device and cannot be loaded as a slice: {error}. Build the model with its weights, "
            "or set tensor_parallel_size=1."
        ) from error
    if place.slice_shape != shape:
        raise ConfigError(
            f"{name} is on the meta device and cannot be loaded as a slice: the layer holds {shape}, which is no part "
            f"of {place.shape}. Build the model with its weights, or set tensor_parallel_size=1."
        )
    return place


@torch.no_grad()
def place_buffers(model: nn.Module, source: WeightSource | None, device: torch.device) -> None:
    """All buffers on ``device``; those that are saved with the model and that ``source`` has, with its numbers."""
    saved = _saved_buffers(model)
    for name, buffer in model.named_buffers():
        known = source is not None and name in saved and source.has(name)
        data = torch.empty_like(buffer, device=device) if known else buffer.data.to(device)
        if source is not None and known:
            flat = torch.empty(data.numel(), dtype=data.dtype, device=device)
            fill_from(source, name, [Place.whole(tuple(data.shape))], flat)
            data = flat.view(data.shape)
        if not buffer.is_meta:
            buffer.data = data
            continue
        for module in model.modules():
            for key, own in module._buffers.items():
                if own is buffer:
                    module._buffers[key] = data


def _saved_buffers(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
