"""``python -m ds_trainer``, and what ``deepspeed --module ds_trainer`` and ``torchrun -m ds_trainer`` start."""

from __future__ import annotations

import sys

from ds_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
