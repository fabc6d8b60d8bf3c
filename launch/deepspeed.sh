#!/usr/bin/env bash
# Starts a recipe or a script with `ds-trainer launch`, in the virtual environment of this clone, which is created or
# updated if necessary. With several machines the clone must be on a file system that all of them share.
#
#   launch/deepspeed.sh ds_configs/recipes/quickstart.yaml             # all GPUs of this machine; in salloc: all nodes
#   launch/deepspeed.sh --hostfile hosts train.py --my-option 3        # over ssh; a line of hosts: node1 slots=8
#   launch/deepspeed.sh --help
set -euo pipefail
from="$PWD"
# shellcheck source=launch/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
ensure_venv run
cd "$from"
exec "$VENV/bin/python" -m ds_trainer launch "$@"
