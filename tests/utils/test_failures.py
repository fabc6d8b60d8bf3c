"""One rank fails: all ranks end with a clear error within seconds, under every launcher, and no process is left."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import ConfigError, PeerFailure, Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils import distributed, failures
from ds_trainer.utils.exit_codes import code_of
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.pool import RankFailure, pool

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STARTED_WITHIN = 150.0  # on a busy machine; the clock that counts begins with the failure
ENDED_WITHIN = 30.0
LONG_GRACE = 100.0


class Breaks(Exception):
    """What the failing rank raises."""


class BreakingData(RaggedTokens):
    """Sample 9 cannot be read on the failing rank."""

    def __init__(self, samples: int, breaks: bool) -> None:
        super().__init__(samples)
        self.breaks = breaks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.breaks and index >= 24:
            raise Breaks("sample is broken")
        return super().__getitem__(index)


class BreakingCallback(TrainerCallback):
    """Raises at the end of step 2 on the failing rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if breaks(args.process_index) and state.global_step == 2:
            raise Breaks("callback is broken")


class BreakingLoss(Trainer):
    """Raises in the loss of the second step of the failing rank."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        if breaks(self.args.process_index) and self.state.global_step == 2:
            raise Breaks("loss is broken")
        return super().compute_loss(model, inputs, return_outputs, **keywords)


def breaks(rank: int) -> bool:
    return rank == int(os.environ.get("FAILING_RANK", "1"))


def broken_run(where: str, stage: int, output_dir: str) -> None:
    """Train on this rank, with something broken on one of the ranks."""
    args = TrainingArguments(
        output_dir,
        per_device_train_batch_size=4,
        max_steps=6,
        zero_stage=stage,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
    )
    failing = breaks(args.process_index)
    kind = BreakingLoss if where == "loss" else Trainer
    callbacks = [BreakingCallback()] if where == "callback" else []
    data = BreakingData(64, where == "dataset" and failing)
    kind(PlainLanguageModel(), args, train_dataset=data, callbacks=callbacks).train()


def fails_alike(output_dir: str) -> tuple[list[str], float]:
    grace, failures.GRACE_SECONDS = failures.GRACE_SECONDS, LONG_GRACE
    errors, start = [], time.monotonic()
    for _ in range(2):
        try:
            values = {"use_cpu": True, "max_steps": 1, "disable_tqdm": True, "train_sampling_strategy": "sequential"}
            args = TrainingArguments(output_dir, **values)
            Trainer(tiny_llama(), args, train_dataset=[{"input_ids": [1]}, {"input_ids": [1, 2]}] * 2).train()
        except ConfigError as error:
            errors.append(str(error))
    failures.GRACE_SECONDS = grace
    votes = torch.tensor([distributed.rank()])
    return [*errors, str(distributed.agree(votes))], time.monotonic() - start


def test_ranks_with_the_same_error_continue_together(tmp_path: Path) -> None:
    """Each raises its own error at once, and the process group is as good as before."""
    for (first, second, vote), seconds in pool(2).run(fails_alike, str(tmp_path)):
        assert "The samples of a batch differ in 'input_ids'" in first and first == second
        assert vote == "[1]"
        assert seconds < LONG_GRACE  # nobody waited for it to pass


def run_in_pool(where: str, stage: int, output_dir: str) -> str:
    os.environ["FAILING_RANK"] = "1"
    # The same course in a shorter time: a world that dies with every case is costly enough.
    failures.GRACE_SECONDS, failures.ABORT_SECONDS, failures.EXIT_SECONDS = 1.0, 1.0, 3.0
    start = time.monotonic()
    try:
        broken_run(where, stage, output_dir)
    except (Breaks, PeerFailure) as error:
        return f"{type(error).__name__} after {time.monotonic() - start:.0f} s: {error}"
    return "ended well"


# Instead of the others: the same test at ZeRO 3, and at ZeRO 0 with a failing loss
@pytest.mark.cases("dataset-3")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("where", ["dataset", "callback", "loss"])
def test_ranks_without_a_launcher_end(where: str, stage: int, tmp_path: Path) -> None:
    """The failing process stays alive; a thread of the other detects that, and it ends with exit code 1."""
    with pytest.raises(RankFailure) as failure:
        results = pool(2).run(run_in_pool, where, stage, str(tmp_path), timeout=STARTED_WITHIN)
        raise RankFailure("\n".join(results))  # both could even continue: then their messages are compared
    assert "no answer" not in str(failure.value) and "ended well" not in str(failure.value)


def fail_with_the_store(path: str, both: bool) -> None:
    """Rank 0, which holds the store, fails and ends its process; rank 1 waits for it, or has failed before."""
    rank, failures.GRACE_SECONDS = distributed.rank(), 3.0
    failures.watch_peers()

    @failures.fails_together
    def section() -> None:
        if rank == 0:
            time.sleep(2.5 if both else 0.0)  # the pause between two looks of rank 1 is longest then
            raise Breaks("rank 0 is broken")
        if both:
            raise Breaks("rank 1 is broken")
        distributed.agree(torch.zeros(1))

    try:
        section()
    except Exception as error:
        (Path(path) / f"{rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(1)


@pytest.mark.parametrize("both", [False, True])
def test_the_cause_is_known_after_the_rank_with_the_store_has_ended(both: bool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        pool(2).run(fail_with_the_store, str(tmp_path), both)
    text = (tmp_path / "1").read_text()
    assert text.startswith("Breaks: rank 1 is" if both else "PeerFailure: rank 0 failed with Breaks: rank 0 is broken")


class Unprintable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


def leave(path: str, error: BaseException) -> None:
    """Rank 1 leaves a section in which rank 0 waits for it; the code with which rank 0 would end."""
    failures.GRACE_SECONDS = 0.5
    failures.watch_peers()

    @failures.fails_together
    def section() -> None:
        if distributed.rank() == 1:
            raise error
        distributed.agree(torch.zeros(1))

    try:
        section()
    except PeerFailure as found:
        Path(path).write_text(f"{found.exit_code} {found}")
    except BaseException as left:
        Path(f"{path}.left").write_text(str(code_of(left)))
        deadline = time.monotonic() + 30.0  # the pool ends all ranks with the first one
        while not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    os._exit(1)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(512), Unprintable()], ids=repr)
def test_a_rank_that_leaves_is_a_failure_of_the_others(error: BaseException, tmp_path: Path) -> None:
    """Also with code 0: the training is not done."""
    with pytest.raises(RankFailure):
        pool(2).run(leave, str(tmp_path / "found"), error)
    assert (tmp_path / "found").read_text().startswith(f"1 rank 1 failed with {type(error).__name__}: ")
    assert (tmp_path / "found.left").read_text() == "1"
