"""EarlyStoppingCallback by itself: it counts as transformers' does, keeps its count, and refuses what cannot work."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer import EarlyStoppingCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState, export_states, restore_states
from ds_trainer.utils.errors import ConfigError


def args_of(**changes: Any) -> SimpleNamespace:
    values = {"metric_for_best_model": "loss", "eval_strategy": "steps", "greater_is_better": False}
    return SimpleNamespace(**{**values, "load_best_model_at_end": True, **changes})


def evaluate(callback: Any, args: Any, state: TrainerState, value: float) -> bool:
    """One evaluation, and the comparison that the trainer makes after it; whether the callback stops."""
    control = TrainerControl()
    callback.on_evaluate(args, state, control, metrics={"eval_loss": value})
    best = state.best_metric
    if best is None or (value > best if args.greater_is_better else value < best):
        state.best_metric = value
    return control.should_training_stop


@given(
    st.lists(st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, float("nan")]), max_size=12),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.04, 0.06, 0.11, None]),
    st.booleans(),
)
def test_early_stopping_counts_like_transformers(
    values: list[float], patience: int, threshold: float | None, greater: bool
) -> None:
    from transformers import EarlyStoppingCallback as Theirs

    args = args_of(greater_is_better=greater)
    ours, other = EarlyStoppingCallback(patience, threshold), Theirs(patience, threshold or 0.0)
    states = TrainerState(), TrainerState()
    for value in values:
        assert evaluate(ours, args, states[0], value) == evaluate(other, args, states[1], value)
        assert ours.early_stopping_patience_counter == other.early_stopping_patience_counter
    assert ours.state()["attributes"] == other.state()["attributes"]


def test_early_stopping_state_is_restored() -> None:
    callback, state = EarlyStoppingCallback(3, 0.1), TrainerState()
    for value in (0.5, 0.6, 0.7):
        assert not evaluate(callback, args_of(), state, value)
    other = EarlyStoppingCallback(3, 0.1)
    restore_states([other], export_states([callback]))
    assert other.early_stopping_patience_counter == 2
    assert evaluate(other, args_of(), state, 0.6)
    restored = EarlyStoppingCallback.from_state(callback.state())
    assert (restored.early_stopping_patience, restored.early_stopping_threshold) == (3, 0.1)


def test_evaluation_sets_without_the_metric_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ds_trainer").propagate = True
    callback, state, control = EarlyStoppingCallback(), TrainerState(best_metric=0.1), TrainerControl()
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        for _ in range(3):
            callback.on_evaluate(args_of(), state, control, metrics={"eval_b_loss": 1.0})
    assert not control.should_training_stop and callback.early_stopping_patience_counter == 0
    assert caplog.text.count("without eval_loss") == 1


@pytest.mark.parametrize("event", ["on_init_end", "on_train_begin"])
def test_early_stopping_needs_a_metric_and_evaluations(event: str) -> None:
    call = getattr(EarlyStoppingCallback(), event)
    call(args_of(), TrainerState(), TrainerControl())
    with pytest.raises(ConfigError) as error:
        call(args_of(metric_for_best_model=None, eval_strategy="no"), TrainerState(), TrainerControl())
    assert len(error.value.problems) == 2
    assert "set metric_for_best_model" in str(error.value) and "eval_strategy=no" in str(error.value)
    with pytest.raises(ConfigError, match="early_stopping_patience=0"):
        EarlyStoppingCallback(0)
