"""Methods of the Trainer for evaluation, prediction and generation: the exact mean loss over a dataset, metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.enums import When
from ds_trainer.training.evaluation.outputs import EvalLoopOutput, PredictionOutput
from ds_trainer.training.loop.run_plan import evaluation_plan_of
from ds_trainer.training.model.cache import without_cache
from ds_trainer.training.model.half_precision import half_precision_of, weights_cast_to
from ds_trainer.training.out_of_memory import evaluation_remedies, explained_out_of_memory
from ds_trainer.training.overrides.data_loading import DataLoading
from ds_trainer.training.overrides.logging_methods import LoggingMethods
from ds_trainer.training.overrides.training_step import TrainingStep
from ds_trainer.training.protocol import check_names
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class EvaluationMethods(DataLoading, TrainingStep, LoggingMethods):
    """Evaluation, prediction and generation with the current weights."""

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
        check_names(self)
        with self._ds_trainer.memory_tracker.stage("eval") as stage:
            join_ranks(self.args)
            loader = self.get_eval_dataloader(dataset)
            start = time.perf_counter()
            # Without compute_metrics, predictions are not needed.
            loss_only = True if self.compute_metrics is None else None
            output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix)
            # Callbacks receive a result now, so a later dataset cannot be aborted.
            self._ds_trainer.evaluator.stop_requested = None
            measured = _with_speed(self, output, metric_key_prefix, start)
            if f"{metric_key_prefix}_loss" not in measured:
                names = ", ".join(self.label_names)
                logger.warning("No batch of the evaluation had labels (%s), so there is no loss.", names)
            self.log(measured)
            self._ds_trainer.events.notify("on_evaluate", measured)
            return {**measured, **stage.end()}

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
        check_names(self)
        with self._ds_trainer.memory_tracker.stage("test") as stage:
            join_ranks(self.args)
            loader = self.get_test_dataloader(test_dataset)
            start = time.perf_counter()
            output = self.evaluation_loop(
                loader, "Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
            metrics = _with_speed(self, output, metric_key_prefix, start)
            self._ds_trainer.events.notify("on_predict", metrics)
            return PredictionOutput(output.predictions, output.label_ids, {**metrics, **stage.end()})

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
        from ds_trainer.training.evaluation.evaluation_loop import EvalLoop

        assembly = self._ds_trainer
        join_ranks(self.args)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        half = None if self.is_in_train else half_precision_of(self.args)
        model = assembly.evaluator.model(half)
        assembly.events.handler.eval_dataloader = dataloader
        loop = EvalLoop(assembly, dataloader, loss_only, keep=description == "Prediction")
        size = self.args.per_device_eval_batch_size
        fixed = ", which auto_find_batch_size does not change" if self.args.auto_find_batch_size else ""
        explained = explained_out_of_memory(
            lambda: f"in the evaluation, with {size} samples in a batch (per_device_eval_batch_size={size}{fixed})",
            lambda: evaluation_remedies(self.args, keeps_predictions=not loss_only),
            None,
        )
        with (
            explained,
            without_cache(self.model, unless=self.args.use_cache),
            weights_cast_to(half, self.model, assembly.device),
            assembly.evaluator.reading(dataloader, loss_only),
        ):
            output = loop.run(model, ignore_keys, metric_key_prefix)
        if assembly.engines.preparation_seconds is not None and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_model_preparation_time"] = assembly.engines.preparation_seconds
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
        return self._ds_trainer.evaluator.prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    @contextmanager
    def unwrap_model_for_generation(self, gather: When | str | None = None) -> Iterator[nn.Module]:
        """Inside, the model is ready for ``generate``: in evaluation mode and, with ZeRO-3, with its weights gathered
        once if ``generation_gather`` says so. Each replica may then generate as often and as long as it needs, or not
        at all. Entering is collective.

        A single ``model.generate(...)`` needs no context: it gathers the weights itself, once for each call.

        Args:
            gather: ``"always"``, ``"never"`` or ``"auto"``; default: ``generation_gather`` of the arguments.

        Returns:
            The model without its engine. Do not train inside.
        """
        from ds_trainer.utils.undisturbed import evaluation_mode

        phase = self._ds_trainer.engines.generation
        choice = None if gather is None else When(str(gather))
        with nullcontext() if phase is None else phase.weights(choice), evaluation_mode(self.model):
            yield self.model


def _with_speed(trainer: EvaluationMethods, output: EvalLoopOutput, prefix: str, start: float) -> dict[str, float]:
    """The metrics of ``output`` with its speed, without the time to prepare the model."""
    metrics = dict(output.metrics or {})
    seconds = time.perf_counter() - start - metrics.get(f"{prefix}_model_preparation_time", 0.0)
    plan = evaluation_plan_of(trainer.args, trainer._ds_trainer.layout)
    samples = output.num_samples or 0
    metrics[f"{prefix}_runtime"] = round(seconds, 4)
    metrics[f"{prefix}_samples_per_second"] = round(samples / seconds, 3)
    metrics[f"{prefix}_steps_per_second"] = round(math.ceil(samples / plan.samples_per_micro_step) / seconds, 3)
    return metrics
