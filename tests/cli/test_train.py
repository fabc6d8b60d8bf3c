"""``ds-trainer train``: options beside the overrides of the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_trainer.cli.main import main
from ds_trainer.utils.exit_codes import CANNOT_WORK

RECIPE = "ds_configs/recipes/quickstart.yaml"


@pytest.mark.parametrize("steps", ["some", "-2"])
def test_profile_sets_the_argument(steps: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = [RECIPE, f"--profile={steps}", "--arguments.output_dir", str(tmp_path / "out")]
    assert main(["train", *options]) == CANNOT_WORK
    message = capsys.readouterr().err
    assert "profile_steps" in message and steps in message
    assert not (tmp_path / "out").exists()
