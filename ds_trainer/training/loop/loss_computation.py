"""``LossComputation``: the loss of one micro-batch, for training and evaluation.

It implements ``Trainer.compute_loss``, calls the ``compute_loss`` of a subclass, and applies sequence sharding. The
rule that turns the loss of a micro-batch into a contribution to the loss of the global batch is in
:mod:`ds_trainer.training.loop.loss_rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ds_trainer.data.batch_structure import Dummy
from ds_trainer.data.sequence_sharding import SequenceSharder
from ds_trainer.data.sharded_batch import ShardedBatch, plain_batches
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.auxiliary_loss import shows_auxiliary_loss, with_unmasked_tokens
from ds_trainer.training.loop.batches import checked_batch, labels_in
from ds_trainer.training.loop.item_count import ItemCount, count_for
from ds_trainer.training.loop.loss_rule import LossRule, loss_in
from ds_trainer.training.loop.source_losses import SourceLosses
from ds_trainer.training.signatures import accepted_arguments, takes_shifted_labels
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.seeds import random_state, restore_random_state

if TYPE_CHECKING:
    from ds_trainer.data.packing.batch import PackedFormat
    from ds_trainer.training.loop.batch_census import SeenSamples
    from ds_trainer.training.model.chunked_loss.chunked_loss import ChunkedLoss
    from ds_trainer.training.model.label_smoothing import LabelSmoother

logger = get_logger(__name__)

_LONGEST_WAIT = 512  # steps between two measurements; no more after it, because the data has samples of one length

USE_THE_COUNT = frozenset({"compute_loss", "training_step", "get_batch_samples"})
"""Methods that receive the item count of the global batch, or train with the accelerator."""


class LossMethod(NamedTuple):
    """``compute_loss`` of a Trainer, as a subclass may override it."""

    call: Callable[..., Any]
    takes_item_count: bool
    """Whether it takes ``num_items_in_batch``."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> LossMethod:
        """Inspect the signature of ``function``."""
        return cls(function, bool(accepted_arguments(function, {"num_items_in_batch"})))


