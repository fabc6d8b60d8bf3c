"""The evaluation loop: loss, predictions and metrics over a dataset, equal for every layout.

One pass::

    for each micro-step (one batch of every replica):
        prediction_step: forward pass -> mean loss of the batch, logits, labels
        preprocess_logits_for_metrics
        gather the results of all ranks, in the dataset's order
        every eval_accumulation_steps, or once they are large: copy them to host memory, to their position in the result
    divide the summed loss by the items of all ranks, once
    compute_metrics

All ranks end with all predictions, as in Hugging Face's Trainer, so that ``compute_metrics`` can run anywhere: every
rank needs host memory for the whole result. ``preprocess_logits_for_metrics`` can reduce each batch; if it treats each
token alone, it is called with the logits of a few tokens at a time (:mod:`.logits_in_pieces`). Without it, the logits
of a few tokens at a time are gathered and copied to the host (:mod:`.logits_to_host`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.data.batch_structure import Dummy, number_of_samples
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.lockstep import fingerprint
from ds_trainer.data.replica import batches_of
from ds_trainer.data.sharded_batch import ShardedBatch, dummy_of
from ds_trainer.data.stream import StreamLoader
from ds_trainer.optim.script_optimizers import use_evaluation_weights
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation.gathering import gather_micro_steps
from ds_trainer.training.evaluation.logits_in_pieces import OnHost, Preprocessed
from ds_trainer.training.evaluation.loss_mean import Loss, LossMean
from ds_trainer.training.evaluation.nested import detached, map_leaves, plain_numbers
from ds_trainer.training.evaluation.outputs import EvalLoopOutput, EvalPrediction
from ds_trainer.training.evaluation.prediction_accumulator import PredictionAccumulator
from ds_trainer.training.evaluation.shared_streams import in_order_of_stream, share_reading
from ds_trainer.training.loop.batch_splitting import samples_of_batch, with_equal_rows
from ds_trainer.training.loop.batches import checked_batch, checked_raw_batch
from ds_trainer.training.loop.device_copies import on_device
from ds_trainer.training.loop.index_errors import explain_index_error
from ds_trainer.training.loop.loss_computation import LossMethod
from ds_trainer.training.loop.loss_measurement import LossMeasurement, few_samples
from ds_trainer.training.loop.loss_rule import Weighting
from ds_trainer.training.loop.packed_data import summary_of
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.assembly import Assembly

logger = get_logger(__name__)

_ALIKE = (
    "All %d data-parallel replicas evaluate the same samples, which predictions and compute_metrics then get as many "
    "times. Return self.accelerator.prepare(loader) from get_eval_dataloader, or let the Trainer make the loader."
)

_KINDS = ("predictions", "label_ids", "inputs", "losses")
MOST_ON_DEVICE = 256 * 10**6
"""Bytes of results that stay on a GPU without ``eval_accumulation_steps``; each has those of all replicas."""


class EvalLoop:
    """One pass over a loader.

    Args:
        assembly: the components of the Trainer, whose overrides and callbacks are used.
        loader: the batches of this replica.
        loss_only: compute only the loss.
        keep: keep predictions for the caller, even if metrics are computed per batch.
    """

    def __init__(self, assembly: Assembly, loader: Any, loss_only: bool, keep: bool) -> None:
        trainer, args = assembly.trainer, assembly.args
        self.assembly, self.trainer = assembly, trainer
        self.loader = loader
        self.loss_only = loss_only
        self._shares_reading = share_reading(loader, args, assembly.layout, loss_only)
        self._batch_metrics = args.batch_eval_metrics and trainer.compute_metrics is not None
        self._keep = keep or not self._batch_metrics
        self._as_objects = args.eval_use_gather_object
        rows = loader.samples if isinstance(loader, PlannedLoader) else 0
        self._results = {
            kind: PredictionAccumulator(args.eval_do_concat_batches, self._as_objects, rows) for kind in _KINDS
        }
        self._every = args.eval_accumulation_steps or self._default_interval(assembly.device)
        # A CUDA graph overwrites the outputs with those of the next batch. Gathered outputs are copies already.
        self._copies = args.torch_compile and distributed.world_size() == 1 and self._every != 1
        self._is_leader = assembly.layout.is_replica_leader(distributed.rank())
        self._loss = LossMean(assembly.device, args.logging_nan_inf_filter, counts=self._is_leader)
        group = assembly.groups.seq_data_parallel if distributed.world_size() > 1 else None
        self._by_source = assembly.losses.sources.sums(getattr(loader, "dataset", None), group)
        self._count: Callable[[Any], torch.Tensor] = assembly.losses.rule.count
        self._samples, self._among_ranks = 0, False
        self._metrics: dict[str, Any] = {}

    @staticmethod
    def _default_interval(device: torch.device) -> int | None:
        """Micro-steps whose results stay on ``device``: those of :data:`MOST_ON_DEVICE` bytes (None); 1 on the CPU."""
        return 1 if device.type == "cpu" else None

    def run(self, model: nn.Module, ignore_keys: list[str] | None, prefix: str) -> EvalLoopOutput:
        """Evaluate ``model``; metric names start with ``prefix``. The model is left in evaluation mode."""
        trainer, every = self.trainer, self._every
        model.eval()
        use_evaluation_weights(trainer.optimizer)
        assembly = self.assembly
        check = checked_raw_batch if assembly.evaluator.is_overridden else assembly.losses.check
        batches = aligned_batches(self.loader, assembly.layout, check)
        seen = assembly.losses.first_samples if trainer.is_in_train else None
        for index, (inputs, last) in enumerate(mark_last(batches), start=1):
            if index == 1 and summary_of(self.loader) is not None:
                self.assembly.packing.check(model, inputs.beginning if isinstance(inputs, ShardedBatch) else inputs)
            if seen is not None:
                seen.compare(inputs)
            try:
                if index == 1:
                    weighting = self._weighting(model, inputs)
                    self._count, self._loss.summed = weighting.count, weighting.summed
                    self._among_ranks = weighting.among_ranks
                    self._loss.parts = getattr(weighting.count, "parts", 1)
                found = self._micro_step(model, inputs, ignore_keys)
            except (IndexError, RuntimeError) as error:
                explain_index_error(error, [inputs], model)
                raise
            self.assembly.events.notify("on_prediction_step")
            self.assembly.telemetry.beat()
            if not last:
                self.assembly.evaluator.stop_if_requested()
            if found is None:
                continue
            if self._batch_metrics and found["predictions"] is not None and found["label_ids"] is not None:
                self._metrics = self._compute(found, compute_result=last)
            if self._keep:
                positions = self.loader.result_positions(index - 1) if isinstance(self.loader, PlannedLoader) else None
                for kind in _KINDS[:2] if self._batch_metrics else _KINDS:
                    result = map_leaves(_copied, found[kind]) if self._copies else found[kind]
                    self._results[kind].add(result, positions)
            held = sum(accumulator.device_bytes for accumulator in self._results.values())
            if held > MOST_ON_DEVICE if every is None else index % every == 0:
                for accumulator in self._results.values():
                    accumulator.to_host()
        if seen is not None and (finding := seen.finding()) is not None:
            assembly.losses.first_samples = None  # said once
            (logger.warning if distributed.rank() == 0 else logger.debug)("%s", finding)
        return self._output(prefix)

    def _micro_step(self, model: nn.Module, inputs: Any, ignore_keys: list[str] | None) -> Any:
        """One micro-step: the results of all ranks by kind, or None if only the loss is needed."""
        trainer = self.trainer
        if isinstance(inputs, ShardedBatch):
            dummy = isinstance(inputs.local, Dummy)
            with trainer.accelerator.batch(inputs.local):
                loss = self.assembly.evaluator.loss_of_shard(model, inputs)
            self._samples += 0 if dummy else inputs.facts.size
            losses, items = self.assembly.losses, inputs.facts.items
            if self._count is not losses.rule.count:
                items = losses.weight_of_all_shards(self._count(inputs.local))
            self._add_loss(loss, items, dummy)
            return None
        dummy = isinstance(inputs, Dummy)
        items = self._count(inputs)
        samples = number_of_samples(inputs)
        self._samples += 0 if dummy else samples
        wanted = self._inputs_wanted(inputs)
        if self._among_ranks:
            inputs = with_equal_rows(inputs)
        # A subclass may override prediction_step with the signature of transformers.
        with trainer.accelerator.batch(inputs):
            loss, logits, labels = trainer.prediction_step(
                model,
                inputs,
                self.loss_only,
                ignore_keys=ignore_keys,
            )
        loss = self._add_loss(loss, items, dummy)
        if self._among_ranks:
            rows = number_of_samples(inputs)
            logits, labels = map_leaves(lambda leaf: leaf[:samples] if _has(leaf, rows) else leaf, (logits, labels))
        whole = logits.value if isinstance(logits, OnHost) else None
        if whole is not None:
            logits = None  # gathered already
        elif isinstance(logits, Preprocessed):
            logits = logits.value
        elif logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        if self.loss_only and logits is None and whole is None and labels is None:
            return None
        tree = {"predictions": detached(logits), "label_ids": detached(labels), "inputs": wanted, "losses": None}
        if loss is not None and self._includes("loss"):
            tree["losses"] = loss.to(self.assembly.device).repeat(samples)
        found = gather_micro_steps(tree, dummy, self.assembly.layout, self._as_objects)
        return found if whole is None else {**found, "predictions": whole}

    def _weighting(self, model: nn.Module, inputs: Any) -> Weighting:
        """How the losses of batches make the loss of the dataset; measured once. Collective."""
        trainer, losses, own = self.trainer, self.assembly.losses, self.assembly.evaluator.is_overridden
        rule = losses.rule
        known, alike = rule.weighting, rule.weighting.for_evaluation and not own
        if rule.evaluation is not None:
            return rule.evaluation
        shards = None if losses.sharder is None else losses
        unknown = losses.packed if shards is None else own or rule.normalized
        if (alike and (known.settled or rule.verified)) or unknown:
            return known
        if isinstance(inputs, ShardedBatch):
            has_loss = inputs.facts.has_loss
        else:
            has_loss = isinstance(inputs, Mapping) and self.assembly.evaluator.has_loss(inputs)
        if not distributed.agree(torch.tensor([int(has_loss)]))[0]:
            return known

        def loss_of(part: Any) -> torch.Tensor | None:
            if shards is not None:
                method, one = LossMethod.of(trainer.compute_loss), torch.ones((), device=self.assembly.device)
                with losses.sharded(part) as local:
                    return torch.as_tensor(losses.of(method, model, trainer._prepare_inputs(local), one))
            with trainer.accelerator.batch(part):
                loss = trainer.prediction_step(model, part, True)[0]
            return None if loss is None else torch.as_tensor(loss)

        more = partial(few_samples, self.loader, rule.count)
        replica = self.assembly.layout.coordinates(distributed.rank()).dp
        batch = inputs if shards is None else losses.beginning(inputs)
        settings: dict[str, Any] = {"owners": (trainer,), "replica": replica, "more": more, "shards": shards}
        found = LossMeasurement(loss_of, model, batch, rule.count, **settings).weighting()
        if shards is not None:
            rule.use(found)
        losses.sources.take()  # of no batch
        if found.settled:
            rule.evaluation = found
        return found

    def _add_loss(self, loss: Any, items: torch.Tensor, dummy: bool) -> torch.Tensor | None:
        """Let the loss of a batch with ``items`` count, unless it is a dummy; returns the loss as a scalar."""
        if loss is None:
            return None
        loss = torch.as_tensor(loss).detach().mean()
        if not dummy:
            self._loss.add(loss, items)
            if self._by_source is not None:
                self._by_source.add(self.assembly.losses.sources.take())
                self._by_source.end_step()
        return loss

    def _includes(self, what: str) -> bool:
        return self.trainer.compute_metrics is not None and what in self.assembly.args.include_for_metrics

    def _inputs_wanted(self, inputs: Mapping[str, Any]) -> Any:
        """The inputs for ``compute_metrics``: the main input, or all of them if it is called per batch."""
        if not self._includes("inputs") or self.loss_only:
            return None
        if not isinstance(inputs, Mapping):
            raise ConfigError(
                f"include_for_metrics has 'inputs', but a batch is a {type(inputs).__name__}, not a dict."
            )
        if self._batch_metrics:
            return on_device({k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}, self.assembly.device)
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        if name not in inputs:
            raise ConfigError(
                f"include_for_metrics has 'inputs', but a batch of {', '.join(inputs)} has no '{name}', the main input "
                f"of {type(self.trainer.model).__name__}. Set the model's main_input_name to one of them."
            )
        return on_device({name: inputs[name]}, self.assembly.device)[name]

    def _compute(self, found: Mapping[str, Any], **keywords: Any) -> dict[str, Any]:
        assert self.trainer.compute_metrics is not None  # checked before
        metrics = self.trainer.compute_metrics(EvalPrediction(*(found[kind] for kind in _KINDS)), **keywords)
        if keywords.get("compute_result", True) and not isinstance(metrics, Mapping):
            raise ConfigError(
                f"compute_metrics returned a {type(metrics).__name__}. Return a dict like {{'accuracy': 0.5}}."
            )
        return dict(metrics or {})

    def _output(self, prefix: str) -> EvalLoopOutput:
        arrays = {kind: accumulator.result() for kind, accumulator in self._results.items()}
        if self._shares_reading and not self.loss_only:
            arrays = in_order_of_stream(arrays, self.loader)
        complete = arrays["predictions"] is not None and arrays["label_ids"] is not None
        if self.trainer.compute_metrics is not None and complete and not self._batch_metrics:
            self._metrics = self._compute(arrays)
        metrics = plain_numbers(self._metrics)
        loss: Loss | None = self._loss.result()
        if loss is not None:
            metrics = {**metrics, f"{prefix}_loss": loss.mean, f"{prefix}_items": loss.items}
            by_source = {} if self._by_source is None else self._by_source.close()
            metrics |= {f"{prefix}_loss/{name}": mean for name, mean in by_source.items()}
        named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        return EvalLoopOutput(arrays["predictions"], arrays["label_ids"], named, self._number_of_samples())

    def _number_of_samples(self) -> int:
        if isinstance(self.loader, PlannedLoader):
            return self.loader.samples
        counted = torch.tensor(self._samples if self._is_leader else 0)
        counted = counted.to(distributed.collective_device())
        distributed.all_reduce_sum(counted)
        return int(counted)


def _has(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


# The batches of an evaluation: every rank runs the same number of forward passes, and every sample counts once.


def aligned_batches(
    loader: Iterable[Any], layout: ParallelLayout, check: Callable[[Any], Any] = checked_batch
) -> Iterator[Any]:
    """The batches of ``loader``: equally many on every rank, and on all ranks of a replica equal, or its shards.

    Loaders of this package have a batch plan. A user's loader may return more batches on one rank than on another: a
    rank without further batches repeats its last one as a dummy until all ranks are done. This costs one small
    collective per batch.

    Args:
        loader: the loader of this rank.
        layout: defines the replicas.
        check: returns its argument if it can be a batch.

    Raises:
        ConfigError: on all ranks, if a rank has no batch at all while others do.
    """
    if isinstance(loader, PlannedLoader) or distributed.world_size() == 1:
        for batch in loader:
            yield batch if isinstance(batch, ShardedBatch) else check(batch)
        return
    iterator = iter(loader) if isinstance(loader, StreamLoader) else batches_of(loader, layout)
    last: Any = None
    while True:
        batch = next(iterator, None)
        has_one, has_none_ever = distributed.agree(
            torch.tensor([int(batch is not None), int(batch is None and last is None)])
        )
        if not has_one:
            return
        if has_none_ever:
            raise ConfigError(
                "The evaluation loader of at least one rank has no batch, while others have some. Return at least one "
                "batch on every rank, or use the Trainer's get_eval_dataloader, which divides the samples evenly."
            )
        several = last is None and layout.dp > 1 and not isinstance(loader, StreamLoader)
        if several and distributed.alike(str(fingerprint(batch))):
            logger.warning(_ALIKE, layout.dp)
        if batch is not None:
            last = batch if isinstance(batch, ShardedBatch) else _unrepeated(check(batch), loader, layout)
            yield last
        else:
            assert last is not None  # agreed above
            yield dummy_of(last)


def _unrepeated(batch: Any, loader: Any, layout: ParallelLayout) -> Any:
    """The last ``batch`` of a loader that accelerate has prepared, without the samples that it repeats to fill it."""
    left = getattr(loader, "remainder", -1) if getattr(loader, "end_of_dataloader", False) else -1
    if left <= 0 or not isinstance(batch, Mapping):
        return batch
    samples = number_of_samples(batch)
    own = min(max(left - layout.coordinates(distributed.rank()).dp * samples, 0), samples)
    return dummy_of(batch) if own == 0 else batch if own == samples else samples_of_batch(batch, list(range(own)))


def mark_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each of ``batches``, and whether it is the last one; reads one batch ahead."""
    iterator = iter(batches)
    current = next(iterator, None)
    while current is not None:
        following = next(iterator, None)
        yield current, following is None
        current = following
