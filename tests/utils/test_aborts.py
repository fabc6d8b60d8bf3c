"""Aborting a process group takes bounded time and is never silent, even if the abort raises or hangs (NCCL)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ds_trainer.utils.ranks import free_port

ROOT = Path(__file__).parents[2]
ENDED_WITHIN = 30.0  # of the failure; the abort itself would take for ever

# Rank 1 fails; rank 0 hangs where only the watching thread can end it, as in a kernel of NCCL.
RANK = """
    import pathlib, sys, time
    import torch.distributed as dist
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.utils import failures

    rank = start_process_group("cpu").rank
    failures.ABORT_SECONDS, failures.EXIT_SECONDS, failures.GRACE_SECONDS = 1.0, 3.0, 1.0
    failures.ABORT_TAKES_SECONDS = 2.0
    dist.get_backend = lambda *arguments: "nccl"

    def abort(group=None):
        if "{how}" == "raises":
            raise RuntimeError("ncclCommAbort failed")
        time.sleep(3600)

    if "{how}" != "works":
        dist.distributed_c10d._abort_process_group = abort
    failures.watch_peers()

    @failures.fails_together
    def work():
        if rank == 1:
            pathlib.Path({failed!r}).write_text(str(time.time()))
            raise ValueError("rank 1 is broken")
        time.sleep(3600)

    work()
"""


# Instead of the others: the same test with an abort that hangs
@pytest.mark.cases("hangs-could not abort its process group: the abort did not end within 2 s")
@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "could not abort its process group: RuntimeError: ncclCommAbort failed"),
        ("hangs", "could not abort its process group: the abort did not end within 2 s"),
        ("works", ""),
    ],
)
def test_ranks_end_whatever_the_abort_does(how: str, message: str, tmp_path: Path) -> None:
    code = textwrap.dedent(RANK).format(how=how, failed=str(tmp_path / "failed"))
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **meet, "RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    seconds = time.time() - float((tmp_path / "failed").read_text())
    assert seconds < ENDED_WITHIN
    assert [rank.returncode for rank in ranks] == [1, 1], outputs
    assert "rank 0 ends: rank 1 failed with ValueError: rank 1 is broken" in outputs[0]
    assert "ValueError: rank 1 is broken" in outputs[1]
    for output in outputs:
        assert message in output
        assert ("could not abort" in output) is bool(message)
