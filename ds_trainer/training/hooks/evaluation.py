"""Evaluation: the exact mean loss over a dataset."""

from __future__ import annotations

from typing import Any

from ds_trainer.training.eval_loop import evaluate_loss
from ds_trainer.training.hooks.data import DataHooks
from ds_trainer.training.hooks.records import RecordHooks
from ds_trainer.training.hooks.step import StepHooks
from ds_trainer.training.model_habits import without_cache
from ds_trainer.utils.failures import fails_together


class EvaluationHooks(DataHooks, StepHooks, RecordHooks):
    """Evaluation of the model as it is now."""

    @fails_together
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss per item over a dataset, exact and equal for every layout.

        Args:
            eval_dataset: a dataset, a dict of them (evaluated one after the other, names in the metric keys), or the
                name of one; default: the Trainer's.
            ignore_keys: accepted for the reference's signature; only the loss is computed.
            metric_key_prefix: first part of the metric names.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics.update(self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        self._join_ranks()
        loader = self.get_eval_dataloader(dataset)
        self.callback_handler.eval_dataloader = loader
        if self._engine is None:
            self.model.to(self.device)
        with without_cache(self.model):
            result = evaluate_loss(self, self.model_wrapped, loader)
        values = {
            "loss": result.loss,
            "runtime": result.seconds,
            "samples_per_second": result.samples / result.seconds,
            "items": result.items,
        }
        logs = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        self.log(logs)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
        return {**logs, "epoch": float(self.state.epoch or 0.0)}
