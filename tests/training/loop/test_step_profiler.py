"""``profile_steps``: a trace, and a page with where the time of a step goes."""

from __future__ import annotations

import gzip
import io
import json
import logging
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.training.stopping import stop_controller
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.stop_requests import ActAtStep, send

PAUSE = 0.05


class SlowTokens(RaggedTokens):
    """Reading a sample takes a quarter of a pause."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(PAUSE / 4)
        return super().__getitem__(index)


class SlowTrainer(Trainer):
    """A micro-batch takes a pause in Python."""

    def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
        time.sleep(PAUSE)
        return super().training_step(*args, **keywords)


class SlowCallback(TrainerCallback):
    """Takes a pause after each step."""

    def on_step_end(self, *args: Any, **keywords: Any) -> None:
        time.sleep(PAUSE)


def profiled_run(output_dir: str, slow: bool, arguments: dict[str, Any]) -> list[float]:
    """Train with two micro-batches of four samples per step; returns the losses."""
    args = TrainingArguments(
        output_dir,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **arguments,
    )
    kind, data = (SlowTrainer, SlowTokens(64)) if slow else (Trainer, RaggedTokens(64))
    callbacks = [SlowCallback()] if slow else []
    trainer = kind(tiny_llama(), args, train_dataset=data, callbacks=callbacks)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.engine.close()
    return losses


def figures_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "profile" / "profile.json").read_text())


def test_the_page_says_where_the_time_goes(tmp_path: Path) -> None:
    plain = pool(1).run(profiled_run, str(tmp_path / "plain"), False, {"max_steps": 6})
    losses = pool(1).run(profiled_run, str(tmp_path), True, {"max_steps": 6, "profile_steps": 3})
    assert losses == plain
    figures = figures_of(tmp_path)
    parts = figures["parts"]
    assert figures["steps"] == 3
    assert sum(parts.values()) == pytest.approx(figures["step_seconds"])
    assert parts["data"] >= 2 * PAUSE
    groups = figures["groups"]
    assert groups["matrix products"] > 0 and groups["optimizer"] > 0 and groups["idle"] >= 4 * PAUSE
    assert groups["communication, exposed"] == pytest.approx(parts["communication"], abs=1e-9)
    every = sum(value for group, value in groups.items() if group != "communication, hidden")
    assert every == pytest.approx(figures["step_seconds"], rel=0.05)
    assert parts["Python"] >= 2 * PAUSE
    assert parts["callbacks"] >= PAUSE / 2  # between three steps there are two pauses
    assert all(parts[part] > 0 for part in ("forward", "backward", "optimizer"))
    assert any(name == "aten::mm" for name, _, _ in figures["operators"])
    page = (tmp_path / "profile" / "profile.md").read_text()
    assert "mean of 3 steps" in page and "- **data**" in page and "- **Python**" in page
    with gzip.open(tmp_path / "profile" / "trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("ds_trainer.update") == 3
    assert not (tmp_path / "plain" / "profile").exists()


def test_several_ranks_communicate(tmp_path: Path) -> None:
    pool(2).run(profiled_run, str(tmp_path), False, {"max_steps": 4, "profile_steps": 2, "zero_stage": 3})
    # Seconds. How large a part of the step it is depends on what else runs on the machine.
    assert figures_of(tmp_path)["parts"]["communication"] > 0.001


@pytest.mark.cases(1)
@pytest.mark.parametrize(("max_steps", "wanted", "profiled"), [(2, 2, 2), (3, 9, 3), (3, 2, 2)])
def test_a_short_run_has_a_shorter_profile(tmp_path: Path, max_steps: int, wanted: int, profiled: int) -> None:
    pool(1).run(profiled_run, str(tmp_path), False, {"max_steps": max_steps, "profile_steps": wanted})
    assert figures_of(tmp_path)["steps"] == profiled


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="profile_steps=-1"):
        TrainingArguments("out", profile_steps=-1)


class FailingTrainer(Trainer):
    """A step fails while it is profiled."""

    def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
        if self.state.global_step == 3:
            raise ValueError("no third step")
        return super().training_step(*args, **keywords)


def ended_early(output_dir: str, how: str) -> tuple[str, bool, str]:
    """Train until step 3 of a profile of steps 3 to 6; how it ended, whether a profiler is on, and what was logged."""
    values: dict[str, Any] = {"max_steps": 8, "profile_steps": 4, "save_steps": 100, "disable_tqdm": True}
    args = TrainingArguments(output_dir, per_device_train_batch_size=4, use_cpu=True, **values)
    stop = partial(send, signal.SIGTERM) if how == "signal" else lambda: None
    kind = FailingTrainer if how == "error" else Trainer
    trainer = kind(tiny_llama(), args, train_dataset=RaggedTokens(64), callbacks=[ActAtStep(3, stop)])
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("ds_trainer").addHandler(handler)
    stop_controller.SECONDS_BETWEEN = 0.0  # steps are too quick to wait for some of them
    try:
        trainer.train()
        ended = "done"
    except (SystemExit, ValueError) as error:
        ended = type(error).__name__
    finally:
        stop_controller.SECONDS_BETWEEN = 0.25
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logging.getLogger("ds_trainer").removeHandler(handler)
    on = torch.autograd._profiler_enabled()
    trainer.engine.close()
    return ended, on, log.getvalue()


def test_a_run_that_is_stopped_early_keeps_its_profile(tmp_path: Path) -> None:
    ((ended, on, _),) = pool(1).run(ended_early, str(tmp_path), "signal")
    assert (ended, on) == ("TrainingStopped", False)
    assert figures_of(tmp_path)["steps"] == 1  # of four
    assert (tmp_path / "profile" / "trace.json.gz").is_file()


def test_a_step_that_fails_stops_the_profiler(tmp_path: Path) -> None:
    ((ended, on, log),) = pool(1).run(ended_early, str(tmp_path), "error")
    assert (ended, on) == ("ValueError", False)
    assert "the profile is lost after 1 step: a step failed (ValueError)" in log
    assert not (tmp_path / "profile").exists()
