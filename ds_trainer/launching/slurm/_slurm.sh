# shellcheck shell=bash
# shellcheck disable=SC2034 # the scripts read what is set here
# Sourced by the batch scripts beside it: what one start of a job does before its ranks, while they run, and at their end.
#
#   DS_TRAINER_ACTIVATE   a file to source first: module load ..., conda activate ...
#   DS_TRAINER_VENV       a virtual environment to activate (default: .venv in the job's folder, where there is one)
#   DS_TRAINER_CONTAINER  words before python, as in "apptainer exec --nv image.sif"
#   DS_TRAINER_SRUN_ARGS  more words for srun, as in "--container-image=image.sqsh --mpi=none"
#   NPROC                 processes of each node under torchrun (default: the GPUs of the node, else 1)
#   MAX_RESTARTS          how often one job may be started again, by whomever (default 50)
#   DS_TRAINER_AUTO_RESUME=0   begin anew after a restart instead of going on from the latest checkpoint
#
# The ranks' exit codes decide the end: 75 (stopped at a checkpoint, start me again) and 76 (hung) requeue the job, every
# other end is final. After a preemption or the loss of a node SLURM requeues it. docs/slurm.md tells the whole chain.

say() { printf '[slurm] %s\n' "$*"; }

die() {
    printf '[slurm] error: %s\n' "$*" >&2
    exit 1
}

# Sets `command` (what a rank runs), `agent` and `rank` (words to put before what srun starts once for a node and once
# for a rank), and the environment of the ranks.
prepare() {
    [ -n "${SLURM_JOB_ID:-}" ] || die "this is a batch script: start it with sbatch."
    [ $# -gt 0 ] || die "name what to train: sbatch SCRIPT RECIPE.yaml [--section.key value ...], or a Python script."
    restarts="${SLURM_RESTART_COUNT:-0}" max_restarts="${MAX_RESTARTS:-50}"
    [[ "$max_restarts" =~ ^[0-9]+$ ]] || die "MAX_RESTARTS=$max_restarts: a whole number is needed."
    say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart $restarts of at most $max_restarts"
    [ "$restarts" -le "$max_restarts" ] || die "MAX_RESTARTS=$max_restarts are used up."
    activate

    case "$1" in
        *.yaml | *.yml) command=(python -m ds_trainer train "$@") ;;
        *.py | -m) command=(python "$@") ;;
        *) command=("$@") ;;
    esac
    read -r -a container <<<"${DS_TRAINER_CONTAINER:-}"
    read -r -a srun_words <<<"${DS_TRAINER_SRUN_ARGS:-}"
    nproc="${NPROC:-${SLURM_GPUS_ON_NODE:-1}}"

    # What this start of the job leaves on the shared disk, beside its log: the request to stop, the ranks' exit codes.
    state="$PWD/slurm-$SLURM_JOB_ID.state"
    export DS_TRAINER_RANK_CODES="$state/codes.$restarts" DS_TRAINER_STOP_FILE="$state/stop.$restarts"
    rm -rf "$DS_TRAINER_RANK_CODES" "$DS_TRAINER_STOP_FILE"
    mkdir -p "$DS_TRAINER_RANK_CODES"
    # Where a slurmd died and not its node, ranks of an earlier start go on unseen: they are asked to stop.
    for ((earlier = 0; earlier < restarts; earlier++)); do touch "$state/stop.$earlier"; done
    export DS_TRAINER_AUTO_RESUME="${DS_TRAINER_AUTO_RESUME:-1}"
    # The trainer asks squeue, which knows of later changes, too; inside a container it cannot.
    unset DS_TRAINER_JOB_END
    job_end="$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null)" || job_end=""
    if [ ${#container[@]} -gt 0 ] && [ -n "$job_end" ]; then export DS_TRAINER_JOB_END="$job_end"; fi

    # sbatch passes the environment of its caller on: nothing of another launcher may come with it.
    unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
    # Since SLURM 22.05 srun no longer takes it over by itself.
    if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
}

activate() {
    local venv="${DS_TRAINER_VENV:-$PWD/.venv}"
    # Other people's scripts need not be written for these.
    set +eu
    if [ -n "${DS_TRAINER_ACTIVATE:-}" ]; then
        [ -f "$DS_TRAINER_ACTIVATE" ] || die "DS_TRAINER_ACTIVATE=$DS_TRAINER_ACTIVATE is no file."
        # shellcheck disable=SC1090
        source "$DS_TRAINER_ACTIVATE" || die "$DS_TRAINER_ACTIVATE failed."
    fi
    set -eu
    if [ -d "$venv/bin" ]; then
        export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
    elif [ -n "${DS_TRAINER_VENV:-}" ]; then
        die "DS_TRAINER_VENV=$DS_TRAINER_VENV is no virtual environment."
    fi
}

# Before torchrun: it would die of the signal that is meant for its ranks.
# shellcheck disable=SC2016
agent=(bash -c 'trap "" USR1; exec "$@"' agent)

# Before a rank. Python without a handler yet would die of USR1, so it starts with the signal ignored; the trainer's
# handler takes its place. Bash handles TERM when its child, which gets it too, has ended. The code goes to a file, since
# torchrun turns all codes into 1, and srun gives only the highest. The agreed ends count as success for srun and
# torchrun, or the first rank to end would have the others killed.
# shellcheck disable=SC2016
rank=(bash -c '
    trap "" USR1
    trap : TERM INT
    if [ -z "${RANK:-}" ]; then
        export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_STEP_NUM_TASKS"
    fi
    code=0
    "$@" || code=$?
    printf "%d\n" "$code" >"$DS_TRAINER_RANK_CODES/$RANK"
    case "$code" in 75 | 77) exit 0 ;; *) exit "$code" ;; esac' rank)

