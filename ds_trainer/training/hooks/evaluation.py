"""Evaluation and prediction: the exact mean loss over a dataset, its predictions, and metrics of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_trainer.data.columns import find_label_names
from ds_trainer.engine.evaluation_engine import EvaluationEngine
from ds_trainer.parallel.attention import active_cut
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.training.batches import number_of_samples, on_device
from ds_trainer.training.evaluation.labels import (
    labels_of,
    loss_if_any,
    returns_loss_by_itself,
    without_loss,
)
from ds_trainer.training.evaluation.loop import EvalLoop
from ds_trainer.training.evaluation.nested import detached
from ds_trainer.training.evaluation.outputs import EvalLoopOutput, PredictionOutput
from ds_trainer.training.evaluation.precision import half_of, weights_in
from ds_trainer.training.evaluation.rejoin import rejoined
from ds_trainer.training.hooks.data import DataHooks
from ds_trainer.training.hooks.records import RecordHooks
from ds_trainer.training.hooks.step import StepHooks
from ds_trainer.training.item_count import ItemCount, count_for
from ds_trainer.training.loading.model_argument import is_on_meta, put_on_device
from ds_trainer.training.model.cache import without_cache
from ds_trainer.training.model.split_attention import use_split_attention
from ds_trainer.training.signatures import accepted_arguments, is_overridden
from ds_trainer.training.stopping.stopper import EvaluationGivenUp
from ds_trainer.training.weight_check import note_origin
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import fails_together
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class EvaluationHooks(DataHooks, StepHooks, RecordHooks):
    """Evaluation of the model as it is now."""

    _preparation_time: float | None = None
    # Whether to give an evaluation up between two rounds. None: it is made to its end.
    asked_to_stop: Callable[[], bool] | None = None

    @fails_together
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss per item over a dataset, exact and equal for every layout, and the metrics of its predictions.

        Args:
            eval_dataset: a dataset, a dict of them (evaluated one after the other, names in the metric keys), or the
                name of one; default: the Trainer's.
            ignore_keys: keys of the model's output that are no predictions; default: what its configuration says.
            metric_key_prefix: first part of the metric names.

        Returns:
            ``eval_loss``, ``eval_items`` (terms of that mean), what ``compute_metrics`` gives, ``eval_runtime`` (s),
            ``eval_samples_per_second``, ``eval_steps_per_second`` (rounds of all replicas), and ``epoch``.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                # By name where the Trainer knows it: an overridden get_eval_dataloader may look at it.
                chosen = name if eval_dataset is None else part
                metrics.update(self.evaluate(chosen, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        with self._memory_tracker.stage("eval") as stage:
            self._join_ranks()
            loader = self.get_eval_dataloader(dataset)
            start = time.perf_counter()
            # Without metrics nobody asks for predictions.
            loss_only = True if self.compute_metrics is None else None
            output = self.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix)
            self.asked_to_stop = None  # callbacks will have heard of a result, also where there are more sets
            found = self._with_speed(output, metric_key_prefix, start)
            if f"{metric_key_prefix}_loss" not in found:
                names = ", ".join(self.label_names)
                logger.warning("No batch of the evaluation had labels (%s), so that there is no loss.", names)
            self.log(found)
            found["epoch"] = float(self.state.epoch or 0.0)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            return {**found, **stage.end()}

    @fails_together
    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """The model's predictions for a dataset, in its order, and loss and metrics where it has labels.

        Rows of unequal length are filled up with -100. Every rank gets everything.

        Args:
            test_dataset: a dataset, with or without labels.
            ignore_keys: keys of the model's output that are no predictions.
            metric_key_prefix: first part of the metric names.
        """
        with self._memory_tracker.stage("test") as stage:
            self._join_ranks()
            loader = self.get_test_dataloader(test_dataset)
            start = time.perf_counter()
            output = self.evaluation_loop(
                loader, "Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
            found = self._with_speed(output, metric_key_prefix, start)
            self.control = self.callback_handler.on_predict(self.args, self.state, self.control, found)
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
        """One pass over ``dataloader``: what :meth:`evaluate` and :meth:`predict` share. Collective.

        Args:
            dataloader: batches of this replica.
            description: ``"Prediction"`` keeps predictions also where metrics are computed batch by batch.
            prediction_loss_only: keep nothing but the loss; default: the argument of this name.
            ignore_keys: keys of the model's output that are no predictions.
            metric_key_prefix: first part of the metric names.
        """
        self._join_ranks()
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        half = None if self.is_in_train else half_of(self.args)
        model = self._model_for_evaluation(half)
        self.callback_handler.eval_dataloader = dataloader
        loop = EvalLoop(self, dataloader, loss_only, keep=description == "Prediction")
        with without_cache(self.model, unless=self.args.use_cache), weights_in(half, self.model, self.device):
            output = loop.run(model, ignore_keys, metric_key_prefix)
        if self._preparation_time is not None and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_model_preparation_time"] = self._preparation_time
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
            model: the model, or the engine around it.
            inputs: the batch, whole. Where sequences are cut, every rank works on its part of it.
            prediction_loss_only: return the loss alone.
            ignore_keys: keys of the model's output that are no predictions.

        Returns:
            The mean loss over the batch's own items (None without labels), the model's outputs but the loss, and the
            labels, all of the whole batch. The loop weighs the loss with the number of items, so that the mean over
            the dataset is exact.

        Raises:
            ConfigError: ``compute_loss`` cannot return outputs, but they are asked for; or outputs of parts of
                sequences cannot be put together.
        """
        if self.sequence_cut is None:
            inputs = self._prepare_inputs(inputs)
        # Labels may be taken out of the batch when the loss is computed, and are shifted where it is cut.
        labels = detached(on_device(labels_of(inputs, self.label_names), self.device))
        by_itself = inputs.get("return_loss")
        by_itself = returns_loss_by_itself(self.model) if by_itself is None else by_itself
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]) if config else []
        has_loss = labels is not None or by_itself or self._loss_needs_no_labels()
        items = count_for(self.device, self.loss_rule.count(inputs)).clamp(min=1).to(torch.float32)
        with torch.no_grad(), self._own_part(inputs, has_loss) as own, self.compute_loss_context_manager():
            cut = active_cut()
            own_items = items
            if cut is not None:
                own = self._prepare_inputs(own)
                own_items = self.loss_rule.count(own)
                if has_loss:
                    self._verify_loss_rule(model, own, items)
            loss: torch.Tensor | None
            if has_loss:
                loss, outputs = self._loss_and_outputs(model, own, items, wanted=not prediction_loss_only)
            else:
                outputs = model(**own)
                loss = loss_if_any(outputs)
            loss = None if loss is None else loss.detach().mean()
            if cut is not None and loss is not None:
                loss = self._loss_of_all_parts(loss, own_items, items)
            if prediction_loss_only:
                return loss, None, None
            logits = detached(without_loss(outputs, ignore_keys))
            if cut is not None and self.sequence_cut is not None:
                logits = rejoined(logits, cut, number_of_samples(inputs), self.sequence_cut.length(inputs))
        return loss, logits, labels

    def give_up_if_asked(self) -> None:
        """Between two rounds of an evaluation. Collective.

        Raises:
            EvaluationGivenUp: the training makes it, and all ranks have agreed to stop.
        """
        if self.asked_to_stop is not None and self.asked_to_stop():
            raise EvaluationGivenUp

    # -- details ---------------------------------------------------------------------------------------------------

    def _loss_and_outputs(
        self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor, wanted: bool
    ) -> tuple[torch.Tensor, Any]:
        """:meth:`compute_loss` with the arguments that it takes; outputs are None where they are not ``wanted``."""
        if not wanted:
            return self.loss_of(model, inputs, items), None
        taken = accepted_arguments(self.compute_loss, {"num_items_in_batch", "return_outputs"})
        if "return_outputs" not in taken:
            raise ConfigError(
                f"{type(self).__name__}.compute_loss takes no return_outputs, but predictions are asked for. Give it "
                "`return_outputs=False` and return (loss, outputs) where it is true, or set prediction_loss_only=True."
            )
        keywords = {"num_items_in_batch": items} if "num_items_in_batch" in taken else {}
        with self._asked_by_loop():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True, **keywords)
        return loss, outputs

    def _loss_of_all_parts(self, loss: torch.Tensor, own: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch of ``items`` from that of this rank's part, which has ``own`` of them. Collective
        over the ranks that share the sequences."""
        share = self.loss_rule.contribution(loss, count_for(self.device, own), ItemCount(items)).to(torch.float32)
        distributed.all_reduce_sum(share, group=self.groups.sequence)
        return share

    def _verify_loss_rule(self, model: nn.Module, own: dict[str, Any], items: torch.Tensor) -> None:
        """Find out whether the loss uses the item count: that decides what the share of a part is. Once; collective."""

        def of_all_ranks(count: torch.Tensor) -> torch.Tensor:
            loss = torch.nan_to_num(self.loss_of(model, dict(own), count).detach())
            distributed.all_reduce_sum(loss)
            return loss

        if not self.loss_rule.verified:
            self.loss_rule.verify(items, items, of_all_ranks)

    def _loss_needs_no_labels(self) -> bool:
        """Whether a batch without labels has a loss: a loss of the user's own over a model that takes no labels."""
        if self.args.label_names is not None:
            return not self.args.label_names
        own = self.compute_loss_func is not None or is_overridden(self, StepHooks, "compute_loss")
        return own and not find_label_names(self.model)

    def _model_for_evaluation(self, half: str | None) -> nn.Module:
        """The engine of the training; before one, an engine of its own where weights are sharded (ZeRO-3) or sliced
        (tensor parallelism), or the model on the device."""
        if self._engine is not None:
            return self.model_wrapped
        if self.sequence_cut is not None:
            use_split_attention(self.model, self.layout)
        note_origin(self.model)
        start = time.perf_counter()
        if self.compiled.get("zero_optimization.stage") == 3 or self.layout.tp > 1:
            if self._evaluation_engine is None:
                with self._measured_load():
                    self._evaluation_engine = EvaluationEngine(
                        self.model, self.compiled, self.layout, half, self._reads_logits
                    )
                self._preparation_time = round(time.perf_counter() - start, 4)
                self.weight_check.loaded(self.model, self.args, self._evaluation_engine)
            return self._evaluation_engine.deepspeed
        with self._measured_load():
            if half is None or is_on_meta(self.model):
                put_on_device(self.model, self.device)
        if self._preparation_time is None:
            self._preparation_time = round(time.perf_counter() - start, 4)
            self.weight_check.loaded(self.model, self.args, None)
        return self.model

    def _end_evaluation_engine(self) -> None:
        """Training begins: its engine takes the place of the one that evaluated before."""
        if self._evaluation_engine is not None:
            self._evaluation_engine.close()
        self._evaluation_engine = self._preparation_time = None

    def _with_speed(self, output: EvalLoopOutput, prefix: str, start: float) -> dict[str, float]:
        """The metrics of ``output`` with its speed; the time to prepare the model is left out."""
        metrics = dict(output.metrics or {})
        seconds = time.perf_counter() - start - metrics.get(f"{prefix}_model_preparation_time", 0.0)
        plan = BatchPlan(self.layout, self.args.per_device_eval_batch_size)
        samples = output.num_samples or 0
        metrics[f"{prefix}_runtime"] = round(seconds, 4)
        metrics[f"{prefix}_samples_per_second"] = round(samples / seconds, 3)
        metrics[f"{prefix}_steps_per_second"] = round(math.ceil(samples / plan.round_size) / seconds, 3)
        return metrics


def check_metrics(args: Any, compute_metrics: Any) -> None:
    """Refuse metrics that cannot be computed as asked.

    Raises:
        ConfigError: names the argument and what is missing.
    """
    if args.batch_eval_metrics and compute_metrics is None:
        raise ConfigError(
            "batch_eval_metrics=True, but there is no compute_metrics. Pass one, or set batch_eval_metrics=False."
        )
    if args.batch_eval_metrics and not accepted_arguments(compute_metrics, {"compute_result"}):
        raise ConfigError(
            "batch_eval_metrics=True calls compute_metrics for every batch, with compute_result=True for the last one, "
            "but it has no such argument. Add it: return the metrics of all batches where it is true."
        )
    if args.include_for_metrics and compute_metrics is None:
        raise ConfigError(
            f"include_for_metrics={args.include_for_metrics!r}, but there is no compute_metrics that would get them."
        )
