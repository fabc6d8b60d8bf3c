"""A training outlives its output: a pipe whose reader has ended, a log file on a full disk, a stream that is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, torch
from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from tests.training.test_full_disk import Regression

class Lose(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            if sys.argv[1] == "closed":
                sys.stdout.close()
            elif sys.argv[1] == "pipe":
                reader, writer = os.pipe()
                os.close(reader)
                os.dup2(writer, 1)
            else:
                os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

samples = [{"x": torch.ones(64), "labels": torch.tensor(1.0)} for _ in range(24)]
args = TrainingArguments(sys.argv[2], max_steps=6, save_steps=2, logging_steps=1, per_device_train_batch_size=4,
    use_cpu=True, report_to="none", disable_tqdm=sys.argv[1] == "pipe")
trainer = Trainer(Regression(), args, train_dataset=samples, callbacks=[Lose()])
trainer.train()
assert trainer.state.global_step == 6
"""


@pytest.mark.parametrize("how", ["pipe", "full", "closed"])
def test_a_run_goes_on_and_says_so_once(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, how, str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "step 2/6" in ended.stdout and "step 6/6" not in ended.stdout
    assert ended.stderr.count("its output cannot be written") == 1
    assert (tmp_path / "run" / "checkpoint-6").is_dir()
