"""The same as ``python -m ds_trainer.launching.rank``, for launchers that can start only files.

DeepSpeed 0.19.8 drops ``--module`` for ``--launcher slurm``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # instead of this directory, whose files are not top-level modules
    runpy.run_module("ds_trainer.launching.rank", run_name="__main__", alter_sys=True)
