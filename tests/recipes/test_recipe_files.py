"""The recipes in ds_configs/recipes: each is valid, and trains in small if one process of a CPU can."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.cli.main import main
from ds_trainer.recipes.recipe import load_recipe
from tests.cli.test_init import PAIRS, ROWS
from tests.support.chat_model import save_chat_model
from tests.support.pool import pool

FOLDER = Path(__file__).parents[2] / "ds_configs" / "recipes"
FILES = sorted(FOLDER.glob("*.yaml"))
# The data of each that is run on one rank. quickstart and finetune_adapters have tests of their own jobs; dpo, reward
# and classification are in test_tasks.py.
SMALL = {"full": "answers", "lora": "answers", "qlora": "answers", "continued_pretraining": "text"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_recipe_is_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.arguments["output_dir"].startswith("runs/")
    assert path.read_text(encoding="utf-8").splitlines()[1].startswith("# ")  # says what it is for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    save_chat_model(path / "base")
    rows = {"answers": [{"prompt": f"say {pair}: ", "completion": pair} for pair in PAIRS], "text": ROWS["text"]}
    for name, entries in rows.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in entries))
    return path


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_trains_in_small(name: str, folder: Path) -> None:
    results = train_in_small(name, folder, SMALL[name], ranks=1)
    assert math.isfinite(results["evaluation"]["eval_loss"])
    adapters = (folder / "runs" / name / "adapter_model.safetensors").is_file()
    assert adapters == (name in ("lora", "qlora"))


def test_long_samples_train_on_two_ranks(folder: Path) -> None:
    """The recipe for long context, with a sequence that two ranks share instead of eight."""
    more = {"arguments.sequence_parallel_size": 2}
    results = train_in_small("long_context", folder, "text", ranks=2, **more)
    assert math.isfinite(results["evaluation"]["eval_loss"])


def train_in_small(name: str, folder: Path, rows: str, ranks: int, **more: object) -> dict[str, Any]:
    """The results of two steps of a recipe with a small model."""
    changes = {
        "model.path": folder / "base",
        "data.train": f"[{folder / rows}.jsonl]",
        "data.held_out": 8,
        "data.max_length": 64,
        "arguments.output_dir": folder / "runs" / name,
        "arguments.max_steps": 2,
        "arguments.save_strategy": "no",
        "arguments.disable_tqdm": "true",
        "arguments.use_cpu": "true",
        **more,
    }
    argv = ["train", str(FOLDER / f"{name}.yaml"), *(f"--{key}={value}" for key, value in changes.items())]
    assert pool(ranks).run(partial(main, argv)) == [0] * ranks
    results: dict[str, Any] = json.loads((folder / "runs" / name / "results.json").read_text())
    assert results["steps"] == 2
    return results
