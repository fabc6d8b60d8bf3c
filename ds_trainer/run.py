"""``python -m ds_trainer.run``: the same as ``ds-trainer run``, for launchers that start Python modules."""

from __future__ import annotations

import sys

from ds_trainer.cli.argv import without_local_rank
from ds_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *without_local_rank(sys.argv[1:2]), *sys.argv[2:]]))
