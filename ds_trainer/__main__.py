"""Entry point of ``python -m ds_trainer``, ``deepspeed --module ds_trainer`` and ``torchrun -m ds_trainer``."""

from __future__ import annotations

import sys

from ds_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
