"""``ds-trainer train``: options beside the overrides of the recipe."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ds_trainer.cli.main import main
from ds_trainer.utils.exit_codes import CANNOT_WORK
from tests.support.pool import pool

RECIPE = "ds_configs/recipes/quickstart.yaml"


@pytest.mark.parametrize("steps", ["some", "-2"])
def test_profile_sets_the_argument(steps: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = [RECIPE, f"--profile={steps}", "--arguments.output_dir", str(tmp_path / "out")]
    assert main(["train", *options]) == CANNOT_WORK
    message = capsys.readouterr().err
    assert "profile_steps" in message and steps in message
    assert not (tmp_path / "out").exists()


def run_small(folder: Path, *words: str) -> None:
    """A command with a recipe of one small layer, in a rank whose environment is its own."""
    (folder / "text.txt").write_text("A run that says where its time goes. " * 300)
    values = {
        "data.train": f"[{folder}/*.txt]",
        "data.held_out_every": "0",
        "data.sequence_length": "32",
        "model.architecture.hidden_size": "16",
        "model.architecture.intermediate_size": "32",
        "model.architecture.num_hidden_layers": "1",
        "arguments.output_dir": str(folder / "out"),
        "arguments.self_test": "never",
    }
    options = [*words, *(f"--{key}={value}" for key, value in values.items())]
    assert pool(1).run(partial(main_with_cache, options, str(folder / "cache"))) == [0]


def test_profile_keeps_nothing_else(tmp_path: Path) -> None:
    run_small(tmp_path, "profile", RECIPE, "--steps", "2")
    assert not (tmp_path / "out").exists()
    directory = tmp_path / "out-profile"
    page = (directory / "profile" / "profile.md").read_text()
    assert "mean of 2 steps" in page and "| matrix products |" in page
    assert not [*directory.rglob("*.safetensors"), *directory.rglob("checkpoint-*"), *directory.rglob("results.json")]


def main_with_cache(options: list[str], cache: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        return main(options)


def test_calibrate_keeps_nothing_on_cpus(tmp_path: Path) -> None:
    more = ("--report.sample_tokens=0", "--arguments.max_steps=8", "--arguments.eval_strategy=no")
    run_small(tmp_path, "train", RECIPE, "--calibrate", *more)
    assert not (tmp_path / "cache" / "ds_trainer" / "calibration.json").exists()
