"""Numbers of steps and what happens at each, beside transformers' Trainer on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.library import FullTokens, Library, assert_same, both, trained
from tests.support.models import RaggedTokens

LENGTHS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole epochs": (12, {"max_steps": -1, "num_train_epochs": 2}),
    "a ragged last batch": (10, {"max_steps": -1, "num_train_epochs": 2}),
    "shorter than a batch": (3, {"max_steps": -1, "num_train_epochs": 2}),
    "a fraction of an epoch": (20, {"max_steps": -1, "num_train_epochs": 1.5}),
    "less than an epoch": (20, {"max_steps": -1, "num_train_epochs": 0.3}),
    "more steps than an epoch has": (10, {"max_steps": 7}),
    "accumulation with a partial last window": (
        10,
        {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    ),
    "accumulation beyond an epoch": (6, {"max_steps": 3, "gradient_accumulation_steps": 4}),
    "without the ragged batch": (10, {"max_steps": -1, "num_train_epochs": 2, "dataloader_drop_last": True}),
    "in the order of the data": (10, {"max_steps": 4, "train_sampling_strategy": "sequential"}),
    "another order": (10, {"max_steps": 4, "data_seed": 7}),
    "another seed": (10, {"max_steps": 4, "seed": 7}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", LENGTHS)
def test_steps_losses_rates_and_weights(name: str, tmp_path: Path) -> None:
    samples, changes = LENGTHS[name]

    def script(library: Library) -> Any:
        return trained(library.trainer(changes, train_dataset=RaggedTokens(samples)))

    ours, reference = both(script, tmp_path)
    assert reference["steps"] > 0
    assert_same(ours, reference)


WHEN: dict[str, dict[str, Any]] = {
    "every three": {"logging_steps": 3},
    "a share of the run": {"logging_steps": 0.3, "eval_strategy": "steps", "eval_steps": 0.4},
    "the first too": {"logging_steps": 4, "logging_first_step": True},
    "each epoch": {"logging_strategy": "epoch", "eval_strategy": "epoch"},
    "never": {"logging_strategy": "no", "eval_strategy": "no"},
    "evaluation later than half": {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5},
    "evaluation before": {"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", WHEN)
def test_logs_have_the_same_steps(name: str, tmp_path: Path) -> None:
    """The mean of a logging window, evaluations between, and the entries of the history in their order."""

    def script(library: Library) -> Any:
        changes = {"max_steps": 10, **WHEN[name]}
        trainer = library.trainer(changes, eval_dataset=FullTokens(9, seed=1))
        return trained(trainer)

    assert_same(*both(script, tmp_path))
