#!/usr/bin/env bash
# The GPU benchmarks: correctness and speed of training on the NVIDIA GPUs of this machine. Stages, each with a time
# limit and one JSON file of results, which is written after every part: what is stopped keeps its results so far.
#
#   benchmarks/gpu.sh [--cpu] [--out DIR] [--minutes N] [STAGE ...]
#   benchmarks/gpu.sh --collect-wheels [VERSION]
#
#   first       what to run where a GPU can be had for ten minutes, the most important part first: the oracle; two and four
#               ranks with NCCL on one GPU, a killed rank, a stop file; training while 16 GB are saved; masks and packing;
#               kernels of a step, gradient norm; the host's time with 1,024 ranks; a start without a compiler
#   oracle      tests with the gpu marker; losses, gradients and weights against plain PyTorch on one GPU (ZeRO 0-3, bf16,
#               fp16, fused and offloaded Adam, resume, background save, rollback); with two GPUs every two-rank layout;
#               packing, chunked loss, tiled MLPs, offloaded activations, compiled blocks, Liger, fp8: with and without
#   kernels     ring attention's kernels against torch's attention; the loss in tiles against whole logits; a layer of
#               divided experts with one, two and four ranks on one GPU
#   speed       tokens/s and memory with one feature changed, and the kernels of a step; tokens/s, MFU and peak memory beside a
#               bare loop and transformers.Trainer, of 1B parameters and of four layers of a mixture of experts
#   memory      memory and time of a step of twelve runs, compared with what the planner predicts; the longest sequence that
#               fits at 8B with LoRA and everything that saves memory
#   stalls      how often the host waits for the GPU in a step; how long a checkpoint interrupts training
#
#   --cpu             the same code, small, on the CPU: does it run?
#   --out DIR         where STAGE.json goes (default: runs/gpu)
#   --minutes N       time limit of each stage (default: 10)
#   --collect-wheels  on a machine with a package index: download the packages that a bare machine with torch and
#                     transformers lacks into benchmarks/wheels, for Python VERSION (default: 3.12). Afterward no
#                     network is needed.
#   PYTHON            the interpreter that has torch (default: python3)
#   GPU_KIT_WORK      for installed packages, compiled operators, checkpoints and logs (default: runs/gpu)
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
ROOT="$(dirname "$HERE")"
PYTHON="${PYTHON:-python3}"
STAGES=(first oracle kernels speed memory stalls)

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
        --python-version "$version" --implementation cp "${platforms[@]}" filelock hjson msgpack pydantic pydantic-core \
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
out="${out:-runs/gpu}" work="${GPU_KIT_WORK:-runs/gpu}"
mkdir -p "$out" "$work"
out="$(cd "$out" && pwd -P)" work="$(cd "$work" && pwd -P)"

"$PYTHON" -c 'import torch' 2>/dev/null || die "$PYTHON has no torch: set PYTHON to the interpreter that has it."
[ "$device" = cpu ] || "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "torch sees no NVIDIA GPU here; --cpu runs the same code on the CPU."

