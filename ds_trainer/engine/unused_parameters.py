"""Parameters without a gradient in a step stay as they are, as in PyTorch: on no rank, in none of its micro-batches.

DeepSpeed reduces zeros for them, which a decaying momentum and weight decay turn into an update; ZeRO-3 even leaves the
gradient of an earlier step in place. What reduces the gradients knows which it has not seen
(:mod:`ds_trainer.engine.seen_gradients`). A rank that has seen all need not ask the others: no parameter is unused. The
gradient norm counts the ranks that lack some, and only if all do, they exchange which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ds_trainer.engine.expert_parallel import is_expert
from ds_trainer.engine.gradient_norm import GradientNorm
from ds_trainer.engine.seen_gradients import SeenGradients
from ds_trainer.engine.state.separate_steps import SeparateSteps
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import listed
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class UnusedParameters:
    """Steps an engine without the parameters that a step has not used.

    Args:
        engine: DeepSpeed's engine.
        groups: the process groups.
        seen: the gradients of a step on this rank; None if they are not known.
        norm: the gradient norm, with which the ranks count; None if they count by themselves.
    """

    def __init__(
        self, engine: Any, groups: ParallelGroups, seen: SeenGradients | None, norm: GradientNorm | None
    ) -> None:
        self._seen, self._module = seen, engine.module
        self._norm = norm
        self._group: Any = groups.seq_data_parallel if groups.layout.seq_data_parallel_size > 1 else None
        self._device = engine.device
        self._votes: torch.Tensor | None = None
        self._agreed: set[int] | None = None
        self._warned = False
        self.steps = SeparateSteps(engine, groups.coordinates.tp)

    @contextmanager
    def dummy(self, gradient: torch.Tensor) -> Iterator[None]:
        """Context of the backward pass of a micro-batch without samples, whose gradients are ``gradient``, 0 or nan."""
        # Divided experts have the gradients of other ranks' tokens.
        seen, weights = self._seen, self._module.parameters()
        trained = [weight for weight in weights if weight.requires_grad and not is_expert(weight)]
        with ExitStack() as stack:
            for weight in trained:  # 0 / 0, which a loss without samples may be, has a gradient of nan
                stack.callback(weight.register_hook(lambda found: torch.zeros_like(found) + gradient).remove)
            if seen is not None:
                lacking = seen.without_gradient()
                seen.ignored = {index for index in lacking if not is_expert(seen.parameters[index])}
            yield
        if seen is not None:
            seen.forget(seen.ignored)  # none, if they were reduced in the meantime
            seen.ignored = set()

    def interrupted(self) -> None:
        """The backward pass of a step that will be dropped has ended with an error."""
        if self._seen is not None:
            self._seen.interrupted()

    def close(self) -> None:
        """Remove hooks from the parameters."""
        if self._seen is not None:
            self._seen.close()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context of one step of the engine. Collective."""
        seen = self._seen
        if seen is None:
            yield
            return
        unseen, seen.unseen = seen.unseen or set(), None
        if self._group is not None and not seen.same_on_ranks and seen.elsewhere is None:
            self._vote(bool(unseen))
        if not unseen and not self.steps.needed:
            yield
            return
        self._agreed = None
        with self.steps.without(lambda: self._unused(seen, unseen)):
            yield
        if self.steps.inexact and not self._warned:
            self._warned = True
            logger.warning(
                "Parameters without a gradient in a step (%s): their weights stay, but %s keeps states that cannot be "
                "divided, so their moments decay and their step counters advance, unlike in PyTorch.",
                listed(sorted(self.steps.inexact)),
                self.steps.optimizer_name,
            )

    def _vote(self, lacks: bool) -> None:
        if self._norm is not None:
            self._norm.vote = lacks
            return
        from deepspeed import comm

        self._votes = torch.tensor([float(lacks)], device=self._device)
        comm.all_reduce(self._votes, group=self._group)

    def _unused(self, seen: SeenGradients, unseen: set[int]) -> Collection[int]:
        """``id`` of the parameters that no rank has seen a gradient of. Collective if all ranks lack some."""
        if self._agreed is None:
            if unseen and self._group is not None and not seen.same_on_ranks:
                unseen = unseen - self._elsewhere(seen, unseen)
            self._agreed = {id(seen.parameters[index]) for index in unseen}
        return self._agreed

    def _elsewhere(self, seen: SeenGradients, unseen: set[int]) -> set[int]:
        """Indices of the parameters that some rank has seen a gradient of."""
        from deepspeed import comm

        times_used = seen.elsewhere
        if times_used is None:
            votes = self._votes if self._norm is None else self._norm.votes
            if votes is None or round(float(votes)) < distributed.group_size(self._group):
                return unseen  # a rank has seen all
            times_used = torch.tensor([index not in unseen for index in range(len(seen.parameters))], dtype=torch.int32)
            times_used = times_used.to(self._device)
            comm.all_reduce(times_used, op=comm.ReduceOp.MAX, group=self._group)
        return {index for index, times in enumerate(times_used.tolist()) if times > 0}
