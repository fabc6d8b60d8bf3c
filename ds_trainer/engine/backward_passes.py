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

from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_STAGE_3 = (
    "{what} ZeRO 3 releases the weights during a backward pass, so a graph can be used only once, and not for second "
    "derivatives. Call the model again for each backward pass, or set zero_stage=2."
)


_CHANGED = (
    "training_step changes weights between two backward passes of a micro-batch, as adversarial training (FGM, SAM) "
    "does. parameter.grad has no gradient there, or that of one rank only (ZeRO {stage}, {ranks} ranks), so the change "
    "would not be that of one process. Train on one rank with zero_stage 0 or 1."
)


class BackwardPasses:
    """The backward passes of one engine.

    Args:
        engine: DeepSpeed's engine.
        stage: its ZeRO stage.
        ranks: ranks over which gradients are averaged.

    Attributes:
        is_dummy: whether the micro-batch has no samples: passes that the script begins with ``loss.backward()`` then
            give zeros.
        divides: whether losses given to ``accelerator.backward`` are divided by the accumulation steps.
        given: those losses, while they are recorded.
    """

    def __init__(self, engine: DeepSpeedEngine, stage: int, ranks: int) -> None:
        self._engine: Any = engine
        self._stage = stage
        self._zero = engine.optimizer if stage > 0 else None
        self._prologue = engine._backward_prologue
        self._running = False
        self._task = -1  # autograd's number of the pass whose beginning was seen
        self._passes = 0
        self._ranks = ranks
        self._weights: list[torch.Tensor] | None = None
        self.is_dummy = self.divides = False
        self.given: list[torch.Tensor] | None = None
        if not engine.is_deepcompile_enabled():
            self._engine._backward_prologue = lambda: None
            self._engine._backward_prologue_per_tensor = self._output_reached

    def begin_micro_batch(self, is_dummy: bool) -> None:
        """Called before the forward pass of each micro-batch."""
        self.is_dummy, self._passes = is_dummy, 0

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
    def watched(self) -> Iterator[None]:
        """Inside, no weight may change between two passes, where scripts cannot read whole gradients. For one step.

        Raises:
            ConfigError: one has changed, on this rank.
        """
        self._weights = None if self._ranks == 1 and self._stage < 2 else self._norms()
        try:
            yield
        except (AttributeError, TypeError) as error:
            if self._weights is not None and self._passes and "None" in str(error):
                text = _CHANGED.format(stage=self._stage, ranks=self._ranks)
                raise ConfigError(
                    f"training_step failed after a backward pass ({error}). If it reads gradients: {text}"
                ) from error
            raise
        finally:
            self._weights = None

    def _norms(self) -> list[torch.Tensor]:
        return [p.detach().norm() for p in self._engine.module.parameters() if p.requires_grad and p.numel()]

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
        if self._weights and self._passes > 1 and not all(map(torch.equal, self._weights, self._norms())):
            raise ConfigError(_CHANGED.format(stage=self._stage, ranks=self._ranks))
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
        for parameter in self._engine.module.parameters():
            if parameter.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                try:
                    if torch._C._will_engine_execute_node(node):
                        return True
                except RuntimeError:  # torch.autograd.grad for this parameter
                    return False
        return False
