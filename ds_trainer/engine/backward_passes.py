"""Backward passes that a script runs itself: several in a micro-batch, ``loss.backward()``, ``torch.autograd.grad``.

DeepSpeed 0.19.8 is made for one ``engine.backward`` after each ``engine.forward``. Other orders change gradients
without an error:

- hooks on the outputs of the model begin a backward pass in *every* pass over the graph, also in that of
  ``torch.autograd.grad``, and divide its gradients by the accumulation steps;
- the hooks begin no pass for a loss that did not come from ``engine.forward``;
- a second pass after the same forward pass overwrites the gradients of the first at stage 3;
- the first pass of the last micro-batch completes the reduction, and at stages 1 and 2 a second one is lost.

Here, a pass begins where the gradients of parameters are computed, once, and nothing is divided. The reduction is
completed by the pass that the loop runs itself, or before the update (:meth:`TrainingEngine.complete_gradients`). All
this is only done for runs with code of a script in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.engine.own_updates import OwnUpdates
from ds_trainer.engine.weights import is_released
from ds_trainer.engine.zero3.shard_access import ReleasedParameter, called_by_script, is_compiled
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

logger = get_logger(__name__)

_STAGE_3 = (
    "{what} ZeRO 3 releases the weights during a backward pass, so a graph can be used only once, and not for second "
    "derivatives. Call the model again for each backward pass, or set zero_stage=2."
)


_GRADIENT = (
    "training_step uses parameter.grad ({name}), which is not the gradient of one process: it is empty, or that of one "
    "rank before the reduction (ZeRO {stage}, {ranks}, {dtype}). Set max_grad_norm to clip, scale the loss "
    "instead of the gradient, or read it in on_pre_optimizer_step with deepspeed.utils.safe_get_full_grad. Adversarial "
    "training (FGM, SAM), which changes weights by their gradient, needs one rank and zero_stage=0 in float32."
)
_OF_MICRO_BATCH = (
    "training_step computes the gradient of %s with torch.autograd.grad. That is the gradient of one micro-batch of "
    "one rank, not of the step, so what follows from it (weights that it moves, as in SAM; weights of losses) depends "
    "on per_device_train_batch_size, gradient_accumulation_steps and the number of ranks. Use one rank and one "
    "micro-batch a step where it must not."
)
_SHARD = (
    "training_step uses the data of {name}, but ZeRO 3 has only a part of this weight on each rank. Gather it with "
    "deepspeed.zero.GatheredParameters, or set zero_stage=2."
)


class BackwardPasses:
    """The backward passes of one engine.

    Args:
        engine: DeepSpeed's engine.
        stage: its ZeRO stage.
        ranks: ranks over which gradients are averaged.
        updates: those that the script makes.

    Attributes:
        is_dummy: whether the micro-batch has no samples: passes that the script begins with ``loss.backward()`` then
            give zeros.
        divides: whether losses given to ``accelerator.backward`` are divided by the accumulation steps.
        given: those losses, while they are recorded.
    """

    def __init__(self, engine: DeepSpeedEngine, stage: int, ranks: int, updates: OwnUpdates) -> None:
        self._engine: Any = engine
        self._stage = stage
        self._zero = engine.optimizer if stage > 0 else None
        self._prologue = engine._backward_prologue
        self._running = False
        self._task = -1  # autograd's number of the pass whose beginning was seen
        self._passes = 0
        self._updates = updates
        self._shown: type[nn.Parameter] | None = None  # made in the first step, when it is known what is compiled
        self._facts: dict[str, Any] = {}
        if ranks > 1 or stage > 0 or engine.fp16_enabled():
            dtype = "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"
            self._facts = {"stage": stage, "ranks": counted(ranks, "rank"), "dtype": dtype}
        self._several = ranks * engine.gradient_accumulation_steps() > 1
        self._said = self.is_dummy = self.divides = False
        self.given: list[torch.Tensor] | None = None
        if not engine.is_deepcompile_enabled():
            self._engine._backward_prologue = lambda: None
            self._engine._backward_prologue_per_tensor = self._output_reached

    def begin_micro_batch(self, is_dummy: bool) -> None:
        """Called before the forward pass of each micro-batch."""
        self.is_dummy, self._passes = is_dummy, 0
        if self._stage >= 2:  # as in the forward pass, which a script may leave out
            self._engine.optimizer.clear_backward_seen_flag()

    def divides_next(self, loss: torch.Tensor) -> bool:
        """Whether ``accelerator.backward`` divides this loss by the accumulation steps."""
        if self.given is not None:
            self.given.append(loss.detach().clone())
        return self.divides

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a call of DeepSpeed's ``backward``.

        Raises:
            ConfigError: the pass goes through a graph that ZeRO-3 cannot use again.
        """
        again, self._running = self._passes > 0, True
        try:
            self._begin()
            yield
        except RuntimeError as error:
            if self._stage == 3 and again and not isinstance(error, torch.OutOfMemoryError):
                raise ConfigError(
                    _STAGE_3.format(what=f"A further backward pass in a micro-batch failed ({error}).")
                ) from error
            raise
        finally:
            self._running = False

    @contextmanager
    def of_script(self) -> Iterator[None]:
        """Context of a ``training_step`` of a script.

        Raises:
            ConfigError: it uses gradients or weights that are not whole.
        """
        kinds = nn.Parameter, ReleasedParameter
        shown = [p for p in self._engine.module.parameters() if self._facts and type(p) in kinds]
        if shown and self._shown is None:
            base = ReleasedParameter if self._stage == 3 and not is_compiled(self._engine.module) else nn.Parameter
            self._shown = self._watched_class(base, self._facts)
        released = ReleasedParameter if self._shown and issubclass(self._shown, ReleasedParameter) else nn.Parameter
        for parameter in shown:
            parameter.__class__ = self._shown
        self._updates.in_step = True
        try:
            yield
        finally:
            self._updates.in_step = False
            for parameter in shown:
                parameter.__class__ = released if is_released(parameter) else nn.Parameter

    def _watched_class(self, base: type[nn.Parameter], facts: dict[str, Any]) -> type[nn.Parameter]:
        """A class for parameters of the model that refuses what ``training_step`` must not use, beside ``base``."""
        updates = self._updates
        gradient: Any = torch.Tensor.grad
        values: Any = torch.Tensor.data

        def refused(parameter: Any, text: str) -> bool:
            if torch._C._current_graph_task_id() != -1 or not called_by_script(2):
                return False
            named = self._engine.module.named_parameters()
            name = next((name for name, one in named if one is parameter), "a weight")
            raise ConfigError(text.format(name=name, **facts))

        def read(parameter: Any) -> Any:
            _ = updates.pending and refused(parameter, _GRADIENT)
            return gradient.__get__(parameter)

        def write(parameter: Any, value: Any) -> None:
            _ = value is not None and refused(parameter, _GRADIENT)
            gradient.__set__(parameter, value)

        def read_data(parameter: Any) -> Any:
            _ = is_released(parameter) and refused(parameter, _SHARD)
            return values.__get__(parameter)

        class Watched(base):  # type: ignore[valid-type, misc]
            grad: Any = property(read, write, gradient.__delete__)
            data: Any = property(read_data, values.__set__)

        return Watched

    def check_complete(self) -> None:
        """After the ``training_step`` of a script.

        Raises:
            ConfigError: gradients of a ``loss.backward()`` were left in DeepSpeed's buckets.
        """
        if self._stage < 2:
            return
        assert self._zero is not None
        state = self._zero._backward_hook_state
        if state.hooks_fired_this_backward and not state.epilogue_ran_this_backward:
            raise ConfigError(
                "loss.backward() was called for a loss that was not computed by the `model` that training_step gets, "
                "but, for example, by self.model. Call self.accelerator.backward(loss) instead."
            )

    def _begin(self) -> None:
        """Begin a pass that computes gradients of parameters."""
        self._passes += 1
        self._updates.pending = True
        zero = self._zero
        if zero is not None and zero._backward_hook_state.epilogue_ran_this_backward:
            zero.clear_backward_seen_flag()  # DeepSpeed does it in the forward pass
        if zero is not None or self._engine._support_torch_style_backward:
            self._prologue()
        elif not self._running and self._engine.fp16_enabled():
            raise ConfigError("loss.backward() does not scale the loss for fp16: call self.accelerator.backward(loss).")

    def _output_reached(self, grad: torch.Tensor) -> torch.Tensor:
        """Called by autograd with the gradient of an output of the model."""
        if self._running or torch._C._functorch.maybe_current_level() is not None:
            return grad
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            if self._engine._running_engine_backward or self._reaches_parameters():
                self._begin()
            else:
                self._passes += 1
                if self._stage == 3 and torch.is_grad_enabled():
                    raise ConfigError(_STAGE_3.format(what="torch.autograd.grad was called with create_graph=True."))
        return grad * 0.0 if self.is_dummy else grad

    def _reaches_parameters(self) -> bool:
        """Whether autograd's current pass adds to the gradient of a parameter; ``torch.autograd.grad`` does not."""
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                try:
                    if torch._C._will_engine_execute_node(node):
                        return True
                except RuntimeError:  # torch.autograd.grad for this parameter
                    self._say_of_micro_batch(name)
                    return False
        return False

    def _say_of_micro_batch(self, name: str) -> None:
        """Warn once of a gradient of ``name`` that is not that of the step. What a loss takes is measured instead."""
        if self._updates.in_step and not self._said and self._several:
            self._said = True
            logger.warning(_OF_MICRO_BATCH, name)


def unusable(loss: torch.Tensor) -> ConfigError:
    """The error for a loss that is not one value, or has no graph to back-propagate through."""
    if loss.numel() != 1:
        shape = list(loss.shape)
        return ConfigError(f"The loss has the shape {shape}: return one value, such as the mean over the samples.")
    return ConfigError(
        "The loss has no gradient: it was detached (detach(), item(), numpy()), computed under torch.no_grad(), or "
        "depends on no parameter that is trained."
    )


def without_backward(stage: int) -> ConfigError:
    """The error for a step of which a rank has run no backward pass."""
    return ConfigError(
        f"training_step ran no backward pass in this step, so ZeRO {stage} has no gradients to reduce and to update "
        "with. Call self.accelerator.backward(loss); to skip a batch, with loss * 0.0."
    )
