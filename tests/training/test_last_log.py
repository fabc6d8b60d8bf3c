"""The last step of a run is logged, whatever ``logging_steps`` is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from tests.support.models import PlainLanguageModel, RaggedTokens


@pytest.mark.cases(1)
@pytest.mark.parametrize(("strategy", "logged"), [("steps", [8, 10]), ("no", [])])
def test_the_last_step_is_logged(strategy: str, logged: list[int], tmp_path: Path) -> None:
    assert logged_steps(tmp_path, 10, logging_strategy=strategy) == logged


@pytest.mark.parametrize(("strategy", "logged"), [("steps", [8, 9]), ("no", [])])
def test_the_last_step_of_a_run_that_a_callback_ends_is_logged(
    strategy: str, logged: list[int], tmp_path: Path
) -> None:
    assert logged_steps(tmp_path, 9, logging_strategy=strategy) == logged


def logged_steps(directory: Path, last: int, **changes: Any) -> list[int]:
    """The steps with a loss in the history of a run of 10 steps that ends after ``last``."""

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step == last

    args = TrainingArguments(
        str(directory), use_cpu=True, max_steps=10, logging_steps=8, save_strategy="no", disable_tqdm=True, **changes
    )
    trainer = Trainer(PlainLanguageModel(), args, train_dataset=RaggedTokens(80), callbacks=[Ends()])
    trainer.train()
    return [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
