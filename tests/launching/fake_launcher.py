"""``ds-trainer launch`` with a launcher that takes no seconds to start and has the faults of real ones.

``python fake_launcher.py cli WORDS`` is ``ds-trainer launch WORDS``; it starts ``python fake_launcher.py N PROGRAM``,
which starts N ranks. Like the real ones it ends the other ranks when one fails, and gives 1 whatever the rank gave.
With ``FAULT=lies`` it gives 0 always. It dies of SIGTERM and leaves its ranks behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ds_trainer.cli.main import main
from ds_trainer.launching import launch
from ds_trainer.launching.choosing import Plan
from ds_trainer.launching.commands import LaunchCommand
from ds_trainer.utils.ranks import free_port


def build(plan: Plan, directory: Path, told: Mapping[str, str], environment: Mapping[str, str]) -> LaunchCommand:
    return LaunchCommand([sys.executable, __file__, str(plan.world_size), *plan.request.target.command()], dict(told))


def launcher(size: int, words: list[str]) -> int:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    command = [sys.executable, "-m", "ds_trainer.launching.rank", *words]
    ranks = [
        subprocess.Popen(command, env=os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
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
        launch.build = build
        sys.exit(main(["launch", *sys.argv[2:]]))
    sys.exit(launcher(int(sys.argv[1]), sys.argv[2:]))
