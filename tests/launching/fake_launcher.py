"""``ds-trainer launch`` with a launcher that starts at once and has the faults of real ones.

``python fake_launcher.py cli ARGS`` is ``ds-trainer launch ARGS``; it starts ``python fake_launcher.py N PROGRAM``,
which starts N ranks. Like real launchers it ends the other ranks when one fails, and returns 1 for every failure. With
``FAULT=lies`` it always returns 0. SIGTERM kills it, and its ranks keep running.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ds_trainer.cli.main import main
from ds_trainer.launching import runner, supervision
from ds_trainer.launching.commands import LaunchCommand
from ds_trainer.launching.launch_plan import LaunchPlan
from ds_trainer.utils.ranks import free_port


def build(
    plan: LaunchPlan, directory: Path, job_variables: Mapping[str, str], environment: Mapping[str, str]
) -> LaunchCommand:
    argv = [sys.executable, __file__, str(plan.world_size), *plan.request.target.command()]
    return LaunchCommand(argv, dict(job_variables))


def launcher(size: int, args: list[str]) -> int:
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    command = [sys.executable, "-m", "ds_trainer.launching.rank", *args]
    ranks = [
        subprocess.Popen(command, env=os.environ | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    while any(rank.poll() is None for rank in ranks) and all(rank.returncode in (None, 0) for rank in ranks):
        time.sleep(0.02)
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    codes = [rank.wait() for rank in ranks]
    return 0 if os.environ.get("FAULT") == "lies" else int(any(codes))


if __name__ == "__main__":
    if sys.argv[1] == "cli":
        runner.build = build
        supervision.FAILURE_SECONDS = float(os.environ.get("PATIENCE", "30"))
        sys.exit(main(["launch", *sys.argv[2:]]))
    sys.exit(launcher(int(sys.argv[1]), sys.argv[2:]))
