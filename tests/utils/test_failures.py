"""One rank fails: all ranks end with a clear error within seconds, under every launcher, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ds_trainer import ConfigError, PeerFailure, Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils import distributed, failures
from ds_trainer.utils.ranks import free_port
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
            due()
            raise Breaks("sample is broken")
        return super().__getitem__(index)


class BreakingCallback(TrainerCallback):
    """Raises at the end of step 2 on the failing rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if breaks(args.process_index) and state.global_step == 2:
            due()
            raise Breaks("callback is broken")


class BreakingLoss(Trainer):
    """Raises in the loss of the second step of the failing rank."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        if breaks(self.args.process_index) and self.state.global_step == 2:
            due()
            raise Breaks("loss is broken")
        return super().compute_loss(model, inputs, return_outputs, **keywords)


def breaks(rank: int) -> bool:
    return rank == int(os.environ.get("FAILING_RANK", "1"))


def due() -> None:
    """Note the time of the failure, so that a test can tell how long the end took."""
    if "FAILURE_TIME" in os.environ:
        Path(os.environ["FAILURE_TIME"]).write_text(str(time.time()))


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


SCRIPT = """
    import sys
    from tests.utils.test_failures import broken_run

    broken_run({where!r}, {stage}, {output!r})
    print("REACHED THE END", flush=True)
"""


def environment(tmp_path: Path, failing_rank: int) -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    own = {"FAILING_RANK": str(failing_rank), "FAILURE_TIME": str(tmp_path / "failed_at")}
    return {**kept, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{kept['PATH']}"}


def launched(launcher: str, where: str, stage: int, failing_rank: int, tmp_path: Path) -> tuple[int, str, float]:
    """Exit code, output and seconds from the failure to the end of the launcher."""
    path = tmp_path / "broken.py"
    path.write_text(textwrap.dedent(SCRIPT).format(where=where, stage=stage, output=str(tmp_path)))
    port = str(free_port())
    command = {
        "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", port, str(path)],
        "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", port, str(path)],
        "launch": ["ds-trainer", "launch", "--nproc-per-node", "2", "--master-port", port, str(path)],
    }[launcher]
    job = subprocess.Popen(
        command,
        env=environment(tmp_path, failing_rank),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=STARTED_WITHIN + ENDED_WITHIN)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    seconds = time.time() - float((tmp_path / "failed_at").read_text())
    return job.returncode, output, seconds


def left_over(tmp_path: Path) -> list[str]:
    """Command lines of processes that still run the script."""
    lines = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(tmp_path) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            lines.append(line)
    return lines


# Instead of the others: the same test under torchrun and ds-trainer launch, with a failing loss and a failing
# dataset; failing callbacks: the other tests of the file; the same test under ds-trainer launch, and
# test_ranks_without_a_launcher_end with a failing dataset
@pytest.mark.cases("launch-loss-0-1")
@pytest.mark.extended
@pytest.mark.parametrize(
    ("launcher", "where", "stage", "failing_rank"),
    [
        ("deepspeed", "dataset", 0, 1),
        ("deepspeed", "callback", 3, 1),
        ("deepspeed", "loss", 3, 1),
        ("torchrun", "dataset", 3, 1),
        ("torchrun", "callback", 0, 0),
        ("launch", "loss", 0, 1),
    ],
)
def test_a_launched_job_ends(launcher: str, where: str, stage: int, failing_rank: int, tmp_path: Path) -> None:
    code, output, seconds = launched(launcher, where, stage, failing_rank, tmp_path)
    assert code != 0
    assert seconds < ENDED_WITHIN
    error = f"tests.utils.test_failures.Breaks: {where.replace('dataset', 'sample')} is broken"
    assert error in output
    if launcher == "torchrun":
        assert error in output.partition("Root Cause")[2]
    if launcher == "launch":
        assert output.splitlines()[-1] == f"ds-trainer launch: rank {failing_rank} failed: {error}"
    assert "Traceback" in output and "in due" not in output
    assert "REACHED THE END" not in output
    assert left_over(tmp_path) == []


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
