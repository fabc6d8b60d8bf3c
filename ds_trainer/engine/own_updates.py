"""``optimizer.step()`` and ``optimizer.zero_grad()`` that a script calls itself, inside of its ``training_step``.

They do what they do in transformers: nothing before the last micro-batch of a step, as accelerate's optimizer, and
there an update with the gradients so far, which are not clipped unless the script has called
``accelerator.clip_grad_norm_``. The loop's own update then finds no gradient, and is none. So every ZeRO stage gives
the weights of one process: the gradients are reduced first, wherever DeepSpeed keeps them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ds_trainer.engine.zero3.shard_access import called_by_script
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.utils.units import counted

logger = get_logger(__name__)

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # of DeepSpeed's engine
_ELSEWHERE = (
    "{call} was called by a script outside of training_step. The loop updates the weights once in each step: remove "
    "the call, or override training_step and call it there."
)
_GROUPS = (
    "A script has added a parameter group to the optimizer, but DeepSpeed partitioned the parameters when the training "
    "began: let create_optimizer make all groups, and freeze parameters in on_train_begin."
)
_SETS = "A script has set {}={} while the model trains, but the engine was made for {}: set it before train()."
_REPLACES = (
    "A script has replaced trainer.{} while the model trains, but DeepSpeed updates with that of the beginning: change "
    "the values in its param_groups, or return another one from create_optimizer and create_scheduler."
)
_FIXED = ("max_grad_norm", "gradient_accumulation_steps")
UPDATING = ("optimizer", "lr_scheduler")
_STATE = (
    "A script looks for parameters in the optimizer ({name}), but ZeRO and 16-bit optimizers have flat partitions: a "
    "change would have no effect. Take model.parameters(), read states of each on all ranks with deepspeed.utils."
    "safe_get_full_optimizer_state(parameter, 'exp_avg'), and change them with safe_set_full_optimizer_state."
)
_OTHER = (
    "{name}.step() was called for parameters of the trained model, but it is not the optimizer of the Trainer: with "
    "zero_stage={stage}, {dtype} and {ranks} it does not see their whole gradients. Put its parameter groups "
    "into one optimizer (override create_optimizer), or train on one rank with zero_stage=0 in float32."
)
_FOREIGN = (
    "%s.step() was called for tensors that are not parameters of the model. Each of %s updates its own copy, "
    "with the gradient of its own samples: make their module a part of the model, or average the gradients with "
    "self.accelerator.reduce(parameter.grad, reduction='mean')."
)


class _PartitionedState(defaultdict[Any, Any]):
    """``optimizer.state`` that refuses that a script looks for a parameter of the model in it."""

    def __init__(self, model: nn.Module, state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._model = model

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def __missing__(self, key: Any) -> Any:
        self._refuse(key)
        return super().__missing__(key)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or self._refuse(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As that of a dict."""
        _ = super().__contains__(key) or self._refuse(key)
        return super().get(key, default)

    def _refuse(self, key: Any) -> bool:
        named = self._model.named_parameters()
        if called_by_script(2) and (name := next((name for name, one in named if one is key), None)) is not None:
            raise ConfigError(_STATE.format(name=f"optimizer.state of {name}"))
        return False


class WithoutParameters(list[Any]):
    """``params`` of a group between the updates of ZeRO 3, of which a script wants the states of an optimizer."""

    def __iter__(self) -> Iterator[Any]:
        if called_by_script(1):
            raise ConfigError(_STATE.format(name="in param_groups, whose lists are empty between updates of ZeRO 3"))
        return super().__iter__()


class Unchanged:
    """What the engine was made for, and a script may not replace while the model trains.

    Args:
        args: the training arguments.
        updating: returns the optimizer and the schedule of the Trainer.
    """

    def __init__(self, args: Any, updating: Callable[[], tuple[Any, Any]]) -> None:
        self._args, self._updating = args, updating
        self._fixed, self._begun = {name: getattr(args, name) for name in _FIXED}, updating()

    def check(self) -> None:
        """Raise a ConfigError that names what a script has replaced."""
        for name, kept in self._fixed.items():
            if getattr(self._args, name) != kept:
                raise ConfigError(_SETS.format(name, getattr(self._args, name), kept))
        for name, now, begun in zip(UPDATING, self._updating(), self._begun, strict=True):
            if now is not begun:
                raise ConfigError(_REPLACES.format(name))


