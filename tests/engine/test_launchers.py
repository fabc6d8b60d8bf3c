"""The process group starts under every launcher, really run, and leaves nothing behind in shared memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.engine.process_group import remove_shared_buffers
from ds_trainer.utils.ranks import RankInfo, free_port
from tests.support.pool import pool
from tests.support.scripts import run_script

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

SCRIPT = """
    import json, sys, pathlib
    from ds_trainer import Trainer, TrainingArguments
    from tests.support.models import PlainLanguageModel, RaggedTokens

    out = pathlib.Path({output!r})
    args = TrainingArguments(str(out), per_device_train_batch_size=8 // int(sys.argv[-1]), max_steps=2, logging_steps=1,
                             zero_stage=2, save_strategy="no", disable_tqdm=True, use_cpu=True, max_grad_norm=0.0)
    trainer = Trainer(PlainLanguageModel(), args, train_dataset=RaggedTokens(16))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = {{"world_size": args.world_size, "losses": losses, "compiled": trainer._ds_trainer.compiled.to_json()}}
    (out / f"rank{{args.process_index}}.json").write_text(json.dumps(report))
"""
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{kept['PATH']}"}


def shared_buffers() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("deepspeed_*")}


def results(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process."""
    directory = tmp_path_factory.mktemp("python")
    pool(1).run(run_script, str(script(directory)), ["1"])
    (report,) = results(directory)
    assert report["world_size"] == 1
    return list(report["losses"])


def script(directory: Path) -> Path:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).format(output=str(directory)))
    return path


def by_hand(path: str, variables: list[dict[str, str]]) -> None:
    """Two processes, each with variables of its own."""
    tasks = [subprocess.Popen([sys.executable, path, "2"], env={**environment(), **own}) for own in variables]
    assert [task.wait(timeout=180) for task in tasks] == [0, 0]


COMPILED: dict[str, str] = {}  # by launcher


MPIRUN = {
    "openmpi": ["orterun", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "mpich": ["mpiexec.hydra", "-n", "2"],
}


# Instead of the others: the same test under torchrun and alone; for this launcher tests/cluster/test_launchers.py;
# the same test under torchrun
@pytest.mark.cases("torchrun")
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "srun", "python", *MPIRUN])
def test_two_ranks_train_like_one(launcher: str, alone: list[float], tmp_path: Path) -> None:
    before = shared_buffers()
    path = str(script(tmp_path))
    port = str(free_port())
    if launcher == "deepspeed":
        command = ["deepspeed", "--num_gpus", "2", "--master_port", port, path, "2"]
        subprocess.run(command, check=True, env=environment(), timeout=180)
    elif launcher == "torchrun":
        command = ["torchrun", "--nproc-per-node", "2", "--master-port", port, path, "2"]
        subprocess.run(command, check=True, env=environment(), timeout=180)
    elif launcher in MPIRUN:
        if shutil.which(MPIRUN[launcher][0]) is None:
            pytest.skip(f"{MPIRUN[launcher][0]} is not installed")
        command = [*MPIRUN[launcher], sys.executable, path, "2"]
        subprocess.run(command, check=True, env=environment(), timeout=180)
    elif launcher == "srun":  # two tasks of a step, with exactly the variables that srun gives them
        step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
        step["SLURM_JOB_ID"] = str(os.getpid())
        by_hand(path, [{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"])
    else:  # plain python with variables set by hand
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        by_hand(path, [{**meet, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"])
    ranks = results(tmp_path)
    assert [report["world_size"] for report in ranks] == [2, 2]
    for report in ranks:
        assert report["losses"] == pytest.approx(alone, rel=1e-5)
        assert report["compiled"] == ranks[0]["compiled"]
    COMPILED[launcher] = ranks[0]["compiled"]
    assert shared_buffers() <= before


def test_all_launchers_compile_the_same_json() -> None:
    if not {"torchrun", "srun", "python"} <= COMPILED.keys():
        pytest.skip("not all launchers were run")
    assert len(set(COMPILED.values())) == 1
    assert json.loads(COMPILED["python"])["zero_optimization"]["stage"] == 2


def test_only_shared_buffers_of_this_rank_are_removed(tmp_path: Path) -> None:
    info = RankInfo(1, 2, 1, "127.0.0.1", 29501, "environment")
    names = [
        "deepspeed_allreduce_buffer_0_127.0.0.1_29501_1",
        "deepspeed_allreduce_buffer_0_127.0.0.1_29501_0",  # another rank's
        "deepspeed_allreduce_buffer_0_127.0.0.1_29502_1",  # another job's
        "unrelated_29501_1",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    assert [path.name for path in remove_shared_buffers(info, tmp_path)] == names[:1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_an_incomplete_environment_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    broken = {**environment(), "RANK": "0", "WORLD_SIZE": "2"}
    completed = subprocess.run(
        [sys.executable, str(script(tmp_path)), "2"], env=broken, capture_output=True, text=True, check=False
    )
    assert completed.returncode != 0
    assert "but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in completed.stderr
