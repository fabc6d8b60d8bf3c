#!/usr/bin/env bash
# The default tests with other versions of torch, transformers, accelerate, datasets and peft.
#
#   tools/versions.sh make SET             makes the environment; SET is
#                                          pins: constraints.txt
#                                          newest: what pip installs without constraints
#                                          oldest: the lower bounds of pyproject.toml
#   tools/versions.sh test SET [PATH ...]  runs the default tests there: all of them, folder by folder, or these paths
#   tools/versions.sh page                 writes docs/reference/versions.md and what ds-trainer doctor knows from the
#                                          results; keeps those of sets and parts that were not tested
#
# DS_TRAINER_VERSIONS: where environments and results are (default: .venv-versions in the clone; several GB each, as pip
# installs torch with CUDA). PYTHON: the Python to create them with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base="${DS_TRAINER_VERSIONS:-$PWD/.venv-versions}"

usage() {
    sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

make_set() {
    local venv="$base/$1" options=()
    mkdir -p "$base"
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    case "$1" in
        pins) options=(-c constraints.txt) ;;
        oldest)
            "$venv/bin/python" tools/versions.py lowest >"$base/oldest.txt"
            options=(-c "$base/oldest.txt")
            ;;
    esac
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${options[@]+"${options[@]}"} -e '.[test]'
}

test_set() {
    local venv="$base/$1" results="$base/results/$1" path failed=0 pins=tests/test_package.py::test_
    # These look at the environment of development: the pins, the linters, and the budget, which counts the arguments that
    # the pinned transformers does not have.
    local without=(--deselect "${pins}installed_versions_are_the_pins" --deselect "${pins}everything_needed_is_pinned"
        --deselect "${pins}a_strict_type_checker_accepts_imports_of_public_names"
        --deselect tests/tools/test_structure.py::test_the_files_are_within_the_budget)
    shift
    [ $# -gt 0 ] || set -- tests/*/ tests/test_*.py
    mkdir -p "$results"
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv" PYTHONPATH="$PWD" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
    export TOKENIZERS_PARALLELISM=false TORCH_EXTENSIONS_DIR="$venv/torch_extensions"
    for path in "$@"; do
        path="${path%/}"
        case "$path" in tests/support | tests/__pycache__ | tests/clients) continue ;; esac
        python -m pytest -q -p no:cacheprovider "${without[@]}" "$path" --junitxml="$results/${path//\//_}.xml" || {
            [ $? -eq 5 ] || failed=1 # 5: no test of the default run is there
        }
    done
    python tools/versions.py installed >"$results/packages.json"
    return "$failed"
}

case "${1:-} ${2:-}" in
    "make pins" | "make newest" | "make oldest") make_set "$2" ;;
    "test pins" | "test newest" | "test oldest")
        shift
        test_set "$@"
        ;;
    "page ") python3 tools/versions.py page "$base/results" ;;
    *) usage ;;
esac