class OwnUpdates:
    """The updates of one engine that a script makes.

    Args:
        engine: makes them.

    Attributes:
        pending: a backward pass of the script has computed gradients since the last update.
        in_step: a ``training_step`` of a script runs.
        clips: the next update of the script is clipped.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        self._updated: bool | None = None
        self._warned = False
        self.pending = self.in_step = self.clips = False
        optimizer: Any = engine.basic_optimizer
        optimizer.step = self._instead(optimizer.step, self._step)
        optimizer.zero_grad = self._instead(optimizer.zero_grad, self._clear)
        optimizer.add_param_group = self._instead(optimizer.add_param_group, self._add)
        self._hook = register_optimizer_step_pre_hook(self._any_step)
        aliased = any(group.get("state") is optimizer.state for group in optimizer.param_groups)  # by GrokAdamW
        if (engine.stage > 0 or engine.precision != "fp32") and not aliased:
            optimizer.state = _PartitionedState(engine.deepspeed.module, optimizer.state)

    def close(self) -> None:
        """Free what knows the engine."""
        self._hook.remove()
        for name in ("step", "zero_grad", "add_param_group"):
            vars(self._engine.basic_optimizer).pop(name, None)

    def applied(self) -> bool | None:
        """For the loop's own update: whether that of the script was applied; None if there are gradients left, or it
        made none.
        """
        applied, self._updated = self._updated, None
        return None if self.pending else applied

    @property
    def made(self) -> bool:
        """Whether the script has updated the weights in this step."""
        return self._updated is not None

    @property
    def done(self) -> bool:
        """Whether the script has made the update of this step, with all gradients."""
        return self.made and not self.pending

    def _instead(self, original: Callable[..., Any], called: Callable[[], Any]) -> Callable[..., Any]:
        @wraps(original)
        def method(optimizer: Any, *args: Any, **keywords: Any) -> Any:
            if not called_by_script(1):
                return original(*args, **keywords)
            if callable(args[0] if args else keywords.get("closure")):
                raise ConfigError("optimizer.step(closure) is not supported: compute the gradients before the step.")
            return called()

        return MethodType(method, self._engine.basic_optimizer)  # schedules wrap bound methods only

    @staticmethod
    def _add() -> None:
        raise ConfigError(_GROUPS)

    def _step(self) -> None:
        engine = self._engine
        if not self.in_step:
            raise ConfigError(_ELSEWHERE.format(call="optimizer.step()"))
        if not (engine.is_last and self._has_gradients()):
            return
        counters = {name: getattr(engine.deepspeed, name) for name in _COUNTERS}
        again, self._updated, self.pending = self.made, None, True
        self._updated = engine.step(clip=self.clips)
        if again:  # one step of the loop
            vars(engine.deepspeed).update(counters)
        self._begin_again()

    def _clear(self) -> None:
        if not self._engine.is_last or not self._has_gradients():
            return
        if not self.in_step:
            raise ConfigError(_ELSEWHERE.format(call="optimizer.zero_grad()"))
        updated, self.pending = self._updated, True
        self._engine.drop_step()
        self._updated = updated
        self._begin_again()

    def _begin_again(self) -> None:
        assert self._engine.passes is not None
        self.pending = self.clips = False
        if self._engine.stage >= 2:  # as before a forward pass
            self._engine.deepspeed.optimizer.clear_backward_seen_flag()
        self._engine.begin_micro_batch(True, self._engine.passes.is_dummy)

    def _has_gradients(self) -> bool:
        """A loss that did not come from the engine shows in the gradients of the model alone."""
        return self.pending or any(p.grad is not None for p in self._engine.deepspeed.module.parameters())

    def _any_step(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        """Called before any optimizer of the process steps."""
        engine = self._engine
        if optimizer is engine.basic_optimizer or not (self.in_step and called_by_script(1)):
            return
        if engine.stage == 0 and engine.precision == "fp32" and engine.layout.world_size == 1:
            return
        own = {id(parameter) for parameter in engine.deepspeed.module.parameters()}
        name, ranks = type(optimizer).__name__, engine.layout.world_size
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                _OTHER.format(name=name, stage=engine.stage, dtype=engine.precision, ranks=counted(ranks, "rank"))
            )
        if ranks > 1 and not self._warned:
            self._warned = True
            (logger.warning if distributed.rank() == 0 else logger.debug)(_FOREIGN, name, counted(ranks, "rank"))
