"""Which evaluation was the best, and where its weights are.

The best value of ``metric_for_best_model`` is kept in the trainer's state, with its step and its checkpoint, so that a
resumed run goes on comparing with it.
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
from ds_trainer.checkpoint.protocol.directory import checkpoint_name, is_checkpoint
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def metric_to_compare(args: TrainingArguments, metrics: Mapping[str, Any]) -> float:
    """The value of ``args.metric_for_best_model`` in ``metrics``, whose names may leave out ``eval_``.

    Raises:
        ConfigError: it is not there.
    """
    name = evaluation_metric(str(args.metric_for_best_model))
    if name not in metrics:
        raise ConfigError(
            f"metric_for_best_model={args.metric_for_best_model} ({args.where('metric_for_best_model')}): there is no "
            f"{name} in the evaluation's metrics, which are {', '.join(metrics)}. Choose one of these, or let "
            "compute_metrics return it."
        )
    return float(metrics[name])


def judge(args: TrainingArguments, state: TrainerState, metrics: Mapping[str, Any]) -> bool:
    """Whether this evaluation is the best so far; if so it is written down in ``state``. Collective.

    The main process's value decides, so that ranks whose metrics differ in the last digit agree.

    Raises:
        ConfigError: the metric is not among ``metrics``.
    """
    if args.metric_for_best_model is None:
        return False
    value = float(distributed.broadcast_object(metric_to_compare(args, metrics)))
    worst = -math.inf if args.greater_is_better else math.inf
    best = worst if state.best_metric is None else state.best_metric
    better = value > best if args.greater_is_better else value < best
    # As in the reference, the first evaluation leaves a value behind even where it is no number.
    state.best_metric = value if better else best
    if better and args.save_strategy != SaveStrategy.NO:
        state.best_global_step = state.global_step
    return better


def note_checkpoint(state: TrainerState, output_dir: Path) -> None:
    """Before ``checkpoint-<global_step>`` is written: write down which checkpoint is the best one's, if it is there.

    Collective: the main process looks, at that one checkpoint, and tells the others.
    """
    if not state.best_global_step:
        return
    best = output_dir / checkpoint_name(state.best_global_step)
    if state.best_global_step == state.global_step or _is_there(best, is_checkpoint):
        state.best_model_checkpoint = str(best)


def _is_there(path: Path, look: Callable[[Path], bool]) -> bool:
    return bool(distributed.broadcast_object(look(path) if distributed.rank() == 0 else None))


def best_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """The checkpoint to load when training ends; None where that is not asked for, or there is none (a warning).

    Collective: the main process looks whether it is there.
    """
    if not args.load_best_model_at_end:
        return None
    best = state.best_model_checkpoint
    if best is None:
        logger.warning(
            "load_best_model_at_end=True, but the best evaluation has no checkpoint: the model keeps its last weights."
        )
        return None
    if not _is_there(Path(best), Path.is_dir):
        logger.warning("The best checkpoint was %s, which is gone: the model keeps its last weights.", best)
        return None
    return Path(best)
