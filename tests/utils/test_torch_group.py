"""The process group is started in one place: also before the Trainer, and after a restart of the ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

RANK = """
    import json, os, pathlib, signal, sys, time
    import torch.distributed as dist
    from ds_trainer import Trainer, TrainingArguments
    from tests.support.models import Regression, regression_rows

    out, attempt, rank = pathlib.Path({output!r}), os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    args = TrainingArguments(str(out), max_steps=2, per_device_train_batch_size=2, save_strategy="no", use_cpu=True,
                             disable_tqdm=True, ddp_timeout=60, report_to=[])
    if attempt == "1" and rank == "1":
        time.sleep(4.0)  # rank 0 comes first, and finds what rank 1 of the attempt before has left
    with args.main_process_first(desc="what a script does before it trains"):
        (out / f"first-{{attempt}}-{{rank}}").touch()
    dist.barrier()
    if attempt == "0" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    trainer = Trainer(Regression(), args, train_dataset=regression_rows(16))
    trainer.train()
    last = trainer.state.log_history[-1]
    result = {{"attempt": attempt, "steps": trainer.state.global_step, "loss": last["train_loss"]}}
    (out / f"done-{{rank}}.json").write_text(json.dumps(result))
"""


@pytest.mark.extended
def test_restarted_ranks_can_start_a_group_before_the_trainer(tmp_path: Path) -> None:
    """``torchrun --max-restarts=1``: the first attempt dies after ``main_process_first``, the second one succeeds."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK).format(output=str(tmp_path)))
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "--max-restarts=1", str(script)]
    completed = subprocess.run(
        command,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    assert len(list(tmp_path.glob("first-0-*"))) == 2, "the first attempt had a group too"
    results = [json.loads((tmp_path / f"done-{rank}.json").read_text()) for rank in range(2)]
    assert [(result["attempt"], result["steps"]) for result in results] == [("1", 2)] * 2
    assert results[0]["loss"] == results[1]["loss"]


def test_nothing_else_starts_the_default_group() -> None:
    makes = re.compile(r"\binit_process_group\(")
    package = ROOT / "ds_trainer"
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if makes.search(path.read_text())}
    assert found == {"utils/torch_group.py", "engine/fake_group.py"}  # the second one's is the fake group of a dry run
