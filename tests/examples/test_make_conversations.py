"""The conversations are real ones, and a recipe for them and the model can be made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ds_trainer.cli.main import main
from ds_trainer.recipes.recipe import load_recipe
from tests.examples.conftest import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import make_conversations

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


def test_from_the_library_to_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = tmp_path / "conversations.jsonl", tmp_path / "base"
    monkeypatch.setattr(sys, "argv", ["make_conversations.py", str(data), "--model", str(model)])
    make_conversations.main()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(rows) > 1500
    assert all([turn["role"] for turn in row["messages"]] == ["user", "assistant"] for row in rows)
    assert all(turn["content"].strip() for row in rows for turn in row["messages"])
    out = tmp_path / "recipe.yaml"
    assert main(["init", str(out), "--model", str(model), "--data", str(data), "--devices", "cpu", "--yes"]) == 0
    recipe = load_recipe(out)
    assert "assistant" in recipe.data.train_on
    assert recipe.tokens_per_sample <= 1024
