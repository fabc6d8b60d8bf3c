"""debug=underflow_overflow: the first inf or nan ends the run, with the modules that led to it."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.model.preparation import overflow_problems
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool


class Exploding(Regression):
    """The output of the second layer is infinite from the second call with gradients on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layers[1] = nn.Module()
        self.layers[1].forward = self._explode  # type: ignore[assignment]

    def _explode(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        return x / 0.0 if self.calls > 1 else x.tanh()


def watched(output_dir: Path, stage: int, make_model: Any) -> tuple[str, str, int, int]:
    """Error, output, steps done, and hooks left on the model."""
    model = make_model()
    args = TrainingArguments(
        str(output_dir),
        debug="underflow_overflow",
        max_steps=3,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        zero_stage=stage,
    )
    job = Trainer(model, args, train_dataset=regression_rows(64))
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            job.train()
        except ValueError as raised:
            error = str(raised)
    watching = [hook for m in model.modules() for hook in m._forward_hooks.values() if "Watch" in repr(hook)]
    job.engine.close()
    return error, printed.getvalue(), job.state.global_step, len(watching)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_ends_the_run(stage: int, tmp_path: Path) -> None:
    for error, printed, steps, left in pool(2).run(partial(watched, tmp_path, stage, Exploding)):
        assert "inf/nan detected" in error and steps == 1 and left == 0
        assert "layers.0 Linear" in printed and "weight" in printed and "inf output" in printed


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_without_overflow_continues(stage: int, tmp_path: Path) -> None:
    for error, _, steps, left in pool(2).run(partial(watched, tmp_path, stage, Regression)):
        assert error == "" and steps == 3 and left == 0


def test_the_overflow_check_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overflow_problems() == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install transformers" in overflow_problems()[0]
