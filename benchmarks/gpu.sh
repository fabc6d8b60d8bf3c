#!/usr/bin/env bash
# The GPU benchmarks: correctness and speed of training on the NVIDIA GPUs of this machine. Seven stages, each with a
# time limit. A stage that is stopped keeps its results so far.
#
#   benchmarks/gpu.sh [--cpu] [--out DIR] [--minutes N] [STAGE ...]
#   benchmarks/gpu.sh --collect-wheels [VERSION]
#
#   oracle      tests with the gpu marker; losses, gradients and weights against plain PyTorch on one GPU (ZeRO 0-3, bf16,
#               fp16, fused and offloaded Adam, resume, background save, rollback); with two GPUs every two-rank layout;
#               packing, chunked loss, tiled MLPs, offloaded activations, compiled blocks, Liger, fp8: with and without
#   kernels     ring attention's kernels against torch's attention; the loss in tiles against whole logits
#   throughput  tokens/s, MFU and peak memory of full fine-tuning and LoRA, compared with a bare loop and transformers.Trainer
#   memory      memory and time of a step of twelve runs, compared with what the planner predicts
#   features    tokens/s and memory with one feature changed: chunked loss, compiled blocks, offloaded activations, tiled
#               MLPs, fp8, packing
#   longest     the longest sequence that fits at 8B with LoRA and everything that saves memory
#   stalls      how often the host waits for the GPU in a step; how long a checkpoint interrupts training
#
#   --cpu             the same code, small, on the CPU: does it run?
#   --out DIR         results and logs (default: runs/gpu)
#   --minutes N       time limit of each stage (default: 10)
#   --collect-wheels  on a machine with a package index: download the packages that a bare machine with torch and
#                     transformers lacks into benchmarks/wheels, for Python VERSION (default: 3.12). Afterward no
#                     network is needed.
#   PYTHON            the interpreter that has torch (default: python3)
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
ROOT="$(dirname "$HERE")"
PYTHON="${PYTHON:-python3}"
STAGES=(oracle kernels throughput memory features longest stalls)

say() { printf '[gpu] %s\n' "$*"; }

die() {
    printf '[gpu] error: %s\n' "$*" >&2
    exit 2
}

collect_wheels() {
    local version="$1" pip=("$PYTHON" -m pip --quiet --disable-pip-version-check) platforms=() platform
    for platform in manylinux_2_28 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux2010 manylinux1; do
        platforms+=(--platform "${platform}_x86_64")
    done
    mkdir -p "$HERE/wheels"
    # What this package and its tests import, beyond torch, transformers and accelerate with what those bring; Liger and
    # torchao are compared, too.
    "${pip[@]}" download --no-deps --only-binary=:all: -d "$HERE/wheels" -c "$ROOT/constraints.txt" \
        --python-version "$version" --implementation cp "${platforms[@]}" hjson msgpack pydantic pydantic-core \
        annotated-types typing-inspection typing-extensions py-cpuinfo einops ninja psutil peft pytest pluggy iniconfig \
        pygments hypothesis sortedcontainers liger-kernel torchao
    # Its operators are compiled where they are used.
    DS_BUILD_OPS=0 "${pip[@]}" wheel --no-deps --no-build-isolation -w "$HERE/wheels" \
        "$(grep '^deepspeed==' "$ROOT/constraints.txt")"
    say "$(find "$HERE/wheels" -name '*.whl' | wc -l) wheels for Python $version are in $HERE/wheels"
}

device=cuda out="" minutes=10 chosen=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --cpu) device=cpu ;;
    --out) out="${2:?--out needs a directory}" && shift ;;
    --minutes) minutes="${2:?--minutes needs a number}" && shift ;;
    --collect-wheels)
        collect_wheels "${2:-3.12}"
        exit 0
        ;;
    *)
        [[ " ${STAGES[*]} " == *" $1 "* ]] || die "unknown stage or option '$1'. Stages: ${STAGES[*]}; see --help."
        chosen+=("$1")
        ;;
    esac
    shift
