"""Methods of the Trainer for evaluation and prediction: the exact mean loss over a dataset, predictions, metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_trainer.data.batch_structure import Dummy, number_of_samples
from ds_trainer.data.columns import can_be_called_with, find_label_names
from ds_trainer.data.sharded_batch import ShardedBatch
from ds_trainer.parallel.attention import active_sharding
from ds_trainer.parallel.deferred_logits import DeferredLogits
from ds_trainer.training.evaluation.evaluation_loop import EvalLoop
from ds_trainer.training.evaluation.labels import (
    labels_of,
    loss_of_outputs,
    predictions_of,
)
from ds_trainer.training.evaluation.logits_in_pieces import LogitPieces, Preprocessed
from ds_trainer.training.evaluation.logits_to_host import LogitsToHost
from ds_trainer.training.evaluation.nested import detached
from ds_trainer.training.evaluation.outputs import EvalLoopOutput, PredictionOutput
from ds_trainer.training.evaluation.unshard import unshard_outputs
from ds_trainer.training.loop.device_copies import on_device
from ds_trainer.training.loop.item_count import ItemCount, count_for
from ds_trainer.training.loop.loss_computation import LossMethod
from ds_trainer.training.loop.run_plan import evaluation_plan_of
from ds_trainer.training.loop.sharded_loading import cut_while_evaluating
from ds_trainer.training.model.cache import without_cache
from ds_trainer.training.model.half_precision import half_precision_of, weights_cast_to
from ds_trainer.training.out_of_memory import evaluation_remedies, explained_out_of_memory
from ds_trainer.training.overrides.data_loading import DataLoading
from ds_trainer.training.overrides.generation import Generation
from ds_trainer.training.overrides.logging_methods import LoggingMethods
from ds_trainer.training.overrides.training_step import TrainingStep
from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.training.stopping.stop_controller import EvaluationAborted
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.reported_ranks import reporting

logger = get_logger(__name__)


class EvaluationMethods(DataLoading, TrainingStep, LoggingMethods, Generation):
    """Evaluation and prediction with the current weights."""

    # Whether to abort an evaluation between two micro-steps; None: never.
    stop_requested: Callable[[], bool] | None = None
    _pieces: LogitPieces | LogitsToHost | None = None

    @fails_together
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss per item over a dataset, exact and equal for every layout, and the metrics of its predictions.

        Args:
            eval_dataset: a dataset, a dict of them (evaluated one after the other, names in the metric keys), or the
                name of one; default: that of the Trainer.
            ignore_keys: keys of the model's output that are not predictions; default: those in its configuration.
            metric_key_prefix: first part of the metric names.

        Returns:
            ``eval_loss``, ``eval_items`` (terms of that mean), the metrics of ``compute_metrics``, ``eval_runtime``
            (s), ``eval_samples_per_second``, ``eval_steps_per_second`` (micro-steps), and ``epoch``.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                # By name if it is a dataset of the Trainer: an overridden get_eval_dataloader may use the name.
                chosen = name if eval_dataset is None else part
                metrics.update(self.evaluate(chosen, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        with self.memory_tracker.stage("eval") as stage:
            join_ranks(self.args)
            loader = self.get_eval_dataloader(dataset)
            start = time.perf_counter()
            # Without compute_metrics, predictions are not needed.
            loss_only = True if self.compute_metrics is None else None
            output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix)
            self.stop_requested = None  # callbacks receive a result now, so a later dataset cannot be aborted
            found = self._with_speed(output, metric_key_prefix, start)
            if f"{metric_key_prefix}_loss" not in found:
                names = ", ".join(self.label_names)
                logger.warning("No batch of the evaluation had labels (%s), so there is no loss.", names)
            self.log(found)
            self.events.notify("on_evaluate", found)
            return {**found, **stage.end()}

    @fails_together
    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for a dataset, in its order, with loss and metrics if it has labels.

        Rows of different lengths are padded with -100. Every rank gets the whole result.

        Args:
            test_dataset: a dataset, with or without labels.
            ignore_keys: keys of the model's output that are not predictions.
            metric_key_prefix: first part of the metric names.
        """
        with self.memory_tracker.stage("test") as stage:
            join_ranks(self.args)
            loader = self.get_test_dataloader(test_dataset)
            start = time.perf_counter()
            output = self.evaluation_loop(
                loader, "Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
            found = self._with_speed(output, metric_key_prefix, start)
            self.events.notify("on_predict", found)
            return PredictionOutput(output.predictions, output.label_ids, {**found, **stage.end()})

    @fails_together
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over ``dataloader``, for :meth:`evaluate` and :meth:`predict`. Collective.

        Args:
            dataloader: batches of this replica.
            description: ``"Prediction"`` keeps predictions even if metrics are computed batch by batch.
            prediction_loss_only: whether to keep only the loss; default: the argument of this name.
            ignore_keys: keys of the model's output that are not predictions.
            metric_key_prefix: first part of the metric names.
        """
        join_ranks(self.args)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        half = None if self.is_in_train else half_precision_of(self.args)
        model = self.engines.model_for_evaluation(
            self.model,
            self.args,
            self.compiled,
            self.layout,
            half,
            self.reads_logits,
            self.sequence_sharder is not None,
        )
        self.callback_handler.eval_dataloader = dataloader
        loop = EvalLoop(self, dataloader, loss_only, keep=description == "Prediction", has_loss=self._has_loss)
        explained = explained_out_of_memory(
            lambda: f"in the evaluation, with {self.args.per_device_eval_batch_size} samples in a batch",
            lambda: evaluation_remedies(self.args, keeps_predictions=not loss_only),
            None,
        )
        cast = weights_cast_to(half, self.model, self.device)
        with (
            explained,
            without_cache(self.model, unless=self.args.use_cache),
            cast,
            self._in_pieces(loss_only),
            self._shards_of(dataloader, loss_only),
        ):
            output = loop.run(model, ignore_keys, metric_key_prefix)
        if self.engines.preparation_seconds is not None and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_model_preparation_time"] = self.engines.preparation_seconds
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Forward pass of one batch of an evaluation.

        Args:
            model: the model or its engine.
            inputs: the whole batch. With sequence sharding, every rank computes its shard of it.
            prediction_loss_only: whether to return only the loss.
            ignore_keys: keys of the model's output that are not predictions.

        Returns:
            The mean loss over the items of the batch (None without labels), the outputs of the model except the loss,
            and the labels, all for the whole batch. The loop weights the loss by the number of items, so the mean over
            the dataset is exact.

        Raises:
            ConfigError: predictions are needed, but ``compute_loss`` cannot return outputs; or the outputs for shards
                of sequences cannot be combined.
        """
        dummy = isinstance(inputs, Dummy)
        if self.sequence_sharder is None or not isinstance(inputs, Mapping):
            inputs = self._prepare_inputs(inputs)
        # Read the labels first: the loss computation may remove them from the batch, and sequence sharding shifts them.
        labels = detached(on_device(labels_of(inputs, self.label_names), self.device))
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            caches = ["past_key_values", "cache"]  # the second since transformers 5.24
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", caches) if config else []
        has_loss = self._has_loss(inputs)
        items = count_for(self.device, self.loss_rule.count(inputs)).clamp(min=1).to(torch.float32)
        with torch.no_grad(), self.losses.sharded(inputs, has_loss) as own, self.compute_loss_context_manager():
            sharding = active_sharding()
            loss, outputs = self._forward(model, own, items, has_loss, wanted=not prediction_loss_only)
            if prediction_loss_only:
                return loss, None, None
            logits = detached(predictions_of(outputs, ignore_keys))
            unshard: Callable[[Any], Any] | None = None
            if sharding is not None and self.sequence_sharder is not None:
                rows, length = number_of_samples(inputs), self.sequence_sharder.length(inputs)
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
            elif isinstance(logits, DeferredLogits):
                logits = logits.read()
        return loss, logits if pieces is None else Preprocessed(logits), labels

    def loss_of_shard(self, model: nn.Module, batch: ShardedBatch) -> torch.Tensor | None:
        """What :meth:`prediction_step` returns as the loss of a whole batch, from this rank's shard. Collective.

        Args:
            model: the model or its engine.
            batch: the shard of this rank, which all ranks of the replica compute together.
        """
        items = count_for(self.device, batch.facts.items).clamp(min=1).to(torch.float32)
        with torch.no_grad(), self.losses.sharded(batch) as own, self.compute_loss_context_manager():
            return self._forward(model, own, items, batch.facts.has_loss, wanted=False)[0]

    @property
    def overrides_prediction_step(self) -> bool:
        """Whether a subclass has replaced :meth:`prediction_step`, and reads what this one returns."""
        return type(self).prediction_step is not EvaluationMethods.prediction_step

    def evaluate_in_training(
        self, stop_requested: Callable[[], bool] | None, ignore_keys: list[str] | None
    ) -> dict[str, float]:
        """:meth:`evaluate` for the loop, which may abort it between two micro-steps. Collective.

        Raises:
            EvaluationAborted: ``stop_requested`` returned True.
        """
        self.stop_requested = stop_requested
        try:
            metrics = self.evaluate(ignore_keys=ignore_keys)
            self.trials.report_evaluation(metrics)
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

    @contextmanager
    def _in_pieces(self, loss_only: bool) -> Iterator[None]:
        """Inside, :meth:`prediction_step` makes logits in pieces where nothing needs whole ones on the device."""
        function, args = self.preprocess_logits_for_metrics, self.args
        as_tensors = not (args.batch_eval_metrics or args.eval_use_gather_object)
        if loss_only or self.overrides_prediction_step or not (as_tensors or function is not None):
            yield
            return
        self._pieces = LogitsToHost(self.layout) if function is None else LogitPieces(function)
        self.losses.defers_outputs = True
        try:
            yield
        finally:
            self._pieces, self.losses.defers_outputs = None, False

    def _shards_of(self, loader: Any, loss_only: bool) -> AbstractContextManager[None]:
        """A context in which ``loader`` gives each rank its shard, if only the loss is needed and nobody else reads."""
        if not loss_only or self.overrides_prediction_step or "prediction_step" in vars(self):
            return nullcontext()
        return cut_while_evaluating(loader, self.losses, self._has_loss)

    # -- details -------------------------------------------------------------------------------------------------------

    def _forward(
        self, model: nn.Module, own: dict[str, Any], items: torch.Tensor, has_loss: bool, wanted: bool
    ) -> tuple[torch.Tensor | None, Any]:
        """Mean loss of a whole batch with ``items``, and the outputs for this rank's part, ``own``, if ``wanted``."""
        sharding, own_items = active_sharding(), items
        if sharding is not None:
            own = self._prepare_inputs(own)
            own_items = self.loss_rule.count(own)
            if has_loss:
                self._verify_loss_rule(model, own, items)
        loss: torch.Tensor | None
        if has_loss:
            loss, outputs = self._loss_and_outputs(model, own, items, wanted)
        else:
            with self.losses.chunked.deferring(model, always=True) if self._pieces is not None else nullcontext():
                outputs = model(**own)
            loss = loss_of_outputs(outputs)
        loss = None if loss is None else loss.detach().mean()
        if sharding is not None and loss is not None:
            loss = self._loss_of_all_shards(loss, own_items, items)
        return loss, outputs

    def _has_loss(self, inputs: Any) -> bool:
        own = "compute_loss" in self.overridden
        if not isinstance(inputs, Mapping) or (own and not can_be_called_with(self.model, inputs)):
            return own  # it unpacks them
        returns_loss = inputs.get("return_loss")
        returns_loss = self.can_return_loss if returns_loss is None else returns_loss
        has_labels = labels_of(inputs, self.label_names) is not None
        return has_labels or bool(returns_loss) or self._loss_needs_no_labels()

    def _loss_and_outputs(
        self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor, wanted: bool
    ) -> tuple[torch.Tensor, Any]:
        """Call :meth:`compute_loss` with the arguments that it takes; outputs are None unless ``wanted``.

        ``items`` are those of this rank's batch, so an override that multiplies by the number of ranks, as for
        transformers, sees a single replica.
        """
        method = LossMethod.of(self.compute_loss)
        alone = "compute_loss" in self.overridden and active_sharding() is None and self.loss_rule.replicas is None
        if wanted and not accepted_arguments(self.compute_loss, {"return_outputs"}):
            raise ConfigError(
                f"{type(self).__name__}.compute_loss takes no return_outputs, but predictions are needed. Add the "
                "argument `return_outputs=False` and return (loss, outputs) if it is true, or set "
                "prediction_loss_only=True."
            )
        with reporting(self.layout.tp) if alone else nullcontext():
            if not wanted:
                return self.losses.of(method, model, inputs, items), None
            loss, outputs = self.losses.of(method, model, inputs, items, return_outputs=True)
        return loss, outputs

    def _loss_of_all_shards(self, loss: torch.Tensor, own: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch with ``items``, from the loss of this rank's shard with ``own`` items.

        Collective over the ranks that share the sequences.
        """
        share = self.loss_rule.contribution(loss, count_for(self.device, own), ItemCount(items)).to(torch.float32)
        distributed.all_reduce_sum(share, group=self.groups.sequence)
        return share

    def _verify_loss_rule(self, model: nn.Module, own: dict[str, Any], items: torch.Tensor) -> None:
        """Determine once whether the loss uses the item count, which decides how shards contribute. Collective."""

        def of_all_ranks(count: torch.Tensor) -> torch.Tensor:
            loss = torch.nan_to_num(self.losses.of(LossMethod.of(self.compute_loss), model, dict(own), count).detach())
            distributed.all_reduce_sum(loss)
            return loss

        if self.loss_rule.normalized and not self.loss_rule.verified:
            self.loss_rule.verify(items, items, of_all_ranks)

    def _loss_needs_no_labels(self) -> bool:
        """Whether a batch without labels has a loss: the user computes the loss, and the model takes no labels."""
        if self.args.label_names is not None:
            return not self.args.label_names
        own = self.compute_loss_func is not None or "compute_loss" in self.overridden
        return own and not find_label_names(self.model)

    def _with_speed(self, output: EvalLoopOutput, prefix: str, start: float) -> dict[str, float]:
        """The metrics of ``output`` with its speed, without the time to prepare the model."""
        metrics = dict(output.metrics or {})
        seconds = time.perf_counter() - start - metrics.get(f"{prefix}_model_preparation_time", 0.0)
        plan = evaluation_plan_of(self.args, self.layout)
        samples = output.num_samples or 0
        metrics[f"{prefix}_runtime"] = round(seconds, 4)
        metrics[f"{prefix}_samples_per_second"] = round(samples / seconds, 3)
        metrics[f"{prefix}_steps_per_second"] = round(math.ceil(samples / plan.samples_per_micro_step) / seconds, 3)
        return metrics
