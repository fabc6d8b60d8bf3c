"""Stops training when a metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_trainer.arguments.completion import evaluation_metric
from ds_trainer.callbacks.protocol import TrainerCallback
from ds_trainer.callbacks.state import ExportableState, TrainerControl, TrainerState
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger("callbacks.early_stopping")


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Ends the training after ``early_stopping_patience`` evaluations in a row without improvement.

    An evaluation improves when ``metric_for_best_model`` is better than the best value so far by more than
    ``early_stopping_threshold``. The count of evaluations without improvement is in the checkpoint.

    Args:
        early_stopping_patience: evaluations without improvement after which training ends.
        early_stopping_threshold: smallest improvement that counts, in the unit of the metric; None means 0.

    Source of names and meaning: transformers 5, class of the same name.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        if early_stopping_patience < 1:
            raise ConfigError(f"early_stopping_patience={early_stopping_patience!r} must be a positive integer.")
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0
        self._warned = False

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the arguments when the Trainer is constructed."""
        self._check(args)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the arguments again: a trial may have changed them."""
        self._check(args)
        if not args.load_best_model_at_end:
            logger.warning(
                "early stopping without load_best_model_at_end=True: after training the model has its last weights, "
                "not its best ones"
            )

    def _check(self, args: Any) -> None:
        problems = []
        if args.metric_for_best_model is None:
            problems.append("EarlyStoppingCallback needs a metric: set metric_for_best_model, for example to 'loss'.")
        if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
            problems.append(
                f"EarlyStoppingCallback needs evaluations, but eval_strategy={args.eval_strategy}. Set it to steps or "
                "epoch."
            )
        if problems:
            raise ConfigError(problems)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Count evaluations without improvement, and stop after ``patience`` of them."""
        name = evaluation_metric(str(args.metric_for_best_model))
        value = (metrics or {}).get(name)
        if value is None:
            if not self._warned:
                self._warned = True
                names = ", ".join(metrics or ())
                logger.warning("early stopping ignores an evaluation without %s; its metrics: %s", name, names)
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def check_metric_value(self, args: Any, state: TrainerState, control: TrainerControl, metric_value: float) -> None:
        """Count this evaluation; an improvement over ``state.best_metric`` resets the count."""
        best = state.best_metric  # of the previous evaluations: the trainer updates it after this event
        if best is None:
            improved = True
        else:
            gain = metric_value - best if args.greater_is_better else best - metric_value
            improved = gain > self.early_stopping_threshold
        self.early_stopping_patience_counter = 0 if improved else self.early_stopping_patience_counter + 1

    def state(self) -> dict[str, Any]:
        """The constructor's arguments, and the count."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