done
[[ "$minutes" =~ ^[1-9][0-9]*$ ]] || die "--minutes $minutes: a whole number of minutes is needed."
[ ${#chosen[@]} -gt 0 ] || chosen=("${STAGES[@]}")
cd "$ROOT"
out="${out:-runs/gpu}"
mkdir -p "$out"
out="$(cd "$out" && pwd -P)"

"$PYTHON" -c 'import torch' 2>/dev/null || die "$PYTHON has no torch: set PYTHON to the interpreter that has it."
[ "$device" = cpu ] || "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "torch sees no NVIDIA GPU here; --cpu runs the same code on the CPU."

# Only what is missing is taken from the wheels: two versions of a package would get into each other's way.
mapfile -t missing < <("$PYTHON" - "$HERE"/wheels/*.whl <<'PY'
import importlib.metadata, os, sys
for path in sys.argv[1:]:
    if os.path.exists(path):
        try:
            importlib.metadata.version(os.path.basename(path).split("-")[0])
        except importlib.metadata.PackageNotFoundError:
            print(path)
PY
)
if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${#missing[@]} packages from benchmarks/wheels into $out/site"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --upgrade \
        --target "$out/site" "${missing[@]}"
fi
export PYTHONPATH="$ROOT:$out/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PATH="$out/site/bin:$PATH" # ninja
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$out/extensions}"
[ "$device" = cuda ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$PYTHON" -c 'import deepspeed, transformers' >/dev/null 2>"$out/imports.log" ||
    die "deepspeed or transformers cannot be imported (see $out/imports.log): where there is a package index, run
benchmarks/gpu.sh --collect-wheels, and take benchmarks/wheels along."

# Runs a command of a stage: what is left of the stage's time, an interrupt at its end, a kill a minute later.
step() {
    local left=$((deadline - SECONDS)) code=0
    if [ "$left" -le 0 ]; then
        say "$stage: not begun, the time is over: $*"
        result=stopped
        return 0
    fi
    timeout --foreground --signal=INT --kill-after=60 "$left" "$@" 2>&1 | tee -a "$out/$stage.log" || code=$?
    case "$code" in
    0) ;;
    124 | 137) result=stopped ;;
    130) exit 130 ;;
    *) result=failed ;;
    esac
}

run_stage() {
    local small=() pairs=() stages=(0 1 2 3) within=(--minutes "$minutes" --device "$device") tests
    [ "$device" = cuda ] || small=(--quick) pairs=(--cases "packed fp32, zero3" "tiled MLPs fp32") stages=(1)
    case "$stage" in
    oracle)
        mapfile -t tests < <(grep -rlE 'mark\.gpu\b' "$ROOT/tests" --include='test_*.py')
        step "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu "${tests[@]}"
        step "$PYTHON" "$HERE/gpu_oracle.py" "${within[@]}" "${small[@]}" --out "$out/oracle.json"
        step "$PYTHON" "$HERE/gpu_pairs.py" "${within[@]}" "${pairs[@]}" --out "$out/pairs.json"
        ;;
    kernels)
        step "$PYTHON" "$HERE/ring_kernels.py" "${within[@]}" "${small[@]}" --out "$out/kernels.json"
        step "$PYTHON" "$HERE/gpu_loss.py" "${within[@]}" --out "$out/loss.json"
        ;;
    throughput) step "$PYTHON" "$HERE/gpu_throughput.py" "${within[@]}" --out "$out/throughput.json" ;;
    features) step "$PYTHON" "$HERE/gpu_features.py" variants "${within[@]}" --out "$out/features.json" ;;
    longest) step "$PYTHON" "$HERE/gpu_features.py" longest "${within[@]}" --out "$out/longest.json" ;;
    memory) step "$PYTHON" "$HERE/gpu_memory.py" "${within[@]}" --out "$out/memory.json" ;;
    stalls)
        step "$PYTHON" "$HERE/gpu_syncs.py" "${within[@]}" --stages "${stages[@]}" --out "$out/syncs.json"
        step "$PYTHON" "$HERE/checkpoint.py" "${within[@]}" "${small[@]}" --directory "$out" --out "$out/saves.json"
        ;;
    esac
}

declare -A results
bad=0
for stage in "${chosen[@]}"; do
    say "$stage: at most $minutes minutes, on the $device"
    result=passed began=$SECONDS deadline=$((SECONDS + 60 * minutes))
    : >"$out/$stage.log"
    run_stage
    results[$stage]="$result after $((SECONDS - began)) s"
    [ "$result" = passed ] || bad=1
done
printf '\n'
for stage in "${chosen[@]}"; do say "$stage: ${results[$stage]}"; done
say "results and logs: $out"
exit "$bad"
