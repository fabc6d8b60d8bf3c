"""``python -m ds_trainer.launching.clean_up VARIABLE VALUE``: ends all processes with this environment variable."""

from __future__ import annotations

import sys

from ds_trainer.launching.processes import end_processes, processes_of_job

if __name__ == "__main__":
    end_processes(processes_of_job(*sys.argv[1:3]))