class LossComputation:
    """Computes losses of micro-batches.

    Args:
        rule: turns a loss into a contribution to the loss of the global batch.
        loss_function: ``compute_loss_func`` of the Trainer.
        smoother: computes the loss with label smoothing.
        label_names: keys of a batch that may have labels.
        sharder: shards the sequences of a batch over the ranks of a replica; None without sequence sharding.
        layout: the layout of the job.
        device: the device of this rank.
        overlap_count: whether the all-reduce of the item count may run during the first forward pass. Only possible
            if no user code can read the count.
        check: returns a batch if it can be one.
        chunked: computes the loss of a linear head without the logits of whole sequences.
        sources: records the losses of tokens by their source.
        packed: whether batches are packed rows, whose samples attention computes one by one.

    Attributes:
        rule: see above; replaced if ``model_accepts_loss_kwargs`` is set.
        sharder, packed, check, chunked, sources, label_names, overlap_count, loss_function: see above.
        for_loop: whether ``compute_loss`` returns a contribution, as the loop needs it. Otherwise it returns the value
            that the ``training_step`` of a subclass expects, whose ``accelerator.backward`` averages over the ranks.
        first_samples: those of the first steps, with which the first evaluations are compared.
        batches: those of a step whose losses are not known yet.
        loader: of the training; a measurement may read samples of its dataset.
        items: item count of the current step.
        empty: whether the last micro-batch has nothing that its loss is a mean of, as far as the host knows.
        defers_outputs: whether also an evaluation that wants outputs gets deferred logits.
        rows: the form of packed rows, if experts need to know which of their tokens are padding.
    """

    defers_outputs = empty = for_loop = False
    rows: PackedFormat | None = None

    def __init__(
        self,
        *,
        rule: LossRule,
        loss_function: Callable[..., torch.Tensor] | None,
        smoother: LabelSmoother | None,
        label_names: Sequence[str],
        sharder: SequenceSharder | None,
        layout: ParallelLayout,
        device: torch.device,
        overlap_count: bool,
        sources: SourceLosses,
        chunked: ChunkedLoss,
        check: Callable[[Any], Any] = checked_batch,
        packed: bool = False,
    ) -> None:
        self.rule = rule
        self.chunked = chunked
        self.sources = sources
        self.check = check
        self.sharder = sharder
        self.packed = packed
        self.batches: Sequence[Any] = ()
        self.loader: Any = None
        self.first_samples: SeenSamples | None = None
        self.items: ItemCount | None = None
        self.overlap_count = overlap_count
        # Batches of the step and their items, which are the weights of mean losses.
        self._counted: Mapping[int, tuple[Any, torch.Tensor]] = {}
        self._steps_to_look = self._last_wait = 0
        self._superseded: torch.Tensor | None = None  # the count of the step before it was counted again
        self.loss_function = loss_function
        self._shifts_for_function = loss_function is not None and takes_shifted_labels(loss_function)
        self._smoother = smoother
        self.label_names = tuple(label_names)
        self._layout = layout
        self._device = device
        self._warned = False

    @property
    def normalized(self) -> bool:
        """``model_accepts_loss_kwargs`` of the Trainer: whether the loss is a sum divided by the number of items."""
        return self.rule.normalized

    @normalized.setter
    def normalized(self, value: bool) -> None:
        self.rule = LossRule(self.rule.count, value, self.rule.auxiliary, balance=self.rule.balance)

    def release(self) -> None:
        """Drop the references to the model."""
        self._smoother = self.sharder = self.loader = self._superseded = None
        self.chunked.release()
        self._counted, self.batches = {}, ()

    def count_step(self, batches: Sequence[Any], device: torch.device) -> ItemCount:
        """Count the items of a global batch: one all-reduce over the replicas.

        Args:
            batches: the micro-batches of this replica before sequence sharding, the same on all its ranks.
            device: the device of the count.

        Raises:
            ConfigError: a batch is no mapping of tensors.
        """
        for batch in batches:
            first = self.items is None or not isinstance(batch, Mapping)  # the first batches of this Trainer
            if first and not isinstance(batch, ShardedBatch):  # which is a mapping with a sequence
                self.check(batch)
        counts = list(map(self.rule.weight if self.sharder is None else self._weight_of, batches))
        if self.items is None and not any(isinstance(getattr(batch, "local", batch), Dummy) for batch in batches):
            _warn_without_targets(counts)
        self._counted = {}
        if self._steps_to_look:
            self._steps_to_look -= 1
            self.rule.verified = self._steps_to_look > 0
        self.batches = () if self.rule.verified else batches
        if not self.rule.normalized:
            self._counted = {id(batch): (batch, count) for batch, count in zip(batches, counts, strict=True)}
        local = count_for(device, counts[0] if len(counts) == 1 else sum(counts, torch.zeros((), dtype=torch.int64)))
        groups = parallel_groups(self._layout) if distributed.world_size() > 1 else None
        own_shards = batches and isinstance(batches[0], ShardedBatch) and self.rule.weight is not self.rule.count
        adds_up = own_shards and self.rule.weighting.of_shards
        group = None if groups is None else groups.seq_data_parallel if adds_up else groups.dp
        self.items = ItemCount.of_all_ranks(local, self.overlap_count, group)
        return self.items

    def items_of_step(self, divisor: Any) -> ItemCount:
        """The item count of the step; ``divisor`` replaces it if it came from user code."""
        now = self.items
        if now is None or not (divisor is None or divisor is now.divisor or divisor is self._superseded):
            given = torch.as_tensor(divisor, dtype=torch.float32, device=self._device)
            now = self.items = ItemCount(given, counted=None if now is None else now.counted)
        return now

    def _weight_of(self, batch: Any) -> torch.Tensor:
        if not isinstance(batch, ShardedBatch):
            return self.rule.weight(batch)
        return batch.facts.items if self.rule.weight is self.rule.count else self.rule.weight(batch.local)

    def weight_of_all_shards(self, own: torch.Tensor) -> torch.Tensor:
        """The weight of a batch, of which this rank's shard has ``own``: on the device. Collective with its ranks."""
        whole = count_for(self._device, own).clone()
        if self.rule.weighting.of_shards:
            distributed.all_reduce_sum(whole, group=parallel_groups(self._layout).sequence)
        return whole

    def beginning(self, batch: Any) -> Any:
        """As many tokens of each sequence of a batch as one rank has, in host memory. Collective if it is a shard."""
        assert self.sharder is not None
        [whole] = plain_batches([batch], lambda: parallel_groups(self._layout))
        ranks = self._layout.cp * self._layout.sp
        return self.sharder.beginning(whole, max(8 * ranks, self.sharder.length(whole) // ranks))

    def look_again(self) -> None:
        """Measure what the losses are the mean of again, because this batch could not tell: in 1, 2, 4 ... steps."""
        self._steps_to_look = self._last_wait = min(2 * self._last_wait or 1, _LONGEST_WAIT + 1)
        if self._last_wait > _LONGEST_WAIT:
            self._steps_to_look = 0

    def recount(self) -> ItemCount:
        """Count the step again, after its first micro-batch has shown what the losses are the mean of. Collective."""
        assert self.items is not None  # the step was counted
        self._superseded, items = self.items.divisor, self.count_step(self.batches, self._device)
        return items

    def local_items(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Items of a micro-batch, on the device; those counted at the fetch if it is the same object."""
        fetched, count = self._counted.get(id(inputs), (None, None))
        if count is None or fetched is not inputs:
            count = self.rule.weight(inputs)
        # The gradients of other shards pass through one without items.
        mean = self.sharder is None and not self.rule.weighting.summed
        self.empty = mean and count.device.type == "cpu" and not int(count)
        return count_for(self._device, count)

    def of(
        self, method: LossMethod, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor, **keywords: Any
    ) -> Any:
        """Call ``method`` for the loop.

        Args:
            method: ``compute_loss`` of the Trainer.
            model: the engine, or the module if there is no engine.
            inputs: one micro-batch on the device; with sequence sharding, the shard of this rank.
            items: items of the global batch, a float32 scalar.
            keywords: further arguments (``return_outputs``).
        """
        if method.takes_item_count:
            keywords["num_items_in_batch"] = items
        before, self.for_loop = self.for_loop, True
        labels = inputs.get(self.label_names[0]) if self.label_names and isinstance(inputs, Mapping) else None
        tokens = labels.numel() if isinstance(labels, torch.Tensor) else math.inf
        # In an evaluation that wants outputs, the logits are made anyway, unless a function reduces them in pieces.
        made = bool(keywords.get("return_outputs")) and not self.defers_outputs
        # There all ranks do the same whatever their batches, as they vote on the pieces (logits_in_pieces.py).
        plain = made or (tokens < self.chunked.tokens_from and not self.defers_outputs)
        try:
            with (
                nullcontext() if plain else self.chunked.deferring(model, always=self.defers_outputs),
                self.sources.recording() if self.sources.ids is not None else nullcontext(),
            ):
                return method.call(model, inputs, **keywords)
        finally:
            self.for_loop = before

    def default(self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        """Loss and outputs of one micro-batch: the implementation of ``Trainer.compute_loss``.

        Args:
            model: the engine, or the module if there is no engine.
            inputs: one micro-batch; with a ``compute_loss_func``, labels are removed from it.
            items: items of the global batch; None for the mean over the micro-batch.

        Raises:
            ConfigError: the model returned no loss.
        """
        # The loop does this in `of`, and not where it wants the outputs of an evaluation.
        with nullcontext() if self.for_loop else self.chunked.deferring(model):
            if self.loss_function is not None:
                name = labels_in(inputs, self.label_names)
                labels = inputs.pop(name) if name is not None else None
                if labels is None:
                    self._warn_of_missing_labels()
                shifted = {}
                if self._shifts_for_function and "shift_labels" in inputs:
                    shifted = {"shift_labels": inputs.pop("shift_labels")}
                outputs = model(**inputs)
                loss = self.loss_function(outputs, labels, num_items_in_batch=items, **shifted)
            elif self._smoother is not None:
                targets = self._smoother.take_targets(inputs)
                outputs = model(**inputs)
                loss = self._smoother(outputs, targets, num_items_in_batch=items)
                outputs = self._smoother.with_loss(outputs, loss)
            else:
                loss, outputs = self._of_model(model, inputs, items)
        if not self.for_loop and items is not None and self.rule.normalized:
            loss = loss * self._layout.seq_data_parallel_size
        return loss, outputs

    def _warn_of_missing_labels(self) -> None:
        """Once, because it is possible that the function of the user needs none."""
        if not self._warned:
            self._warned = True
            names = ", ".join(self.label_names)
            log = logger.warning if distributed.rank() == 0 else logger.debug
            log("a batch has no labels (%s): compute_loss_func is called with labels=None", names)

    def _of_model(
        self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        """The loss of the model, in the form that the rule needs, and the outputs of the model."""
        rule = self.rule
        if rule.auxiliary and self.sharder is not None and rule.balance is None:
            inputs = with_unmasked_tokens(inputs)
        if not rule.normalized or items is None:
            keywords = {"num_items_in_batch": None} if rule.normalized else {}
            outputs = model(**inputs, **keywords)
            return loss_in(outputs, model, inputs), outputs
        if not rule.auxiliary:
            first = not rule.verified
            before = random_state() if first and torch.is_grad_enabled() else None
            outputs = model(**inputs, num_items_in_batch=items)
            if not (first and shows_auxiliary_loss(outputs)):
                return loss_in(outputs, model, inputs), outputs
            rule.auxiliary = True  # compute the first micro-batch again
            if before is not None:
                restore_random_state(before)
        local = count_for(self._device, rule.count(inputs))
        outputs = model(**inputs, num_items_in_batch=local.clamp(min=1).to(torch.float32))
        return loss_in(outputs, model, inputs) * (local / items), outputs

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context in which every rank computes whole sequences, as one process does."""
        from ds_trainer.parallel.attention import use_sharding

        sharder, self.sharder = self.sharder, None
        try:
            with use_sharding(None, None):
                yield
        finally:
            self.sharder = sharder

    def of_shards(self, units: Sequence[Callable[[Any], torch.Tensor]], batch: Any, loss: Any) -> tuple[Any, ...]:
        """What the losses of the shards of a whole batch add up to, and what of it they count. Collective.

        Args:
            units: count a batch.
            batch: in host memory.
            loss: computes the loss of this rank's shard of it.

        Returns:
            By unit, the sum of the losses, each times its count, and the sum of the counts; at last the plain sum.
        """
        assert self.sharder is not None
        groups, own = parallel_groups(self._layout), loss()
        local, _ = self.sharder.shard(batch, groups.coordinates.cp, groups.coordinates.sp)
        counts = [*(float(unit(local)) for unit in units), 1.0]
        sums = torch.tensor([[n * own if n else 0.0 for n in counts], counts], dtype=torch.float64)
        distributed.all_reduce_sum(sums, group=groups.replica_host)
        return tuple((sums / self._layout.tp).tolist())

    @contextmanager
    def sharded(self, inputs: Any, needs_labels: bool = True) -> Iterator[Any]:
        """Context with the shard of this rank of a replica's batch, in which attention knows its sharding and samples.

        Keep it open during the backward pass, because activation checkpointing runs attention again.
        """
        with ExitStack() as stack:
            local, positions, cut = inputs, None, isinstance(inputs, ShardedBatch)
            if self.sharder is not None:
                from ds_trainer.parallel.attention import use_sharding

                at = (groups := parallel_groups(self._layout)).coordinates
                shard = partial(self.sharder.shard, inputs, at.cp, at.sp, needs_labels)
                local, plan = (inputs.local, inputs.plan) if cut else shard()
                stack.enter_context(use_sharding(plan, groups))
                positions = partial(plan.positions, at.cp, at.sp)
            elif self.packed:
                from ds_trainer.parallel.document_attention import use_documents
                from ds_trainer.training.model.packing.attention import documents_of

                stack.enter_context(use_documents(documents_of(inputs)))
            if self.rule.balance is not None:
                stack.enter_context(self.rule.balance.over_ranks(self.sharder is not None, isinstance(local, Dummy)))
            if self.rows is not None:
                from ds_trainer.parallel.expert_exchange import use_text

                text = inputs.facts.text if cut else self.rows.ends_of_text(inputs)
                stack.enter_context(use_text(text, positions, self.rule, self.rows.pad_token_id))
            yield local


def _warn_without_targets(counts: Sequence[torch.Tensor]) -> None:
    """Log a warning if the first step has no target on rank 0: its loss may be 0, and nothing else shows it."""
    if counts and distributed.rank() == 0 and not any(int(count) for count in counts):
        logger.warning(
            "Rank 0 has no target in the first step: all labels are -100, or all samples have a single token. The loss "
            "of a step without targets on any rank is 0. Check the labels that the dataset and the data_collator make, "
            "and max_length."
        )
