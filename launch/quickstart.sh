#!/usr/bin/env bash
# First training: a small language model from scratch on the sources of Python's standard library, on every GPU of this
# machine, or as two processes on its CPU.
#
#   launch/quickstart.sh [--any.key value ...]     for example --arguments.max_steps 100
#
#   NPROC            processes (default: the GPUs; without any, 2, or 1 on a single core)
#   OMP_NUM_THREADS  threads of each process (default: the cores divided by the processes)
#
# DS_TRAINER_VENV and PYTHON choose the environment: see launch/_venv.sh.
set -euo pipefail

case "${1:-}" in -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

# shellcheck source=launch/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

# Where the run writes: the last --arguments.output_dir, as the command line reads it.
output_dir=""
previous=""
for argument in "$@"; do
    case "$argument" in --arguments.output_dir=*) output_dir="${argument#*=}" ;; esac
    [ "$previous" != --arguments.output_dir ] || output_dir="$argument"
    previous="$argument"
done
if [ -z "$output_dir" ]; then
    output_dir=runs/quickstart
    set -- --arguments.output_dir "$output_dir" "$@"
fi

ensure_venv run

gpus=0
if command -v nvidia-smi >/dev/null; then
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
fi
# The launcher reads CUDA_VISIBLE_DEVICES only when it gets no number of processes, and discards it otherwise.
chosen=()
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    if [[ "$CUDA_VISIBLE_DEVICES" =~ ^[0-9]+(,[0-9]+)*$ ]]; then
        IFS=, read -r -a chosen <<<"$CUDA_VISIBLE_DEVICES"
        gpus=${#chosen[@]}
    elif [ -z "$CUDA_VISIBLE_DEVICES" ] || [ "$CUDA_VISIBLE_DEVICES" = -1 ]; then
        gpus=0
        export DS_ACCELERATOR=cpu # for the launcher; it shows the GPUs to the ranks again, hence use_cpu
        set -- --arguments.use_cpu true "$@"
    else
        die "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES: name GPUs by number (0,1): the deepspeed launcher accepts nothing else."
    fi
fi

cores="$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)')"
if [ "$gpus" -gt 0 ]; then
    nproc="${NPROC:-$gpus}"
else
    nproc="${NPROC:-$((cores < 2 ? cores : 2))}"
fi
[[ "$nproc" =~ ^[1-9][0-9]*$ ]] || die "NPROC=$nproc: set it to a number of processes, 1 or more."
[ "$gpus" -eq 0 ] || [ "$nproc" -le "$gpus" ] ||
    die "NPROC=$nproc, but there are $gpus GPUs: NCCL needs one GPU for each process."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores / nproc > 0 ? cores / nproc : 1))}"

if [ ${#chosen[@]} -gt 0 ]; then
    where=(--include "localhost:$(IFS=,; echo "${chosen[*]:0:nproc}")")
    unset CUDA_VISIBLE_DEVICES
else
    where=(--num_gpus "$nproc")
fi
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"

say "$nproc processes ($gpus GPUs, $cores cores), $OMP_NUM_THREADS threads each, output in $output_dir"
# The job writes it last. The launcher's exit code is not enough: it is 0 when a signal killed its child.
rm -f "$output_dir/results.json"

# The job runs in its own process group, so that stopping this script stops every rank.
# --hostfile '': this is one machine, even if there is a hostfile of a cluster at the default path.
# --no_local_rank: the rank is in the environment; the launcher would put the flag before the sub-command.
set -m
deepspeed --hostfile '' "${where[@]}" --master_port "$port" --no_local_rank --module \
    ds_trainer train ds_configs/recipes/quickstart.yaml "$@" </dev/null &
job=$!
set +m
stop_job() {
    kill -TERM -- "-$job" 2>/dev/null || true
    wait "$job" 2>/dev/null || true
}
trap 'stop_job; exit 130' INT TERM HUP
code=0
wait "$job" || code=$?
trap - INT TERM HUP

if [ "$code" -ne 0 ]; then
    stop_job
    die "training failed with exit code $code: see the cause above."
fi
if [ ! -f "$output_dir/results.json" ]; then
    stop_job
    die "the launcher reported no error, but $output_dir/results.json is missing: a process died."
fi
