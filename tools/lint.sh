#!/usr/bin/env bash
# Every linter, as CI and launch/test.sh run them, in the virtual environment that the first run makes.
#
#   tools/lint.sh            all of them
#   tools/lint.sh --setup    only make the environment
set -euo pipefail
# shellcheck source=launch/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/_venv.sh"

ensure_venv dev
[ "${1:-}" != --setup ] || exit 0

step() {
    say "$*"
    "$@"
}

step ruff check
step ruff format --check
step mypy
step lint-imports
step codespell
step shellcheck -x launch/*.sh launch/*.sbatch examples/*.sbatch tools/*.sh .ci/run
