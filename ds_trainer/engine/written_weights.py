"""Weights that a script writes reach the masters: those of callbacks (EMA, pruning, clipping, new values), of hooks and
of overridden methods.

DeepSpeed steps masters, and copies them to the weights after each step: at ZeRO 1 and 2 in float32 too. A value that a
script writes into a weight would be lost without a word. So before each update, and before a checkpoint, each master
that is not what its weight was rounded from takes the value of the weight. A rank looks at its own partition only, and
does not wait for the device. With masters in host memory, norms and sums show first whether anything was written.

At ZeRO 3 a rank writes its shard through ``deepspeed.zero.GatheredParameters``, or a small weight that DeepSpeed keeps
whole (``stage3_param_persistence_threshold``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ds_trainer.engine.expert_parallel import expert_slice
from ds_trainer.engine.own_updates import WithoutParameters
from ds_trainer.engine.state.flat_partitions import sub_group
from ds_trainer.engine.weight_movement import norms
from ds_trainer.engine.zero3.shard_access import WITH_GRADIENTS, ShardAccess, watch_copies, watch_state_dicts
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine

_CHUNK = 2**24  # elements that are compared at once, to bound the memory
_UNFROZEN = (
    "{name} was unfrozen (requires_grad) after the optimizer was made, which does not have it: it would not be "
    "trained. Let it require gradients when train() begins, and freeze it in on_train_begin."
)
_REPLACED = (
    "A script has replaced, removed or added {name} while the model trains: the optimizer and ZeRO have the parameters "
    "of the beginning. Copy values with parameter.copy_(values) under torch.no_grad(), or change the model before "
    "train()."
)
_SHAPE = "A script has given {name} the shape {found}; while it trains, it must keep {shape}."


def follow_script(engine: TrainingEngine) -> Callable[[str], AbstractContextManager[Any]]:
    """Code of a script runs beside the passes, and may write weights. Returns the context of callbacks of an event."""
    model, stage = engine.deepspeed.module, engine.stage
    engine.written = written = WrittenWeights(engine.deepspeed)
    engine.deepspeed.__deepcopy__ = partial(copy.deepcopy, model)
    watch_copies(model, stage)
    if stage == 3 or any(expert_slice(parameter) is not None for parameter in model.parameters()):
        watch_state_dicts(model)
    if stage == 0 and not (engine.deepspeed.bfloat16_enabled() or engine.deepspeed.fp16_enabled()):
        return nullcontext

    def around(event: str) -> AbstractContextManager[Any]:
        gradients = event in WITH_GRADIENTS
        if stage == 3:
            for group in engine.basic_optimizer.param_groups:
                group["params"] = group["params"] or WithoutParameters()
            return ShardAccess(model, written.after_callback, gradients)
        return ShardAccess(model, gradients=True) if gradients else nullcontext()

    return around


class _Copy(NamedTuple):
    """A master, the weights that are copied from it, and the context in which the master is in memory."""

    master: torch.Tensor
    weight: torch.Tensor
    present: AbstractContextManager[None]


class WrittenWeights:
    """The weights of one engine.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._wrapper = engine.optimizer
        self._named = list(engine.module.named_parameters())
        self._trained = {id(parameter) for _, parameter in self._named if parameter.requires_grad}
        self._places = self._found()
        self._views = list(self._flattened())
        self._offloaded = (
            engine.zero_offload_optimizer() is not None and engine.zero_offload_optimizer().device != "none"
        )
        self._sums: torch.Tensor | None = None
        self.note()

    def note(self) -> None:
        """After an update: what the weights are."""
        if self._offloaded:
            self._sums = self._summed()

    def _summed(self) -> torch.Tensor:
        weights = [copy.weight for copy in self._copies()]
        return torch.cat([norms(weights), *(one.sum(dtype=torch.float64).reshape(1) for one in weights)])

    @torch.no_grad()
    def follow(self) -> None:
        """Let the masters follow.

        Raises:
            ConfigError: the script has changed what is trained, or the shape of a weight.
        """
        self._check()
        self._bring_back()
        self.write_shards()
        if self._offloaded:
            assert self._sums is not None
            if torch.equal(self._sums, self._summed()):
                return
        for master, weight, present in self._copies():
            with present:
                for start in range(0, weight.numel(), _CHUNK):
                    part, written = master[start : start + _CHUNK], weight[start : start + _CHUNK]
                    written = written.to(part.device)
                    torch.where(written != part.to(written.dtype), written, part, out=part)
        self.note()

    def after_callback(self) -> None:
        """At ZeRO 3, where the next pass would find what a callback has replaced."""
        self._check()
        self.write_shards()

    def _found(self) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
        """Where modules have their parameters and parts, and those."""
        owned = [own for module in self._engine.module.modules() for own in (module._parameters, module._modules)]
        return [(own, tuple(own.values())) for own in owned]

    def _check(self) -> None:
        if any(len(own) != len(kept) or not all(map(is_, own.values(), kept)) for own, kept in self._places):
            self._places = self._found()
            known, now = {id(one) for _, one in self._named}, dict(self._engine.module.named_parameters())
            left = {id(one) for one in now.values()}  # pruning gives them other names
            changed = [name for name, one in self._named if id(one) not in left]
            changed += [name for name, one in now.items() if id(one) not in known and one.requires_grad]
            if changed:
                raise ConfigError(_REPLACED.format(name=changed[0]))
        for name, parameter in self._named:
            if parameter.requires_grad and id(parameter) not in self._trained:
                raise ConfigError(_UNFROZEN.format(name=name))

    def _flattened(self) -> Iterator[tuple[Any, int, int, torch.Size]]:
        """Weights that are views of a flat tensor, with its index, their offset in it, and their shape."""
        wrapper = self._wrapper
        if hasattr(wrapper, "round_robin_bit16_groups"):
            groups, offsets = wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets
        else:
            groups = getattr(wrapper, "bf16_groups", getattr(wrapper, "fp16_groups", []))
            groups = groups if self._flat() else []
            offsets = [[sum(p.numel() for p in group[:index]) for index in range(len(group))] for group in groups]
        for number, (group, places) in enumerate(zip(groups, offsets, strict=True)):
            for parameter, offset in zip(group, places, strict=True):
                yield parameter, number, offset, parameter.shape

    def _flat(self) -> list[torch.Tensor]:
        names = ("bit16_groups_flat", "bf16_groups_flat", "fp16_groups_flat")  # not those of stage 3
        return next((flat for name in names if (flat := getattr(self._wrapper, name, None))), [])

    def _bring_back(self) -> None:
        """A tensor that was set as ``parameter.data`` is copied to where DeepSpeed has the weight."""
        flat = self._flat()
        for parameter, number, offset, shape in self._views:
            own = flat[number]
            if parameter.data_ptr() == own.data_ptr() + offset * own.element_size():
                continue
            if parameter.shape != shape:
                name = next(name for name, one in self._named if one is parameter)
                raise ConfigError(_SHAPE.format(name=name, found=tuple(parameter.shape), shape=tuple(shape)))
            view = own[offset : offset + parameter.numel()].view(shape)
            view.copy_(parameter.data)
            parameter.data = view

    @torch.no_grad()
    def write_shards(self) -> None:
        """What was written into the weights that ZeRO 3 keeps whole reaches the shards."""
        kept = getattr(self._wrapper, "persistent_parameters", ())
        if not kept or self._engine.zero_quantized_weights():
            return
        import torch.distributed as dist

        shards, parts = [], []
        for parameter in kept:
            if parameter.ds_status.name == "AVAILABLE":
                size = parameter.partition_numel()
                part = parameter.data.reshape(-1)[dist.get_rank(parameter.ds_process_group) * size :][:size]
                parts.append(part)
                shards.append(parameter.ds_tensor.data[: len(part)])
        if parts:
            torch._foreach_copy_(shards, parts)

    def _copies(self) -> Iterator[_Copy]:
        """The masters of this rank. Those of ZenFlow, of SuperOffload and of weights on NVMe are not known."""
        from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
        from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
        from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        wrapper, kind = self._wrapper, type(self._wrapper)
        if kind is DeepSpeedZeroOptimizer_Stage3:
            pairs = zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_partitioned_groups_flat, strict=True)
            for index, (master, weight) in enumerate(pairs):
                if weight is not None and weight is not master:
                    yield _Copy(
                        master, weight, sub_group(wrapper, index)(True) if not master.numel() else nullcontext()
                    )
        elif kind in (DeepSpeedZeroOptimizer, BF16_Optimizer):
            of_zero = kind is DeepSpeedZeroOptimizer
            masters = wrapper.single_partition_of_fp32_groups if of_zero else wrapper.fp32_groups_flat_partition
            weights = wrapper.parallel_partitioned_bit16_groups if of_zero else wrapper.bf16_partitioned_groups
            for master, parts, group in zip(masters, weights, wrapper.real_dp_process_group, strict=True):
                yield _Copy(master, parts[torch.distributed.get_rank(group)], nullcontext())
        elif kind is FP16_Optimizer:
            for master, weight in zip(wrapper.fp32_groups_flat, wrapper.fp16_groups_flat, strict=True):
                yield _Copy(master, weight, nullcontext())
        elif kind is FP16_UnfusedOptimizer:
            for master_group, group in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
                for master, weight in zip(master_group, group, strict=True):
                    yield _Copy(master.data.reshape(-1), weight.data.reshape(-1), nullcontext())
