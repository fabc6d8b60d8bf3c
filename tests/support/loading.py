"""Models on the meta device, and sources of their weights that count what they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.loading.weight_source import attach_weight_source
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common


class CountingSource:
    """The tensors of a model, by name; remembers how many elements were asked for.

    Args:
        tensors: parameters and persistent buffers.
        shift: how far the elements of a run are moved, for the control: what a wrong offset does.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], shift: int = 0) -> None:
        self.tensors, self.asked, self._shift = tensors, dict.fromkeys(tensors, 0), shift

    def has(self, name: str) -> bool:
        return name in self.tensors

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        full = self.tensors[name].detach()
        assert tuple(full.shape) == shard_slice.shape, (name, full.shape, shard_slice)
        assert target.shape == (len(shard_slice),)
        assert len(shard_slice)
        flat = full.contiguous().view(-1).roll(self._shift)
        self.asked[name] += copy_common(target, shard_slice, flat, ShardSlice.whole(shard_slice.shape))


def on_meta(model: nn.Module, shift: int = 0) -> nn.Module:
    """``model`` with its parameters on meta (ties kept) and a :class:`CountingSource` of what they were.

    Persistent buffers stay, but hold zeros: their numbers are the source's.
    """
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    saved = model.state_dict(keep_vars=True)
    buffers = {name: saved[name].detach().clone() for name, _ in model.named_buffers() if name in saved}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                setattr(module, key, made.setdefault(id(parameter), empty))
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.zero_()
    attach_weight_source(model, CountingSource({**parameters, **buffers}, shift))
    return model


def under_zero_init(make: Callable[[], nn.Module], **settings: Any) -> nn.Module:
    """A model made under ``deepspeed.zero.Init``, as scripts for plain DeepSpeed make it."""
    import deepspeed

    model = make()
    with deepspeed.zero.Init(module=nn.Module(), config_dict_or_path={"train_micro_batch_size_per_gpu": 1, **settings}):
        pass
    return deepspeed.zero.Init(  # type: ignore[no-any-return]
        module=model, config_dict_or_path={"train_micro_batch_size_per_gpu": 1, **settings}, dtype=torch.float32
    ).module
