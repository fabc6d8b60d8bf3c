"""Recipes with TRL's trainers, from preferences to a model that loads, on one and two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.test_tasks import check_resume, check_two_ranks, folder, recipe

__all__ = ["folder"]  # the fixture


def test_dpo_from_a_recipe(folder: Path) -> None:
    results = check_two_ranks(folder, "dpo", "preferences.jsonl")
    assert results["evaluation"]["eval_rewards/accuracies"] >= 0
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder / "runs" / "dpo")


def test_a_reward_model_from_a_recipe(folder: Path) -> None:
    results = check_two_ranks(folder, "reward", "preferences.jsonl")
    assert 0 <= results["evaluation"]["eval_accuracy"] <= 1
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder / "runs" / "reward")
    assert model.config.num_labels == 1


def test_dpo_goes_on_after_an_interruption(folder: Path) -> None:
    check_resume(folder, "dpo", "preferences.jsonl")


def test_a_dry_run_of_dpo(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from ds_trainer.cli.main import main

    path = recipe(folder, "dpo", "preferences.jsonl")
    assert main(["train", str(path), "--dry-run", "16", "--arguments.zero_stage=3"]) == 0
    assert "rank 0 of 16 ranks succeeded" in capfd.readouterr().out
