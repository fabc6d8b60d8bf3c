"""Tracks the best evaluation and its checkpoint.

The trainer state has the best value of ``metric_for_best_model``, its step and its checkpoint, so a resumed run
compares with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_trainer.arguments.completion import evaluation_metric
from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.callbacks.state import TrainerState
from ds_trainer.checkpoint.protocol.checkpoint_directory import checkpoint_name, is_checkpoint
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def judge(args: TrainingArguments, state: TrainerState, metrics: Mapping[str, Any]) -> bool:
    """Whether this evaluation is the best so far; if so, ``state`` is updated. Collective.

    The value of the main process decides, because metrics may differ in the last digit between ranks.

    Raises:
        ConfigError: the metric is not among ``metrics``.
    """
    if args.metric_for_best_model is None:
        return False
    # The value of `args.metric_for_best_model` (with or without `eval_`) in `metrics`.
    name = evaluation_metric(str(args.metric_for_best_model))
    if name not in metrics:
        raise ConfigError(
            f"metric_for_best_model={args.metric_for_best_model} ({args.where('metric_for_best_model')}): the "
            f"evaluation has no metric {name}, only {', '.join(metrics)}. Choose one of these, or return {name} from "
            "compute_metrics."
        )
    value = float(distributed.broadcast_object(float(metrics[name])))
    worst = -math.inf if args.greater_is_better else math.inf
    best = worst if state.best_metric is None else state.best_metric
    better = value > best if args.greater_is_better else value < best
    # As in transformers, the first evaluation sets a value even if its metric is nan.
    state.best_metric = value if better else best
    if better and args.save_strategy != SaveStrategy.NO:
        state.best_global_step = state.global_step
    return better


def note_checkpoint(state: TrainerState, output_dir: Path) -> None:
    """Record the best checkpoint in ``state``, if it exists, before ``checkpoint-<global_step>`` is written.

    Collective: the main process looks for that checkpoint and broadcasts the result.
    """
    if not state.best_global_step:
        return
    best = output_dir / checkpoint_name(state.best_global_step)
    if state.best_global_step == state.global_step or _exists(best, is_checkpoint):
        state.best_model_checkpoint = str(best)


def _exists(path: Path, check: Callable[[Path], bool]) -> bool:
    return bool(distributed.broadcast_object(check(path) if distributed.rank() == 0 else None))


def best_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """The checkpoint to load at the end of training; None if not requested, or if there is none (with a warning).

    Collective: the main process looks for it.
    """
    if not args.load_best_model_at_end:
        return None
    best = state.best_model_checkpoint
    if best is None:
        why = "the best evaluation has no checkpoint"
        name = str(args.metric_for_best_model).removeprefix("eval_")
        seen = [entry[f"eval_{name}"] for entry in state.log_history if f"eval_{name}" in entry]
        if seen and not any(math.isfinite(value) for value in seen):
            why = f"{args.metric_for_best_model} was never a finite number ({listed(dict.fromkeys(seen), 4)})"
        logger.warning("load_best_model_at_end=True, but %s: the model keeps its last weights.", why)
        return None
    if not _exists(Path(best), Path.is_dir):
        logger.warning("The best checkpoint %s no longer exists: the model keeps its last weights.", best)
        return None
    return Path(best)