# Only what is missing, or older than pyproject.toml asks for, is taken from the wheels: two versions of a package would get
# into each other's way. torch stays as it is: its lower bound is about a crash on CPUs, and torch 2.11 is in use on GPUs.
mapfile -t missing < <(PYTHONPATH="$work/site" "$PYTHON" - "$ROOT/pyproject.toml" "$HERE"/wheels/*.whl <<'PY'
import importlib.metadata, os, re, sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
text = re.search(r"^dependencies = \[(.*?)^\]", open(sys.argv[1]).read(), re.M | re.S).group(1)
wanted = [Requirement(one) for one in re.findall(r'"([^"]+)"', text)]
bounds = {canonicalize_name(one.name): one.specifier for one in wanted if one.name != "torch"}
for path in filter(os.path.exists, sys.argv[2:]):
    name = canonicalize_name(os.path.basename(path).split("-")[0])
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed is None or not bounds.get(name, Requirement("x").specifier).contains(installed, prereleases=True):
        print(path)
PY
)
if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${#missing[@]} packages from benchmarks/wheels into $work/site"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --upgrade \
        --target "$work/site" "${missing[@]}"
fi
export PYTHONPATH="$ROOT:$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PATH="$work/site/bin:$PATH" # ninja
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$work/extensions}"
[ "$device" = cuda ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$PYTHON" -c 'import deepspeed, transformers' >/dev/null 2>"$work/imports.log" ||
    die "deepspeed or transformers cannot be imported (see $work/imports.log): where there is a package index, run
benchmarks/gpu.sh --collect-wheels, and take benchmarks/wheels along."

# part NAME SECONDS COMMAND...: runs a part of a stage for SECONDS, or what is left of the stage's time if that is less:
# an interrupt at its end, a kill a minute later. Scripts of this folder get their own limit, and where to write results.
part() {
    local name="$1" left=$((deadline - SECONDS)) code=0 outcome=passed began=$SECONDS
    local json="$work/$name.json" log="$work/$name.log"
    [ "$2" -ge "$left" ] || left="$2"
    shift 2
    rm -f "$json"
    if [ "$left" -le 0 ]; then
        say "$stage: not begun, the time is over: $name" | tee "$log"
        outcome=stopped
    else
        [[ "${1:-}" != *.py ]] || set -- "$PYTHON" "$HERE/$1" "${@:2}" --device "$device" --out "$json" \
            --minutes "$((left / 60)).$(printf %02d $((left % 60 * 100 / 60)))"
        timeout --foreground --signal=INT --kill-after=60 "$left" "$@" 2>&1 | tee "$log" || code=$?
        case "$code" in
        0) ;;
        124 | 137) outcome=stopped ;;
        130) exit 130 ;;
        *) outcome=failed ;;
        esac
    fi
    "$PYTHON" "$HERE/kept_results.py" "$out/$stage.json" "$name" "$outcome" "$((SECONDS - began))" "$json" "$log"
    say "$stage, $name: $outcome after $((SECONDS - began)) s"
    [ "$outcome" = passed ] || result="$outcome"
}

# host_time MODEL [OPTIONS]: the host's time of a micro-batch at ZeRO 3, with few and with many ranks.
host_time() {
    local seconds=40
    [ "$device" = cuda ] || seconds=600
    part host-time "$seconds" "$PYTHON" "$HERE/host_time.py" --device "$device" --models "$1" --stages 3 --rounds 1 --ranks 8 1024 "${@:2}" \
        --out "$work/host-time.json"
}

run_stage() {
    local all=36000 tests
    case "$stage-$device" in
    first-cuda)
        part first-oracle 90 gpu_oracle.py --world 1 --cases "zero1 fp32" "zero3 fp32" "zero2 bf16" "resume, zero1 bf16" rollback
        part shared-2 100 gpu_oracle.py --share-gpu --world 2 --seconds 90 --cases "zero1 fp32" "zero3 fp32" "dp2 resume"
        part shared-4 70 gpu_oracle.py --share-gpu --world 4 --seconds 90 --cases "dp2 tp2 zero3" "cp2 sp2 zero1" "dp4 resume"
        part endings 70 gpu_endings.py --share-gpu --cases killed "stop file"
        part saves-16gb 90 checkpoint.py --only "1b bf16" --background --directory "$work"
        part masks 40 gpu_pairs.py --cases "packed encoder" "packed bf16"
        part step 60 gpu_features.py variants --variants profile "as it is" "DeepSpeed's gradient norm"
        host_time 8B
        part no-compiler 40 gpu_endings.py --cases "no compiler"
        ;;
    first-cpu)
        part first-oracle $all gpu_oracle.py --world 1 --cases "resume, zero1 fp32"
        part shared-2 $all gpu_oracle.py --share-gpu --world 2 --cases "dp2 zero1 fp32"
        part shared-4 $all gpu_oracle.py --share-gpu --world 4 --cases "dp2 tp2 zero3"
        part endings $all gpu_endings.py --share-gpu
        part saves-16gb $all checkpoint.py --quick --background --directory "$work"
        part masks $all gpu_pairs.py --cases "packed encoder fp32"
        host_time 8B --ranks 8
        ;;
    oracle-*)
        mapfile -t tests < <(grep -rlE 'mark\.gpu\b' "$ROOT/tests" --include='test_*.py')
        part tests $all "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu "${tests[@]}"
        part oracle $all gpu_oracle.py "${small[@]}"
        part pairs $all gpu_pairs.py "${pairs[@]}"
        ;;
    kernels-*)
        part kernels $all ring_kernels.py "${small[@]}"
        part loss $all gpu_loss.py
        part experts $all gpu_experts.py
        ;;
    speed-*)
        part throughput 300 gpu_throughput.py "${models[@]}"
        part features $all gpu_features.py variants "${variants[@]}"
        [ "$device" = cpu ] || part experts-steps 200 gpu_throughput.py --models "30b-a3b, 4 layers"
        ;;
    memory-*)
        part memory 300 gpu_memory.py
        part longest $all gpu_features.py longest
        ;;
    stalls-*)
        part syncs $all gpu_syncs.py --stages "${zero[@]}"
        part saves $all checkpoint.py "${small[@]}" --directory "$work"
        ;;
    esac
}

small=() pairs=() models=(--models 1b) zero=(0 1 2 3) variants=()
if [ "$device" = cpu ]; then
    small=(--quick) pairs=(--cases "packed fp32, zero3" "tiled MLPs fp32") models=(--rounds 1) zero=(1)
    variants=(--variants "profile, compiled blocks" "DeepSpeed's gradient norm" "ragged, packed")
fi
declare -A results
bad=0
for stage in "${chosen[@]}"; do
    say "$stage: at most $minutes minutes, on the $device"
    result=passed stage_began=$SECONDS deadline=$((SECONDS + 60 * minutes))
    rm -f "$out/$stage.json"
    run_stage
    results[$stage]="$result after $((SECONDS - stage_began)) s"
    [ "$result" = passed ] || bad=1
done
printf '\n'
for stage in "${chosen[@]}"; do say "$stage: ${results[$stage]}"; done
say "results: $out/STAGE.json; logs: $work"
exit "$bad"
