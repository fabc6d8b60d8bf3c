"""A rank is killed without a word: who waits for its part of a checkpoint ends too, and does not wait for ever."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import TrainerCallback
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.utils import distributed
from tests.support.pool import RankFailure, pool
from tests.support.resuming import make


class DiesWhileItWrites(TrainerCallback):
    """The checkpoint of step 4 is slow, so that training comes to the next one and waits for it; then: SIGKILL."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            disk.write = self.write  # type: ignore[assignment]

    def write(self, *arguments: Any) -> None:
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGKILL)


def killed(output_dir: str) -> None:
    trainer = make(output_dir, save_steps=2, zero_stage=1)
    if distributed.rank() == 1:
        trainer.add_callback(DiesWhileItWrites())
    trainer.train()


def test_ranks_waiting_for_a_save_end_when_a_rank_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        pool(2).run(killed, str(tmp_path), timeout=90)
    message = str(failure.value)
    assert "no answer" not in message
    assert "rank 1: EOFError" in message
    assert "flight.save.wait" in message.split("rank 1:")[0], "rank 0 was waiting for the save"
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
