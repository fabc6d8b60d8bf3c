"""A rank of two ends in any way, under any parent: the output names that rank, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.utils import host_memory, outcomes
from ds_trainer.utils.exit_codes import FAILED, REQUEUE
from ds_trainer.utils.ranks import free_port
from tests.support.models import PlainLanguageModel, RaggedTokens

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FAILING, LIMIT = 1, 3 * 10**9


class Breaks(Exception):
    """What the failing rank raises."""


def fail(error: BaseException) -> None:
    raise error


def use_all_memory() -> None:
    kept = []
    while True:
        kept.append(b"x" * 2**25)


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
# How; the code of the job under launch; what says so: launch itself where a rank leaves no error, since it may end the
# other rank before that one has noticed.
ENDS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "error": (lambda: fail(Breaks("broken")), FAILED, "rank 1 failed with Breaks: broken"),
    "sys.exit": (lambda: sys.exit(3), 3, "rank 1 failed with SystemExit: 3"),
    "os._exit": (lambda: os._exit(3), 3, "rank 1 on {host} ended with exit code 3."),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "rank 1 on {host} was killed by SIGKILL."),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), 139, "rank 1 on {host} was killed by SIGSEGV."),
    "memory of the GPU": (lambda: fail(CUDA), FAILED, "rank 1 failed with OutOfMemory: Out of memory on rank 1"),
    "memory of the job": (use_all_memory, 137, "because memory was exhausted: the limit of its cgroup is 3.00 GB"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), REQUEUE, "by SIGTERM on rank 1: "),
}
COMMANDS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port"],
    "launch": ["ds-trainer", "launch", "--nproc-per-node", "2", "--master-port"],
}
# What each parent says itself of the first rank that has failed.
SAID = {
    "deepspeed": r"--local_rank=(\d+)'\] exits with return code",
    "torchrun": r"Root Cause.*?rank\s+: (\d+)",
    "launch": r"ds-trainer launch: rank (\d+) on \S+ (?:was killed|ended)",
}
SURVIVORS = r"rank (\d+) (?:failed with|on \S+ is gone)"
# By default in the extended run; the others run with -m matrix.
OFTEN = [("launch", end) for end in ("error", "os._exit", "SIGKILL", "memory of the job")]
OFTEN += [("torchrun", "error"), ("torchrun", "SIGKILL"), ("deepspeed", "SIGSEGV")]


class EndsAt(TrainerCallback):
    """After step 2, on one rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == FAILING and state.global_step == 2:
            ENDS[os.environ["TEST_END"]][0]()


def main(output_dir: str) -> None:
    args = TrainingArguments(
        output_dir,
        per_device_train_batch_size=4,
        max_steps=4000,
        zero_stage=1,
        save_steps=100_000,
        disable_tqdm=True,
        use_cpu=True,
        report_to="none",
        run_report=False,
    )
    Trainer(PlainLanguageModel(), args, train_dataset=RaggedTokens(64), callbacks=[EndsAt()]).train()


@contextmanager
def memory_limit(limit: int) -> Iterator[Callable[[], None]]:
    """A cgroup below that of this process; what puts a new process into it. Skips where none can be made."""
    places = host_memory._memory_cgroups(host_memory._CGROUPS, host_memory._MEMBERSHIP)
    version, own = next(((version, path) for version, path in places if path.is_dir()), (0, Path("/nowhere")))
    group = own / f"ds_trainer-{uuid.uuid4().hex[:8]}"
    try:
        if version == 2:
            (own / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        (group / {1: "memory.limit_in_bytes", 2: "memory.max"}[version]).write_text(str(limit))
    except (OSError, KeyError) as error:
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        group.rmdir()


@contextmanager
def no_limit() -> Iterator[None]:
    yield None


def processes_of(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("parent", "end"),
    [
        pytest.param(parent, end, marks=() if (parent, end) in OFTEN else pytest.mark.matrix, id=f"{parent}, {end}")
        for parent in COMMANDS
        for end in ENDS
    ],
)
def test_the_rank_that_ended_is_named(parent: str, end: str, tmp_path: Path) -> None:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    own = {"TEST_END": end, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{kept['PATH']}"}
    script = tmp_path / "program.py"
    script.write_text(f"from tests.resilience.test_ends_by_parent import main\nmain({str(tmp_path / 'out')!r})\n")
    with memory_limit(LIMIT) if end == "memory of the job" else no_limit() as enter:
        job = subprocess.Popen(
            [*COMMANDS[parent], str(free_port()), str(script)],
            env={**kept, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=enter,
        )
        try:
            output, _ = job.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise
        assert processes_of(str(script)) == []
    _, code, text = ENDS[end]
    said = text.format(host=outcomes.host_name())
    assert job.returncode == code if parent == "launch" else job.returncode != 0, output
    of_survivors = re.findall(SURVIVORS, output)
    assert set(of_survivors) <= {str(FAILING)}, output
    if end == "SIGTERM":
        assert said in output and list_checkpoints(tmp_path / "out"), output
        return
    of_parent = re.findall(SAID[parent], output, re.DOTALL)[:1]
    if parent == "deepspeed":  # it says which process it saw end first; a survivor may be faster
        of_parent = [*of_survivors, *of_parent][:1]
    assert of_parent == [str(FAILING)], output
    if parent == "launch":  # the others may take their time
        assert said in output, output
    if parent == "torchrun" and end == "error":
        assert "Breaks: broken" in output.partition("Root Cause")[2], "torchrun's own summary has the error"
