"""Finds out on the first micro-batch of a run what its loss is: whether it uses the item count, its scale, its mean."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_trainer.data.batch_structure import number_of_samples
from ds_trainer.data.columns import base_model
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.auxiliary_loss import warn_of_undivided_part
from ds_trainer.training.loop.batch_splitting import joined, with_equal_rows
from ds_trainer.training.loop.item_count import ItemCount
from ds_trainer.training.loop.loss_computation import LossComputation, LossMethod
from ds_trainer.training.loop.loss_measurement import ENOUGH, LossMeasurement, few_samples
from ds_trainer.training.out_of_memory import NotRepeatable, is_out_of_memory
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.plain_attributes import owner_of, plain_attributes_restored
from ds_trainer.utils.ranks import reads, reporting
from ds_trainer.utils.seeds import random_state, restore_random_state
from ds_trainer.utils.undisturbed import undisturbed

logger = get_logger(__name__)


class FirstLoss:
    """Computes the loss of the first micro-batch with an item count that is part of the graph.

    Args:
        losses: has the rule to verify.
        method: computes the loss.
        items: items of the global batch.
        layout: the layout of the job.
        prepare: moves a batch to the device.
        several_micro_batches: whether the global batch is more than one micro-batch of one rank.
        checks_parts: whether a loss of a script may run more passes, to be compared with those of parts of the batch.
        found: called on all ranks once they know; the loss is then computed once more. None: it need not be.

    Attributes:
        items: see above; counted again if the loss is the mean of something else.
    """

    def __init__(
        self,
        losses: LossComputation,
        method: LossMethod,
        items: ItemCount,
        layout: ParallelLayout,
        prepare: Callable[[Any], dict[str, Any]],
        several_micro_batches: bool,
        checks_parts: bool,
        found: Callable[[], None] | None = None,
    ) -> None:
        self._losses = losses
        self._method = method
        self.items = items
        self._count = items.divisor.clone().requires_grad_()
        self._layout = layout
        self._prepare = prepare
        self._several = several_micro_batches
        self._checks_parts = several_micro_batches and checks_parts
        self._found = found
        self._agreed = False
        self._contribution: torch.Tensor | None = None
        self._depends = ""  # on what the loss depends, in words

    def compute(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """Compute the loss of ``inputs``, and verify the rule, with the same result on all ranks. Collective.

        Raises:
            NotRepeatable: memory ran out on this rank while it computed with the others what is no part of the step.
        """
        losses, rule = self._losses, self._losses.rule
        if self._found is None:
            loss = self._find_out(model, inputs)
        else:
            loss = None
            with undisturbed(model), torch.enable_grad(), plain_attributes_restored(owner_of(self._method.call)):
                model.train()
                try:
                    self._find_out(model, inputs)
                except (RuntimeError, MemoryError) as error:
                    if not (self._agreed and is_out_of_memory(error) and self._layout.world_size > 1):
                        raise
                    raise NotRepeatable(str(error)) from error
            self._found()
        if loss is not None:
            return loss
        equal = copy.copy(with_equal_rows(inputs) if rule.weighting.among_ranks else inputs)
        return losses.of(self._method, model, equal, self._count if rule.normalized else self._count.detach())

    def _find_out(self, model: nn.Module, inputs: Any) -> torch.Tensor | None:
        """Verify the rule; returns the loss if it had to be computed for that, with its graph. Collective."""
        losses, rule = self._losses, self._losses.rule
        if not rule.normalized:
            self._agreed = True
            self._measure(model, inputs)
            return None
        reads_before, random_before = reads(), random_state() if self._layout.world_size > 1 else None
        loss: torch.Tensor = losses.of(self._method, model, copy.copy(inputs), self._count)
        has_read = reads() > reads_before
        rule.verify(loss, self._count, lambda items: self._without_graph(model, copy.copy(inputs), items))
        # A rank without targets in its shard cannot decide.
        rejects, asks = distributed.agree(torch.tensor([int(not rule.normalized), int(has_read)]))
        self._agreed = True
        if self._found is not None:
            loss = loss.detach()  # it is not going to be used
        if rejects and rule.normalized:
            rule.reject()
        if asks and rule.normalized and random_before is not None:
            scale = self._scale(loss, model, copy.copy(inputs), random_before)
            # A batch without targets on any rank cannot tell; the next one is asked.
            rule.scale, rule.verified = (1.0, False) if scale is None else (scale, True)
        if rule.normalized and not rule.auxiliary and self._checks_parts:
            self._check(model, inputs)
        if not rule.normalized:
            self._measure(model, inputs)
        return loss

    def _check(self, model: nn.Module, inputs: Any) -> None:
        """Whether a loss that seems to be divided by the count is such a sum; reject what ignores it. Collective."""
        code = getattr(self._method.call, "__module__", None) or "", type(base_model(model)).__module__
        of_libraries = all(name.startswith(("ds_trainer.", "transformers.models.")) for name in code)
        if of_libraries and self._losses.loss_function is None:  # tests hold these
            return
        self._depends = self._measured(model, inputs, LossMeasurement.not_a_sum)
        if not self._depends:
            return
        once, twice = (self._without_graph(model, copy.copy(inputs), n * self._count.detach()) for n in (1, 2))
        ignores = bool(abs(once - twice) <= 1e-3 * abs(once))
        if distributed.agree(torch.tensor([int(ignores)]))[0]:
            self._losses.rule.reject()
            self._depends = ""

    def _measure(self, model: nn.Module, inputs: Any) -> None:
        """Measure what the losses of micro-batches are the mean of, and count the step by that. Collective."""
        losses, rule = self._losses, self._losses.rule
        rule.verified = True
        if not rule.weighting.settled:
            rule.use(self._measured(model, inputs, lambda measurement: measurement.weighting(rule.kept)))
            if not rule.weighting.settled:
                losses.look_again()
        if rule.weighting.count is not rule.count:
            self.items = losses.recount()

    def _measured(self, model: nn.Module, inputs: Any, measure: Callable[[LossMeasurement], Any]) -> Any:
        """What ``measure`` finds with samples of this rank, whose losses it computes as user code does."""
        losses, rule = self._losses, self._losses.rule
        shards = None if losses.sharder is None else losses
        batch, prepare = (inputs, copy.copy) if shards is None else (losses.beginning(losses.batches[0]), self._prepare)

        def loss_of(part: Any) -> torch.Tensor:
            losses.sources.ids = None
            with losses.sharded(part) as own:  # the samples of packed rows
                return torch.as_tensor(losses.of(self._method, model, prepare(own), self._count.detach()))

        def more() -> Any:
            found = few_samples(losses.loader, rule.count)
            if found is None and number_of_samples(batch) < ENOUGH and shards is None:
                found = joined(losses.batches[0], losses.batches[-1]) if len(losses.batches) > 1 else None
            if found is None or shards is not None:
                return None if found is None else losses.beginning(found)
            return self._prepare(found)

        plain = self._prepare.__module__.startswith(__name__.partition(".")[0])
        more_samples = more if plain and not losses.packed else None
        replica, owners = self._layout.coordinates(distributed.rank()).dp, [owner_of(self._method.call)]
        ids = losses.sources.ids
        settings: dict[str, Any] = {"owners": owners, "replica": replica, "more": more_samples, "shards": shards}
        found = measure(LossMeasurement(loss_of, model, batch, rule.count, training=True, **settings))
        losses.sources.ids = ids
        return found

    def _without_graph(self, model: nn.Module, inputs: Any, items: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad(), plain_attributes_restored(owner_of(self._method.call)):
            loss: torch.Tensor = self._losses.of(self._method, model, inputs, items)
        model.train()
        return loss

    def _scale(self, loss: torch.Tensor, model: nn.Module, inputs: Any, random: dict[str, Any]) -> float | None:
        """The factor in ``loss`` that follows from the number of ranks: 1, or the ranks that see different samples.

        None if no rank can tell, because all losses are 0 or not finite.
        Computes the loss once more with the same random numbers, while a single replica is reported. Collective.
        """
        now = random_state()
        restore_random_state(random)
        owner = owner_of(self._method.call)
        with torch.no_grad(), reporting(self._layout.tp), plain_attributes_restored(owner):
            alone: torch.Tensor = self._losses.of(self._method, model, inputs, self._count.detach())
        restore_random_state(now)
        factor = self._layout.seq_data_parallel_size
        to_scaled, to_plain = abs(loss.detach() - factor * alone), abs(loss.detach() - alone)
        scaled, plain = distributed.agree(torch.tensor([int(to_scaled < to_plain), int(to_plain < to_scaled)]))
        return float(factor) if scaled else 1.0 if plain else None

    def before_backward(self, contribution: torch.Tensor) -> None:
        """Keep the gradient of ``contribution`` for :meth:`after_backward`, if there are several micro-batches."""
        if self._losses.rule.normalized and contribution.requires_grad and self._several:
            contribution.retain_grad()
            self._contribution = contribution

    def after_backward(self) -> None:
        """Warn if a part of the loss is not divided by the item count, or depends on more. Waits for the device."""
        if self._contribution is not None and warn_of_undivided_part(self._count, self._contribution):
            return
        if self._depends and distributed.rank() == 0:
            logger.warning("%s", self._depends)
