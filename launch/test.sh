#!/usr/bin/env bash
# The tests: every linter (tools/lint.sh), then pytest, in a virtual environment that the first run makes.
#
#   launch/test.sh                     the default run: 20 minutes on two cores
#   launch/test.sh --extended ...      what the default run leaves out: launchers, SLURM, compiled operators, further cases
#   launch/test.sh tests/parallel -x   only pytest, with these arguments
#
# DS_TRAINER_TEST_PROCESSES: how many processes share the tests (pytest-xdist; default: one per core, at most 4).
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

options=()
share_tests() {
    local cores number
    cores="$(python -c 'import os; print(min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))')"
    number="${DS_TRAINER_TEST_PROCESSES:-$cores}"
    if [ "$number" -gt 1 ]; then
        options+=(-n "$number" --dist loadscope --no-loadscope-reorder)
    fi
}

if [ "${1:-}" = --extended ]; then
    shift
    options+=(-m extended)
    share_tests
elif [ $# -eq 0 ]; then
    share_tests
    step tools/lint.sh
fi
step python -m pytest ${options[@]+"${options[@]}"} "$@"
