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


def test_profile_keeps_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A run that says where its time goes. " * 300)
    values = {
        "data.train": f"[{tmp_path}/*.txt]",
        "data.held_out_every": "0",
        "data.sequence_length": "32",
        "model.architecture.hidden_size": "16",
        "model.architecture.intermediate_size": "32",
        "model.architecture.num_hidden_layers": "1",
        "arguments.output_dir": str(tmp_path / "out"),
        "arguments.self_test": "never",
    }
    options = ["profile", RECIPE, "--steps", "2", *(f"--{key}={value}" for key, value in values.items())]
    assert pool(1).run(partial(main_with_cache, options, str(tmp_path / "cache"))) == [0]
    assert not (tmp_path / "out").exists()
    directory = tmp_path / "out-profile"
    page = (directory / "profile" / "profile.md").read_text()
    assert "mean of 2 steps" in page and "| matrix products |" in page
    assert not [*directory.rglob("*.safetensors"), *directory.rglob("checkpoint-*"), *directory.rglob("results.json")]


def main_with_cache(options: list[str], cache: str) -> int:
    """The command in a rank, whose environment is its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        return main(options)


def test_calibrate_keeps_nothing_on_cpus(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A run that the planner learns from. " * 200)
    values = {
        "data.train": f"[{tmp_path}/*.txt]",
        "data.held_out_every": "0",
        "data.sequence_length": "32",
        "model.architecture.hidden_size": "16",
        "model.architecture.intermediate_size": "32",
        "model.architecture.num_hidden_layers": "1",
        "report.sample_tokens": "0",
        "arguments.output_dir": str(tmp_path / "out"),
        "arguments.max_steps": "8",
        "arguments.eval_strategy": "no",
        "arguments.self_test": "never",
    }
    options = ["train", RECIPE, "--calibrate", *(f"--{key}={value}" for key, value in values.items())]
    assert pool(1).run(partial(main_with_cache, options, str(tmp_path / "cache"))) == [0]
    assert not (tmp_path / "cache" / "ds_trainer" / "calibration.json").exists()