# Runs the job's one step and ends the script. The arguments are those of srun.
run_job() {
    local step code=0 interrupted=1
    by_slurm=0
    trap 'interrupted=1; stop_ranks' USR1
    trap 'interrupted=1; by_slurm=1' TERM
    srun --kill-on-bad-exit=1 ${srun_words[@]+"${srun_words[@]}"} "$@" &
    step=$!
    # A trap interrupts `wait`, and a job may get several signals.
    while [ "$interrupted" = 1 ]; do
        interrupted=0 code=0
        wait "$step" || code=$?
    done
    finish "$code"
}

# The file is for ranks that are too young to have a handler, the signal for plain scripts that handle nothing else. Once
# only: the trainer takes a second signal for haste.
stop_ranks() {
    # No bare `return`: in a trap it gives the status of what was interrupted, 138, which ends the script.
    if [ ! -e "$DS_TRAINER_STOP_FILE" ]; then
        say "asking the ranks to stop at a checkpoint"
        touch "$DS_TRAINER_STOP_FILE"
        scancel --signal=USR1 "$SLURM_JOB_ID" || true
    fi
}

# How often SLURM has started this job again; what this start was told where it does not answer.
restarts_now() {
    local told
    told="$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | grep -o ' Restarts=[0-9]*')" || true
    printf '%s' "${told##*=}" | grep . || printf '%s' "$restarts"
}

# Ends the script with the code of the ranks; requeues the job first where that is for.
finish() {
    local code="$1" said again=0 now
    said=" $({ cat "$DS_TRAINER_RANK_CODES"/* 2>/dev/null || true; } | sort -nu | tr '\n' ' ')"
    # The failure of one rank has srun end the others by a signal (128 and more): the smallest code is the cause.
    if [[ "$said" =~ ' '([1-9][0-9]*) ]]; then code="${BASH_REMATCH[1]}"; fi
    case "$said" in
        *" 2 "*) code=2 ;;
        *" 77 "*) code=77 ;;
        *" 75 "*) code=75 again=1 ;;
        *" 76 "*) code=76 again=1 ;;
    esac
    if [ "$said" = " " ]; then # they were killed with all around them, and srun may say 0
        said=" nothing said " code="$((code > 0 ? code : 1))"
    fi
    say "the ranks ended with${said% }, srun with $1"
    if [ "$(restarts_now)" -gt "$restarts" ]; then
        say "this was start $restarts; SLURM has started the job again meanwhile, and that start goes on with it"
        exit "$code"
    fi
    now="$(date +%s)"
    if [ "$by_slurm" = 1 ] && [ "$now" -lt "$((${job_end:-$now + 60} - 10))" ]; then
        say "SLURM ends the job (scancel, preemption, a dead node): whether it starts again is SLURM's to say"
        exit "$code"
    fi
    if [ "$again" = 0 ]; then
        rm -rf "$state"
    elif [ "$restarts" -ge "$max_restarts" ]; then
        say "not requeued: MAX_RESTARTS=$max_restarts are used up"
    else
        say "requeueing"
        scontrol requeue "$SLURM_JOB_ID" ||
            say "not by this script: SLURM has done it already, or the job was submitted with --no-requeue"
    fi
    exit "$code"
}
