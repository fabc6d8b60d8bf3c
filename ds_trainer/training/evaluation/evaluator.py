"""``Evaluator``: the forward passes of an evaluation: mean losses of whole batches, and what is kept of the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.data.batch_structure import Dummy, number_of_samples
from ds_trainer.data.columns import can_be_called_with, find_label_names
from ds_trainer.data.sequence_sharding import unshard
from ds_trainer.data.sharded_batch import ShardedBatch
from ds_trainer.engine.weights import is_released
from ds_trainer.engine.zero3.shard_access import ShardAccess, is_compiled
from ds_trainer.parallel.attention import ActiveSharding, active_sharding
from ds_trainer.parallel.deferred_logits import DeferredLogits
from ds_trainer.training.evaluation.labels import labels_of, loss_of_outputs, predictions_of
from ds_trainer.training.evaluation.logits_in_pieces import LogitPieces, LogitsToHost, Preprocessed
from ds_trainer.training.evaluation.nested import detached, map_leaves
from ds_trainer.training.loop.device_copies import on_device
from ds_trainer.training.loop.item_count import ItemCount, count_for
from ds_trainer.training.loop.loss_computation import LossMethod
from ds_trainer.training.loop.sharded_loading import cut_while_evaluating
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.training.stopping.stop_controller import EvaluationAborted
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.ranks import reporting

if TYPE_CHECKING:
    from ds_trainer.training.assembly import Assembly
    from ds_trainer.training.loop.loss_computation import LossComputation
    from ds_trainer.training.protocol import TrainerProtocol


class Evaluator:
    """Computes the batches of evaluations.

    Args:
        assembly: the components of the Trainer.

    Attributes:
        stop_requested: whether to abort an evaluation between two micro-steps; None: never.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.stop_requested: Callable[[], bool] | None = None
        self._assembly = assembly
        self._pieces: LogitPieces | LogitsToHost | None = None
        self._verified: Any = None
        self._looked_at = 0

    @property
    def _trainer(self) -> TrainerProtocol:
        return self._assembly.trainer

    @property
    def _losses(self) -> LossComputation:
        return self._assembly.losses

    def model(self, half: str | None) -> nn.Module:
        """The module to call in an evaluation, with weights in the format ``half``. Collective."""
        assembly = self._assembly
        if (engine := assembly.engines.training_or_none) is not None:
            engine.follow_written_weights()
        return assembly.engines.model_for_evaluation(
            self._trainer.model,
            assembly.args,
            assembly.compiled,
            assembly.layout,
            half=half,
            reads_logits=assembly.reads_logits,
            sharded=self._losses.sharder is not None,
        )

    @property
    def is_overridden(self) -> bool:
        """Whether user code has replaced ``prediction_step``, and reads what the Trainer's own one returns."""
        own = type(self._trainer).prediction_step.__module__.startswith("ds_trainer.")
        return not own or "prediction_step" in vars(self._trainer)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """See ``Trainer.prediction_step``."""
        trainer, device = self._trainer, self._assembly.device
        dummy, sharder = isinstance(inputs, Dummy), self._losses.sharder
        if sharder is None or not isinstance(inputs, Mapping):
            inputs = trainer._prepare_inputs(inputs)
        # Read the labels first: the loss computation may remove them from the batch, and sequence sharding shifts them.
        labels = detached(on_device(labels_of(inputs, trainer.label_names), device))
        if ignore_keys is None:
            config = getattr(trainer.model, "config", None)
            caches = ["past_key_values", "cache"]  # the second since transformers 5.24
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", caches) if config else []
        has_loss = self.has_loss(inputs)
        items = count_for(device, self._losses.rule.count(inputs)).clamp(min=1).to(torch.float32)
        with torch.no_grad(), self._losses.sharded(inputs, has_loss) as own, trainer.compute_loss_context_manager():
            sharding = active_sharding()
            loss, outputs = self._forward(model, own, items, has_loss, wanted=not prediction_loss_only)
            if prediction_loss_only:
                return loss, None, None
            logits = detached(predictions_of(outputs, ignore_keys))
            unshard: Callable[[Any], Any] | None = None
            if sharding is not None and sharder is not None:
                rows, length = number_of_samples(inputs), sharder.length(inputs)
                unshard = partial(unshard_outputs, sharding=sharding, rows=rows, length=length)
            pieces: Preprocessed | None = None
            if isinstance(self._pieces, LogitsToHost):
                on_host = self._pieces.of(logits, dummy, unshard)
                if on_host is not None:
                    return loss, on_host, labels
            elif self._pieces is not None:
                pieces = self._pieces.apply(logits, labels, sharding)
                logits = logits if pieces is None else pieces.value
            if unshard is not None:
                logits = unshard(logits)
            else:
                logits = map_leaves(lambda leaf: leaf.read() if isinstance(leaf, DeferredLogits) else leaf, logits)
        return loss, logits if pieces is None else Preprocessed(logits), labels

    def loss_of_shard(self, model: nn.Module, batch: ShardedBatch) -> torch.Tensor | None:
        """What :meth:`prediction_step` returns as the loss of a whole batch, from this rank's shard. Collective.

        Args:
            model: the model or its engine.
            batch: the shard of this rank, which all ranks of the replica compute together.
        """
        items = count_for(self._assembly.device, batch.facts.items).clamp(min=1).to(torch.float32)
        with torch.no_grad(), self._losses.sharded(batch) as own, self._trainer.compute_loss_context_manager():
            return self._forward(model, own, items, batch.facts.has_loss, wanted=False)[0]

    @contextmanager
    def reading(self, loader: Any, loss_only: bool) -> Iterator[None]:
        """Inside, :meth:`prediction_step` makes logits in pieces where nothing needs whole ones on the device, and
        ``loader`` gives each rank its shard if only the loss is needed. Neither if user code reads batches or outputs.
        """
        function, args = self._trainer.preprocess_logits_for_metrics, self._assembly.args
        if self.is_overridden:
            yield
        elif loss_only:
            with cut_while_evaluating(loader, self._losses, self.has_loss):
                yield
        elif function is None and (args.batch_eval_metrics or args.eval_use_gather_object):
            yield
        else:
            self._pieces = LogitsToHost(self._assembly.layout) if function is None else LogitPieces(function)
            self._losses.defers_outputs = True
            try:
                yield
            finally:
                self._pieces, self._losses.defers_outputs = None, False

    def evaluate_in_training(
        self, stop_requested: Callable[[], bool] | None, ignore_keys: list[str] | None
    ) -> dict[str, float]:
        """``Trainer.evaluate`` for the loop, which may abort it between two micro-steps. Collective.

        Raises:
            EvaluationAborted: ``stop_requested`` returned True.
        """
        self.stop_requested = stop_requested
        try:
            metrics = self._trainer.evaluate(ignore_keys=ignore_keys) or {}  # an override may return nothing
            self._assembly.trials.report_evaluation(metrics)
            return metrics
        finally:
            self.stop_requested = None

    def stop_if_requested(self) -> None:
        """Abort the evaluation between two micro-steps if a stop is requested. Collective.

        Raises:
            EvaluationAborted: all ranks have agreed to stop the training.
        """
        if self.stop_requested is not None and self.stop_requested():
            raise EvaluationAborted

    # -- details -------------------------------------------------------------------------------------------------------

    def _forward(
        self, model: nn.Module, own: dict[str, Any], items: torch.Tensor, has_loss: bool, wanted: bool
    ) -> tuple[torch.Tensor | None, Any]:
        """Mean loss of a whole batch with ``items``, and the outputs for this rank's part, ``own``, if ``wanted``."""
        sharding = active_sharding()
        if sharding is not None:
            own = self._trainer._prepare_inputs(own)
            if has_loss:
                self._verify_loss_rule(model, own, items)
            own_items = self._losses.rule.weight(own)
        loss: torch.Tensor | None
        module, before, self._looked_at = getattr(model, "module", model), self._looked_at, id(model)
        first = before != id(model) and any(map(is_released, module.parameters())) and not is_compiled(module)
        with ShardAccess(module) if first else nullcontext():
            if has_loss:
                loss, outputs = self._loss_and_outputs(model, own, items, wanted)
            else:
                with self._losses.chunked.deferring(model, always=True) if self._pieces is not None else nullcontext():
                    outputs = model(**own)
                loss = loss_of_outputs(outputs)
        loss = None if loss is None else loss.detach().mean()
        if sharding is not None and loss is not None:
            loss = self._loss_of_all_shards(loss, own_items, items)
        return loss, outputs

    def has_loss(self, inputs: Any) -> bool:
        """Whether a batch has a loss."""
        own = "compute_loss" in self._assembly.overridden
        if not isinstance(inputs, Mapping) or (own and not can_be_called_with(self._trainer.model, inputs)):
            return own  # it unpacks them
        returns_loss = inputs.get("return_loss")
        returns_loss = self._trainer.can_return_loss if returns_loss is None else returns_loss
        has_labels = labels_of(inputs, self._trainer.label_names) is not None
        return has_labels or bool(returns_loss) or self._loss_needs_no_labels()

    def _loss_and_outputs(
        self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor, wanted: bool
    ) -> tuple[torch.Tensor, Any]:
        """Call :meth:`compute_loss` with the arguments that it takes; outputs are None unless ``wanted``.

        ``items`` are those of this rank's batch, so an override that multiplies by the number of ranks, as for
        transformers, sees a single replica.
        """
        method = LossMethod.of(self._trainer.compute_loss)
        unsharded = active_sharding() is None and self._losses.rule.replicas is None
        alone = unsharded and "compute_loss" in self._assembly.overridden
        takes = not wanted or accepted_arguments(method.call, {"return_outputs"})
        options = {"return_outputs": True} if wanted and takes else {}
        with reporting(self._assembly.layout.tp) if alone else nullcontext():
            found: Any = self._losses.of(method, model, inputs, items, **options) if takes else None
        if not wanted:
            return found, None
        if not isinstance(found, tuple | list):
            raise ConfigError(
                f"{type(self._trainer).__name__}.compute_loss {'ignores' if takes else 'takes no'} return_outputs, but "
                "predictions are needed. Add the argument `return_outputs=False` and return (loss, outputs) if it is "
                "true, or set prediction_loss_only=True."
            )
        loss, outputs = found
        return loss, outputs

    def _loss_of_all_shards(self, loss: torch.Tensor, own: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch with ``items``, from the loss of this rank's shard with ``own`` items.

        Collective over the ranks that share the sequences.
        """
        losses, count = self._losses, count_for(self._assembly.device, own)
        total = items if losses.rule.normalized else losses.weight_of_all_shards(own).clamp(min=1)
        share = losses.rule.contribution(loss, count, ItemCount(total)).to(torch.float32)
        distributed.all_reduce_sum(share, group=self._assembly.groups.sequence)
        return share

    def _verify_loss_rule(self, model: nn.Module, own: dict[str, Any], items: torch.Tensor) -> None:
        """Determine once whether the loss uses the item count, which decides how shards contribute. Collective."""

        def of_all_ranks(count: torch.Tensor) -> torch.Tensor:
            method = LossMethod.of(self._trainer.compute_loss)
            loss = torch.nan_to_num(self._losses.of(method, model, dict(own), count).detach())
            distributed.all_reduce_sum(loss)
            return loss

        rule = self._losses.rule
        if rule.normalized and not rule.verified and self._verified is not rule:
            rule.verify(items, items, of_all_ranks)
            self._verified, rule.verified = rule, False  # the first step of a training looks at more

    def _loss_needs_no_labels(self) -> bool:
        """Whether a batch without labels has a loss: the user computes the loss, and the model takes no labels."""
        if self._assembly.args.label_names is not None:
            return not self._assembly.args.label_names
        own = self._trainer.compute_loss_func is not None or "compute_loss" in self._assembly.overridden
        return own and not find_label_names(self._trainer.model)


# Unshards the outputs of a model for a batch that is sharded along its sequences.
#
# Outputs per token are concatenated in the order of the sequence, without the padding at its end. Outputs per sample
# must be equal on all ranks: a rank has seen only its shard of the sequence, and an output computed from that alone (a
# pooled vector, a class from the last token) is not an output for the whole sequence.


_REMEDY = "Name it in ignore_keys, or set context_parallel_size and sequence_parallel_size to 1."


def unshard_outputs(tree: Any, sharding: ActiveSharding, rows: int, length: int) -> Any:
    """Unshard the outputs ``tree`` of the ranks of a sequence group. Collective over the group.

    Args:
        tree: tensors in tuples, lists and dicts, with equal shapes on all ranks; other leaves are returned unchanged.
        sharding: the sharding of the batch.
        rows: samples in the batch.
        length: tokens per sample, before padding.

    Returns:
        Tensors ``[rows, tokens of a rank, ...]`` become ``[rows, length, ...]``; others are those of the first rank.

    Raises:
        ConfigError: an output is neither per token nor equal on all ranks, or could be both.
    """
    return map_leaves(
        lambda leaf: _whole(leaf, sharding, rows, length) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _whole(output: torch.Tensor, sharding: ActiveSharding, rows: int, length: int) -> torch.Tensor:
    parts = _of_all_ranks(output, sharding)
    shape, local = list(output.shape), sharding.local_length
    equal = all(torch.equal(part, parts[0]) for part in parts[1:])
    described = f"An output of shape {shape}, for a batch of {rows} sequences with {local} tokens per rank,"
    if shape[:2] == [rows, local]:
        if equal and len(shape) == 2 and output.is_floating_point():
            raise ConfigError(
                f"{described} is equal on all ranks: it may have one number per token or {local} per sample. {_REMEDY}"
            )
        return unshard(parts, sharding.plan, length)
    if local in shape[2:] or not all(torch.allclose(part, parts[0], equal_nan=True) for part in parts[1:]):
        raise ConfigError(
            f"{described} differs between the ranks, but is not per token ([{rows}, {local}, ...]): it cannot be "
            f"unsharded. {_REMEDY}"
        )
    return parts[0]


def _of_all_ranks(output: torch.Tensor, sharding: ActiveSharding) -> list[torch.Tensor]:
    """``output`` of each rank of the sequence group; sent as bytes, so that the dtype does not matter."""
    local = output.detach().contiguous().view(-1).view(torch.uint8)
    received = [torch.empty_like(local) for _ in range(sharding.groups.sequence.size())]
    dist.all_gather(received, local, group=sharding.groups.sequence)
    return [part.view(output.dtype).view(output.shape) for part in received]
