"""A rank is killed without a word: the others end too, say which one they have lost, and wait for nothing for ever."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import TrainerCallback
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.utils import distributed, failures, outcomes
from tests.support.pool import RankFailure, pool
from tests.support.resuming import make

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts


class DiesWhileItWrites(TrainerCallback):
    """The checkpoint of step 4 is slow, so that training comes to the next one and waits for it; then: SIGKILL."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            while not list_checkpoints(Path(args.output_dir)):  # that of step 2 may still be written
                time.sleep(0.05)
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


def die(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesIn(TrainerCallback):
    """SIGKILL in the forward pass, the backward pass or the save that follows step 2."""

    def __init__(self, where: str) -> None:
        self._where = where

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 2:
            return
        model = kwargs["model"]
        if self._where == "forward":
            list(model.modules())[-1].register_forward_pre_hook(die)
        elif self._where == "backward":
            list(model.modules())[-1].register_full_backward_hook(die)
        else:
            disk.write = die  # type: ignore[assignment]


def lost(where: str, stage: int, folder: str) -> None:
    failures.EXIT_SECONDS = 5.0
    failures.RECORD_SECONDS = 60.0
    os.environ[outcomes.VARIABLE] = folder
    rank, victim = distributed.rank(), distributed.world_size() - 1  # a rank that leaves its group forgets them
    trainer = make(f"{folder}/run", save_steps=2, zero_stage=stage, per_device_train_batch_size=1)
    if rank == victim and where != "after":
        trainer.add_callback(DiesIn(where))

    def note(reason: str) -> None:
        Path(folder, f"end-{rank}").write_text(reason, encoding="utf-8")
        deadline = time.monotonic() + 60.0  # the pool ends all ranks with the first one
        while len(list(Path(folder).glob("end-*"))) < victim and time.monotonic() < deadline:
            time.sleep(0.1)

    try:
        with failures.before_exit(note):
            trainer.train()
        if where == "after" and rank == victim:
            die()
        trainer.accelerator.wait_for_everyone()
    except BaseException as error:
        note(f"{type(error).__name__}: {error}" if where != "after" else printed(error))
        raise


def printed(error: BaseException) -> str:
    """What a script prints that this error ends, which none of this package's methods has seen."""
    with contextlib.redirect_stderr(io.StringIO()) as stream, contextlib.suppress(SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("ranks", "where", "stage"),
    [
        (2, "forward", 1),
        (4, "forward", 3),
        (2, "backward", 3),
        (4, "backward", 1),
        (2, "save", 1),
        (4, "save", 1),
        (2, "after", 1),
        (4, "after", 3),
    ],
)
def test_survivors_name_the_rank_that_was_killed(ranks: int, where: str, stage: int, tmp_path: Path) -> None:
    """And none of them looks like the one that failed, to a person or to the launcher."""
    with pytest.raises(RankFailure) as failure:
        pool(ranks).run(lost, where, stage, str(tmp_path), timeout=120)
    assert "no answer" not in str(failure.value)
    said = f"rank {ranks - 1} on {outcomes.host_name()} is gone without an error"
    for rank in range(ranks - 1):
        text = (tmp_path / f"end-{rank}").read_text(encoding="utf-8")
        assert said in text, f"rank {rank}: {text}"
        assert not text.startswith("RuntimeError") and f"rank {rank} failed" not in text
    blame = outcomes.read_blame(tmp_path)
    assert blame is not None and (blame.rank, blame.host) == (ranks - 1, outcomes.host_name())
    assert list(tmp_path.glob("error-*")) == [], "no survivor has recorded an error as its own"
