"""One step: its micro-batches, their loss, the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_trainer.data.loader import FillerBatch
from ds_trainer.engine.training_engine import HALF_TYPES
from ds_trainer.parallel.attention import use_cut
from ds_trainer.training.auxiliary_loss import shows_auxiliary_loss, warn_of_undivided_part, with_unmasked_tokens
from ds_trainer.training.batches import check_names, checked_batch, labels_in, on_device
from ds_trainer.training.hooks.parts import Parts
from ds_trainer.training.item_count import ItemCount, count_for
from ds_trainer.training.loss import loss_in
from ds_trainer.training.model.randomness import randomness_of
from ds_trainer.training.sequence import check_cut, takes_shifted_labels
from ds_trainer.training.signatures import is_overridden
from ds_trainer.utils import distributed
from ds_trainer.utils.seeds import random_state, restore_random_state


class StepHooks(Parts):
    """What happens to the micro-batches of one optimizer step."""

    _compute_loss_takes: set[str]
    _training_step_takes: set[str]
    _nobody_looks_at_counts: bool
    _items: ItemCount | None = None
    # Batches of the step and their items, where losses are means: they are weighted with them.
    _counts: Mapping[int, tuple[Any, torch.Tensor]] = {}
    _loop_asks = False
    _names_checked = False
    _cut_checked = False
    _micro_batch = 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor]:
        """Fetch the micro-batches of one optimizer step and count the items of the global batch.

        Returns:
            The batches, and the number of items in all of them on all ranks: a float32 scalar on ``device``, at
            least 1. One all-reduce. (Where no hook of a subclass could look at it, an estimate that is corrected
            afterwards: :mod:`ds_trainer.training.item_count`.)
        """
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        self._counts = {}
        counts = [self.loss_rule.count(checked_batch(batch)) for batch in batches]
        if not self.loss_rule.normalised:
            self._counts = {id(batch): (batch, count) for batch, count in zip(batches, counts, strict=True)}
        own = count_for(device, torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64))
        # Batches are whole here, and all ranks of a replica hold the same one.
        self._items = ItemCount.of_all_ranks(own, self._nobody_looks_at_counts, self.replicas_group())
        return batches, self._items.divisor

    def begin_step(self, iterator: Iterator[Any], rounds: int) -> tuple[list[Any], ItemCount]:
        """:meth:`get_batch_samples` for the loop, which wants the count as the loss rule does."""
        batches, items = self.get_batch_samples(iterator, rounds, self.device)
        self.current_gradient_accumulation_steps = max(1, len(batches))
        self._micro_batch = 0
        if batches and self._nobody_looks_at_counts and not self._names_checked:
            check_names(batches[0], self.model)
            self._names_checked = True
        if batches and self.sequence_cut is not None and not self._cut_checked:
            check_cut(self.model_wrapped, self.sequence_cut, batches[0], self.groups, self._prepare_inputs)
            self._cut_checked = True
        if self._items is None or self._items.divisor is not items:  # a subclass counts in its own way
            self._items = ItemCount(torch.as_tensor(items, dtype=torch.float32, device=self.device))
        return batches, self._items

    def call_training_step(self, inputs: Any, items: ItemCount) -> torch.Tensor:
        """:meth:`training_step` with the arguments that it takes."""
        keywords = {"num_items_in_batch": items.divisor} if self._training_step_takes else {}
        numbers: AbstractContextManager[None] = nullcontext()
        if self.layout.replica_size > 1:
            place, step = self.groups.place, self.state.global_step
            numbers = randomness_of(self.layout, place, self.args.seed, step, self._micro_batch)
        self._micro_batch += 1
        with self.accelerator.batch(inputs), self._own_part(inputs) as own, numbers:
            return self.accelerator.share_of(self.training_step(self.model_wrapped, own, **keywords))

    @contextmanager
    def _own_part(self, inputs: Any, needs_labels: bool = True) -> Iterator[Any]:
        """This rank's part of the replica's batch, and the cut that attention must know while it is worked on."""
        if self.sequence_cut is None:
            yield inputs
            return
        groups = self.groups
        own, plan = self.sequence_cut.cut(inputs, groups.place.cp, groups.place.sp, needs_labels)
        with use_cut(plan, groups):  # around the backward pass too: recomputation runs attention again
            yield own

    @property
    def _reads_logits(self) -> bool:
        """Whether somebody besides the model's own loss may look at the logits of a training step."""
        hooks = ("compute_loss", "training_step")
        own = self.compute_loss_func is not None or any(is_overridden(self, StepHooks, hook) for hook in hooks)
        return own or self.label_smoother is not None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward pass of one micro-batch.

        Args:
            model: the engine.
            inputs: one micro-batch; where sequences are cut, this rank's part of it.
            num_items_in_batch: items of the global batch.

        Returns:
            The micro-batch's share of the global batch's mean loss, detached: summed over micro-batches and ranks it
            is that mean.
        """
        count = self._items
        if count is None or (num_items_in_batch is not None and num_items_in_batch is not count.divisor):
            count = ItemCount(torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=self.device))
        rule = self.loss_rule
        if not (model.training and self.model.training):  # a callback may have left it in evaluation mode
            model.train()
        own = None if rule.verified and rule.normalised else self._own_items(inputs)
        filler = isinstance(inputs, FillerBatch)
        inputs = self._prepare_inputs(inputs)
        leaf: torch.Tensor | None = None
        with self.compute_loss_context_manager():
            if rule.verified:
                loss = self.loss_of(model, inputs, count.divisor)
            else:
                leaf = count.divisor.clone().requires_grad_()
                loss = self.loss_of(model, dict(inputs), leaf)
                rule.verify(loss, leaf, lambda n: self._loss_without_graph(model, dict(inputs), n))
                # A rank without any target in its part cannot tell.
                if distributed.agree(torch.tensor([int(not rule.normalised)]))[0] and rule.normalised:
                    rule.reject()
        share = rule.contribution(loss, own, count)
        if filler:
            share = share * 0.0
        watched = leaf is not None and rule.normalised and share.requires_grad and self._has_several_micro_batches
        if watched:
            share.retain_grad()
        # Kept over steps, while a CUDA graph writes its next loss to the place of this one.
        kept = share.detach().clone() if share is loss else share.detach()
        self.engine.backward(share)
        if leaf is not None and watched:
            warn_of_undivided_part(leaf, share)
        return kept

    def _own_items(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Items of a micro-batch, on the device: as they were counted when it was fetched, where it is the same."""
        fetched, count = self._counts.get(id(inputs), (None, None))
        if count is None or fetched is not inputs:
            count = self.loss_rule.count(inputs)
        return count_for(self.device, count)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss of one micro-batch, and the model's outputs where ``return_outputs``.

        Override it for a loss of your own. Either return the *sum* over items divided by ``num_items_in_batch``, or
        leave that argument alone and return the *mean* over the micro-batch's items: both give the exact gradient
        (:mod:`ds_trainer.training.loss`).

        Called with ``num_items_in_batch`` by a ``training_step`` of a subclass (not by ours), the loss is multiplied by
        the number of ranks, as in transformers: ``accelerator.backward`` averages over them.

        Raises:
            ConfigError: the model returned no loss.
        """
        labels = None
        if self.compute_loss_func is not None:
            name = labels_in(inputs, self.label_names)
            labels = inputs.pop(name) if name is not None else None
            shifted = {}
            if "shift_labels" in inputs and takes_shifted_labels(self.compute_loss_func):
                shifted = {"shift_labels": inputs.pop("shift_labels")}
            outputs = model(**inputs)
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch, **shifted)
        elif self.label_smoother is not None:
            targets = self.label_smoother.take_targets(inputs)
            outputs = model(**inputs)
            loss = self.label_smoother(outputs, targets, num_items_in_batch)
            outputs = self.label_smoother.with_loss(outputs, loss)
        else:
            loss, outputs = self._loss_of_model(model, inputs, num_items_in_batch)
        if not self._loop_asks and num_items_in_batch is not None and self.loss_rule.normalised:
            loss = loss * self.layout.gradient_ranks
        return (loss, outputs) if return_outputs else loss

    @property
    def _has_several_micro_batches(self) -> bool:
        """Whether the global batch is more than one micro-batch of one rank."""
        return self.current_gradient_accumulation_steps * self.layout.gradient_ranks > 1

    def _loss_of_model(
        self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        """The loss that the model computes, as the loss rule wants it, and the model's outputs."""
        rule = self.loss_rule
        if rule.auxiliary and self.sequence_cut is not None:
            inputs = with_unmasked_tokens(inputs)
        if not rule.normalised or items is None:
            keywords = {"num_items_in_batch": None} if rule.normalised else {}
            outputs = model(**inputs, **keywords)
            return loss_in(outputs, model, inputs), outputs
        if not rule.auxiliary:
            first = not rule.verified
            before = random_state() if first and torch.is_grad_enabled() else None
            outputs = model(**inputs, num_items_in_batch=items)
            if not (first and shows_auxiliary_loss(outputs)):
                return loss_in(outputs, model, inputs), outputs
            rule.auxiliary = True  # from the first micro-batch on: it is computed once more
            if before is not None:
                restore_random_state(before)
        own = count_for(self.device, rule.count(inputs))
        outputs = model(**inputs, num_items_in_batch=own.clamp(min=1).to(torch.float32))
        return loss_in(outputs, model, inputs) * (own / items), outputs

    def compute_loss_context_manager(self) -> ExitStack:
        """The contexts in which the loss of a training step is computed: that of ``autocast_smart_context_manager``.

        Override it to add others.
        """
        contexts = ExitStack()
        contexts.enter_context(self.autocast_smart_context_manager())
        return contexts

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Nothing to do: the engine casts by itself (bf16, fp16, torch_autocast). Override it for another context.

        Args:
            cache_enabled: accepted for the reference's signature.
        """
        return nullcontext()

    def loss_of(self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> torch.Tensor:
        """:meth:`compute_loss` with the arguments that it takes."""
        keywords: dict[str, Any] = {"num_items_in_batch": items} if self._compute_loss_takes else {}
        with self._asked_by_loop():
            return self.compute_loss(model, inputs, **keywords)

    @contextmanager
    def _asked_by_loop(self) -> Iterator[None]:
        """Inside, ``compute_loss`` returns a share, not what a ``training_step`` of a subclass expects."""
        self._loop_asks = True
        try:
            yield
        finally:
            self._loop_asks = False

    def _loss_without_graph(self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            loss = self.loss_of(model, inputs, items)
        model.train()
        return loss

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The batch on this rank's device, floating-point tensors in the engine's precision (bf16, fp16)."""
        engine = self._engine or self._evaluation_engine
        precision = None if engine is None else HALF_TYPES.get(engine.precision)
        prepared: dict[str, Any] = on_device(inputs, self.device, precision)
        return prepared
