"""``OwnStep``: the ``training_step`` of a subclass, which may run backward passes itself.

It sees what it would see in transformers: losses are averaged over the ranks, and added up over the micro-batches of a
step. Scripts divide by the accumulation steps in one of two ways, and return the loss as they want it logged:

- since transformers 4.46 they divide it themselves: ``accelerator.backward(loss / steps)``, ``return loss / steps``;
- before, and under DeepSpeed, ``accelerator.backward(loss)`` divided: ``return loss / steps``.

In the second case alone, the returned loss is smaller than the one given to ``accelerator.backward``. The first
micro-batch of a run shows it, and runs again if its gradient was not divided.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.accelerator.trainer_accelerator import TrainerAccelerator
from ds_trainer.data.batch_structure import Dummy
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.plain_attributes import plain_attributes_restored
from ds_trainer.utils.seeds import random_state, restore_random_state

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine

logger = get_logger(__name__)

_NEAR = 1e-2  # relative; the two ways differ by a factor of 2 at least


class OwnStep:
    """Calls the ``training_step`` of a subclass.

    Args:
        method: the bound method.
        engine: runs the backward passes.
        accelerator: what the method calls ``backward`` of.
    """

    def __init__(
        self, method: Callable[..., torch.Tensor], engine: TrainingEngine, accelerator: TrainerAccelerator
    ) -> None:
        self._method = method
        self._engine = engine
        self._passes = engine.allow_own_passes(completes_late=True)
        self._accelerator = accelerator
        self._is_known = False

    def __call__(self, model: Any, batch: Any, **keywords: Any) -> torch.Tensor:
        """The contribution of the micro-batch to the loss of the global batch. Collective in the first call."""
        call, self._is_known = self._method if self._is_known else self._first, True
        with self._passes.of_script():
            loss = call(model, batch, **keywords)
        if loss is None:
            raise ConfigError(f"{self._method.__qualname__} returned None: let it return the loss, detached.")
        self._passes.check_complete()
        return self._accelerator.loss_contribution(torch.as_tensor(loss))

    def _first(self, model: Any, batch: Any, **keywords: Any) -> torch.Tensor:
        again, random = copy.copy(batch), random_state()
        given: list[torch.Tensor] = []
        self._passes.given = given
        loss = self._method(model, batch, **keywords)
        self._passes.given = None
        if loss is None or not self._expects_division(given, loss):
            return loss
        logger.debug("accelerator.backward divides by the accumulation steps, because training_step does not.")
        self._passes.divides = True
        self._engine.drop_step()
        self._engine.begin_micro_batch(self._engine.is_last, isinstance(batch, Dummy))
        restore_random_state(random)
        with plain_attributes_restored(getattr(self._method, "__self__", self)):
            return self._method(model, again, **keywords)

    def _expects_division(self, given: list[torch.Tensor], loss: Any) -> bool:
        """Whether the returned ``loss`` is smaller than the losses given to ``backward`` by the accumulation."""
        steps = self._accelerator.gradient_accumulation_steps
        if steps == 1:
            return False
        votes = torch.zeros(2, dtype=torch.int64)
        for value in {float(given[0]), float(sum(given))} if given else ():
            returned = float(loss)
            votes[0] |= int(abs(returned * steps - value) < _NEAR * abs(value))
            votes[1] |= int(abs(returned - value) < _NEAR * abs(value))
        divided, as_given = distributed.agree(votes)
        return bool(divided and not as_given)
