"""Who says what: what all ranks have to say comes from rank 0, and what concerns one rank from that one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from ds_trainer.training.startup.process_setup import configure_process
from ds_trainer.utils.logging import EVERY_RANK, get_logger, set_log_level, warn
from ds_trainer.utils.ranks import without_launcher
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool

LAUNCHERS = {
    "torchrun": {
        **{"RANK": "{}", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
        "TORCHELASTIC_RUN_ID": "1",
    },
    "srun": {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "{}",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "a,b",
    },
    "mpirun": {
        **{"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        **{"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MASTER_ADDR": "a"},
    },
    "contradiction": {"RANK": "{}", "WORLD_SIZE": "16"},
}


@contextmanager
def collected(level: int = logging.INFO) -> Iterator[list[str]]:
    """Messages that reach the handlers of the package, and warnings of Python that are shown."""
    texts: list[str] = []
    handler, package = logging.Handler(), logging.getLogger("ds_trainer")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    before = package.level
    package.setLevel(level)
    package.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "`torch")  # torch's own are not ours to count
            yield texts
            texts += [str(warning.message) for warning in shown]
    finally:
        package.removeHandler(handler)
        set_log_level(before, False)


def started_as(monkeypatch: pytest.MonkeyPatch, launcher: str, rank: int) -> None:
    for name in set(os.environ) - set(without_launcher(os.environ)):
        monkeypatch.delenv(name)
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value.format(rank))


def said() -> list[str]:
    logger = get_logger("ds_trainer.some.module")
    with collected() as texts:
        logger.info("information")
        logger.warning("of all")
        logger.warning("of this rank", extra=EVERY_RANK)
        logger.error("error")
        warn("of python", UserWarning)
    return texts


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_before_a_process_group_with_every_launcher(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    started_as(monkeypatch, launcher, 0)
    assert said() == ["information", "of all", "of this rank", "error", "of python"]
    started_as(monkeypatch, launcher, 8)  # also where the user has set the level
    assert said() == ["of this rank", "error"]


def test_a_python_warning_that_is_an_error_is_one_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started_as(monkeypatch, "srun", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="of python"):
            warn("of python", UserWarning)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["of this rank", "error"]),
        ({"log_level": "info"}, ["information", "of all", "of this rank", "error"]),
        ({"log_level": "warning"}, ["of all", "of this rank", "error"]),
        ({"log_level": "info", "log_on_each_node": False}, ["of this rank", "error"]),
        ({"log_level_replica": "info", "log_on_each_node": False}, ["information", "of all", "of this rank", "error"]),
        ({"log_level_replica": "error", "log_on_each_node": False}, ["error"]),
        ({"log_level_replica": "passive", "log_on_each_node": False}, ["of this rank", "error"]),
    ],
)
def test_the_first_rank_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], expected: list[str]
) -> None:
    """``log_level`` holds there too with ``log_on_each_node``, if it was asked for."""
    started_as(monkeypatch, "srun", 8)
    logger = get_logger("ds_trainer.some.module")
    with collected(logging.WARNING) as texts:
        configure_process(TrainingArguments("out", use_cpu=True, **arguments))
        logger.info("information")
        logger.warning("of all")
        logger.warning("of this rank", extra=EVERY_RANK)
        logger.error("error")
    assert texts == expected


class _Counting(TrainerCallback):
    pass


def warnings_of_a_run(output_dir: Path) -> list[str]:
    rows = regression_rows(8)
    rows[0]["labels"] = torch.tensor(float("nan"))
    with collected() as texts:
        args = TrainingArguments(
            str(output_dir),
            **{"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 1, "eval_strategy": "steps"},
            per_device_eval_batch_size=1,
            **{"eval_steps": 2, "train_sampling_strategy": "sequential", "learning_rate": 0.0, "use_cpu": True},
            **{"nonfinite_policy": "skip", "self_test": "never", "disable_tqdm": True, "metric_for_best_model": "loss"},
            **{"save_strategy": "no", "accelerator_config": {"non_blocking": True}, "dataloader_pin_memory": False},
        )
        args.set_training(1e-9, batch_size=1, max_steps=2, gradient_checkpointing=False)
        job = Trainer(Regression(), args, train_dataset=rows, eval_dataset=rows, callbacks=[_Counting(), _Counting()])
        job.add_callback(EarlyStoppingCallback(1))
        job.train()
        job.engine.close()
    return texts


def test_a_run_of_four_ranks_says_everything_once(tmp_path: Path) -> None:
    first, *others = pool(4).run(partial(warnings_of_a_run, tmp_path))
    assert others == [[], [], []]
    for part in (
        *("gradient_checkpointing=False is deprecated", "a second _Counting", "non_blocking=True has no effect"),
        *(
            "early stopping without",
            "steps had a non-finite loss",
            "batches of an evaluation",
            "the loss is not finite",
        ),
    ):
        assert sum(part in text for text in first) == 1, (part, first)


SCRIPT = """\
from ds_trainer import TrainingArguments


def arguments():
    return TrainingArguments("out", learning_rate=-1)


arguments()
"""


def test_an_error_of_a_script_is_printed_by_one_rank_without_frames_of_the_package(tmp_path: Path) -> None:
    """As under a launcher, which ends the others when one has failed."""
    (tmp_path / "train.py").write_text(SCRIPT)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py")],
            env={**os.environ, **{name: value.format(rank) for name, value in LAUNCHERS["torchrun"].items()}},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    errors = ranks[1].communicate()[1]
    ranks[0].terminate()
    assert ranks[0].communicate()[1] == ""
    lines = errors.strip().splitlines()
    assert lines[0].startswith("Traceback") and errors.count("  File ") == errors.count("train.py") == 2
    assert lines[-1].endswith("learning_rate=-1 must be a number that is not negative.")
    assert ranks[1].returncode == 1
