#!/usr/bin/env bash
# The tests of libraries that train with transformers' Trainer (tests/clients), after installing the extra `clients`.
#
#   tools/test_clients.sh             all of them
#   tools/test_clients.sh -k GRPO     with arguments of pytest
set -euo pipefail
# shellcheck source=launch/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/_venv.sh"

ensure_venv dev
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python -c 'import setfit, trl' 2>/dev/null || {
    say "installing the extra clients"
    pip install -q -c constraints.txt -e '.[clients]'
}
options=()
[ $# -gt 0 ] || options=(-n 2 --dist loadscope)
python -m pytest -m clients ${options[@]+"${options[@]}"} tests/clients "$@"
