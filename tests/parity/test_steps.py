"""Numbers of steps and what happens at each, beside transformers' Trainer on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ds_trainer
from tests.parity.library import Library, assert_same, both, logs, trained
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


def test_a_run_of_transformers_is_extended(tmp_path: Path) -> None:
    """Four steps there, eight in all: the rates are those of eight steps, from the first resumed one on."""
    import transformers

    (tmp_path / "theirs").mkdir()
    theirs = Library(transformers, tmp_path / "theirs").trainer({"save_strategy": "steps", "save_steps": 4})
    theirs.train()
    ours = Library(ds_trainer, tmp_path / "ours").trainer({"max_steps": 8})
    ours.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-4"))
    rates = [entry["learning_rate"] for entry in logs(ours)]
    assert rates[4:] == pytest.approx([1e-2 * (8 - step) / 8 for step in range(4, 8)])
    assert ours.state.global_step == 8
    ours.engine.close()
