#!/usr/bin/env bash
# The tests: ruff, mypy, the import contracts, then pytest, in a virtual environment that the first run makes.
#
#   launch/test.sh                     all of it
#   launch/test.sh tests/parallel -x   only pytest, with these arguments
#
# DS_TRAINER_VENV and PYTHON choose the environment: see launch/_venv.sh.
set -euo pipefail
# shellcheck source=launch/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

ensure_venv dev
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

step() {
    say "$*"
    "$@"
}

if [ $# -eq 0 ]; then
    step ruff check
    step ruff format --check
    step mypy
    step lint-imports
fi
step python -m pytest "$@"
