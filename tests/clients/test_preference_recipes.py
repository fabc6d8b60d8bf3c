"""Recipes with TRL's trainers, from preferences to a model that loads."""

from __future__ import annotations

from pathlib import Path

from tests.recipes.test_tasks import folder, results_of

__all__ = ["folder"]  # the fixture


def test_dpo_from_a_recipe(folder: Path) -> None:
    results = results_of(folder, "dpo", "preferences.jsonl")
    assert results["evaluation"]["eval_rewards/accuracies"] >= 0
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder / "runs" / "dpo")


def test_a_reward_model_from_a_recipe(folder: Path) -> None:
    results = results_of(folder, "reward", "preferences.jsonl")
    assert 0 <= results["evaluation"]["eval_accuracy"] <= 1
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder / "runs" / "reward")
    assert model.config.num_labels == 1
