"""Loads the elements of single parameters and buffers without replacing the parameter objects.

An optimizer is built before the engine, over parameters that may still be on the meta device, and must find the same
objects afterwards. So no function here creates a new parameter; only its data is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.loading.weight_source import WeightSource
from ds_trainer.engine.state.flat_partitions import UnknownState, parameter_slice
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError, listed


def set_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Set ``parameter.data = data``, also for a parameter on meta, where torch does not allow the assignment.

    The parameter keeps its identity, attributes and hooks.
    """
    if not parameter.is_meta or data.is_meta:
        parameter.data = data
        return
    swapped: Any = parameter
    # The Python object stays (attributes, weak references of recurrent layers); the C++ tensor is swapped.
    torch._C._swap_tensor_impl(swapped, nn.Parameter(data, requires_grad=parameter.requires_grad))
    # Hooks are stored on the Python object and called from C++: assigning the lists registers them again.
    swapped._backward_hooks = swapped._backward_hooks
    swapped._post_accumulate_grad_hooks = swapped._post_accumulate_grad_hooks


def engine_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of ``tensor`` in an engine whose weights are ``dtype``; None: each keeps its own.

    Follows DeepSpeed 0.19.8 (``runtime/engine.py``, ``CASTABLE_DTYPES``): dtypes of 8 bits or less are kept.
    """
    from deepspeed.runtime.engine import CASTABLE_DTYPES

    return dtype if dtype is not None and tensor.dtype in CASTABLE_DTYPES else tensor.dtype


def check_source(model: nn.Module, source: WeightSource | None) -> None:
    """Check that every tensor on meta has a weight source.

    Raises:
        ConfigError: some parameters or buffers on meta have no source.
    """
    owner = type(model).__name__

    def unknown(named: Iterable[tuple[str, torch.Tensor]], saved: set[str] | None = None) -> list[str]:
        names = []
        for name, tensor in named:
            known = source is not None and source.has(name) and (saved is None or name in saved)
            if tensor.is_meta and not known:
                names.append(name)
        return names

    problems = []
    if parameters := unknown(model.named_parameters()):
        problems.append(
            f"{len(parameters)} parameters of {owner} are on the meta device without a weight source: "
            f"{listed(parameters, 5)}. Load the model with ds_trainer.from_pretrained, build it with its weights, or "
            "attach a source with ds_trainer.engine.loading.weight_source.attach_weight_source."
        )
    if buffers := unknown(model.named_buffers(), _saved_buffers(model)):
        problems.append(
            f"{len(buffers)} buffers of {owner} are on the meta device, and no file contains them: "
            f"{listed(buffers, 5)}. Build the model with real buffers "
            "(ds_trainer.engine.loading.empty_model.empty_model)."
        )
    if problems:
        raise ConfigError(problems)


def fill_slices(source: WeightSource, name: str, runs: Sequence[ShardSlice], flat: torch.Tensor) -> None:
    """Read ``runs``, which are runs of the slice stored in ``flat``, into their positions in ``flat``."""
    for run in runs:
        if len(run):
            source.fill(name, run, flat[run.start : run.stop])


def local_slice(name: str, parameter: torch.Tensor, tp_rank: int) -> ShardSlice:
    """Returns the slice of a parameter on meta that this tensor-parallel rank holds.

    Raises:
        ConfigError: DeepSpeed does not record how it partitioned the parameter, or the layer reshapes it.
    """
    shape = tuple(parameter.shape)
    try:
        shard_slice = parameter_slice(parameter, tp_rank)
    except UnknownState as error:
        raise ConfigError(
            f"{name} is on the meta device and cannot be loaded as a slice: {error}. Build the model with its weights, "
            "or set tensor_parallel_size=1."
        ) from error
    if shard_slice.slice_shape != shape:
        raise ConfigError(
            f"{name} is on the meta device and cannot be loaded as a slice: the layer has shape {shape}, which is not "
            f"a slice of {shard_slice.shape}. Build the model with its weights, or set tensor_parallel_size=1."
        )
    return shard_slice


@torch.no_grad()
def load_buffers(model: nn.Module, source: WeightSource | None, device: torch.device) -> None:
    """Move all buffers to ``device``; load persistent buffers that ``source`` has."""
    saved = _saved_buffers(model)
    for name, buffer in model.named_buffers():
        known = source is not None and name in saved and source.has(name)
        data = torch.empty_like(buffer, device=device) if known else buffer.data.to(device)
        if source is not None and known:
            flat = torch.empty(data.numel(), dtype=data.dtype, device=device)
            fill_slices(source, name, [ShardSlice.whole(tuple(data.shape))], flat)
            data = flat.view(data.shape)
        if buffer.is_meta == data.is_meta:
            buffer.data = data
            continue
        for module in model.modules():
            for key, entry in module._buffers.items():
                if entry is buffer:
                    module._buffers[key] = data


def _saved_buffers(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
