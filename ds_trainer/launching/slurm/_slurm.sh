# shellcheck shell=bash
# shellcheck disable=SC2034 # the scripts read what is set here
# Sourced by the batch scripts in this directory: what a job does before, while and after its ranks run.
#
#   DS_TRAINER_ACTIVATE   a file to source first: module load ..., conda activate ...
#   DS_TRAINER_VENV       a virtual environment to activate (default: .venv in the job's directory, if it exists)
#   DS_TRAINER_CONTAINER  prefix of the python command, such as "apptainer exec --nv image.sif"
#   DS_TRAINER_SRUN_ARGS  extra arguments for srun, such as "--container-image=image.sqsh --mpi=none"
#   NPROC                 ranks per node under torchrun (default: the GPUs of the node, else 1)
#   MAX_RESTARTS          how often the job may be restarted in total (default 50)
#   DS_TRAINER_AUTO_RESUME=0   start over after a restart instead of resuming from the latest checkpoint
#
# The ranks' exit codes decide what follows: after a stop at a checkpoint, a lost GPU, an NCCL abort or a hang the job is
# requeued, after an error of the program it ends. `python -m ds_trainer.launching.restarts` has the rules. After a
# preemption or the loss of a node SLURM requeues the job. See docs/how-to/slurm.md.

say() { printf '[slurm] %s\n' "$*"; }

die() {
    printf '[slurm] error: %s\n' "$*" >&2
    exit 1
}

# Sets `command` (what a rank runs) and the environment of the ranks. `agent` and `rank`, below, are prefixes of the
# commands that srun starts once per node and once per rank.
prepare() {
    [ -n "${SLURM_JOB_ID:-}" ] || die "this is a batch script; submit it with sbatch."
    [ $# -gt 0 ] || die "no recipe or script given: sbatch SCRIPT RECIPE.yaml [--section.key value ...], or a Python script."
    restarts="${SLURM_RESTART_COUNT:-0}" max_restarts="${MAX_RESTARTS:-50}"
    [[ "$max_restarts" =~ ^[0-9]+$ ]] || die "MAX_RESTARTS=$max_restarts must be a whole number."
    say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart $restarts of at most $max_restarts"
    [ "$restarts" -le "$max_restarts" ] || die "no restarts left (MAX_RESTARTS=$max_restarts)."
    activate

    case "$1" in
        *.yaml | *.yml) command=(python -m ds_trainer train "$@") ;;
        *.py | -m) command=(python "$@") ;;
        *) command=("$@") ;;
    esac
    read -r -a container <<<"${DS_TRAINER_CONTAINER:-}"
    read -r -a srun_args <<<"${DS_TRAINER_SRUN_ARGS:-}"
    nproc="${NPROC:-${SLURM_GPUS_ON_NODE:-1}}"

    # Files of this run of the job on the shared disk, next to its log: the stop request, the ranks' exit codes.
    state="$PWD/slurm-$SLURM_JOB_ID.state"
    export DS_TRAINER_OUTCOME_DIR="$state/outcomes.$restarts" DS_TRAINER_STOP_FILE="$state/stop.$restarts"
    rm -rf "$DS_TRAINER_OUTCOME_DIR" "$DS_TRAINER_STOP_FILE"
    mkdir -p "$DS_TRAINER_OUTCOME_DIR"
    # If only a slurmd died and not its node, ranks of an earlier run are still running: ask them to stop.
    for ((earlier = 0; earlier < restarts; earlier++)); do touch "$state/stop.$earlier"; done
    export DS_TRAINER_AUTO_RESUME="${DS_TRAINER_AUTO_RESUME:-1}"
    # The trainer also queries squeue, which knows later changes; inside a container it cannot.
    unset DS_TRAINER_JOB_END
    job_end="$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null)" || job_end=""
    if [ ${#container[@]} -gt 0 ] && [ -n "$job_end" ]; then export DS_TRAINER_JOB_END="$job_end"; fi

    # sbatch passes on the environment of its caller: remove the variables of other launchers.
    unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
    # Since SLURM 22.05 srun does not inherit it.
    if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
}

activate() {
    local venv="${DS_TRAINER_VENV:-$PWD/.venv}"
    # User scripts may not support these options.
    set +eu
    if [ -n "${DS_TRAINER_ACTIVATE:-}" ]; then
        [ -f "$DS_TRAINER_ACTIVATE" ] || die "DS_TRAINER_ACTIVATE=$DS_TRAINER_ACTIVATE is not a file."
        # shellcheck disable=SC1090
        source "$DS_TRAINER_ACTIVATE" || die "$DS_TRAINER_ACTIVATE failed."
    fi
    set -eu
    if [ -d "$venv/bin" ]; then
        export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
    elif [ -n "${DS_TRAINER_VENV:-}" ]; then
        die "DS_TRAINER_VENV=$DS_TRAINER_VENV is not a virtual environment."
    fi
}

# Prefix of torchrun, which USR1 would kill; the signal is meant for its ranks.
# shellcheck disable=SC2016
agent=(bash -c 'trap "" USR1; exec "$@"' agent)

# Prefix of a rank. USR1 would kill a Python process that has no handler yet, so it starts with the signal ignored; the
# trainer later installs its handler. Bash handles TERM after its child, which receives it too, has ended. The exit code
# is written to a file (ds_trainer/utils/outcomes.py), since torchrun turns all codes into 1 and srun returns only the
# highest. Codes that the ranks have agreed on count as success for srun and torchrun; otherwise the first rank to end would have the others killed.
# shellcheck disable=SC2016
rank=(bash -c '
    trap "" USR1
    trap : TERM INT
    if [ -z "${RANK:-}" ]; then
        export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_STEP_NUM_TASKS"
    fi
    code=0
    "$@" || code=$?
    out="$DS_TRAINER_OUTCOME_DIR/rank-$RANK.json"
    printf "{\"rank\": %d, \"code\": %d, \"host\": \"%s\", \"time\": %s}\n" \
        "$RANK" "$code" "${SLURMD_NODENAME:-$HOSTNAME}" "$(date +%s.%N)" >"$out.partial"
    mv -f "$out.partial" "$out"
    case "$code" in 75 | 77) exit 0 ;; *) exit "$code" ;; esac' rank)

# Runs the job step and ends the script. The arguments are those of srun.
run_job() {
    local step code=0 interrupted=1
    by_slurm=0
    trap 'interrupted=1; stop_ranks' USR1
    trap 'interrupted=1; by_slurm=1' TERM
    number_step
    srun --kill-on-bad-exit=1 ${srun_args[@]+"${srun_args[@]}"} "$@" &
    step=$!
    # A trap interrupts `wait`, and a job may receive several signals.
    while [ "$interrupted" = 1 ]; do
        interrupted=0 code=0
        wait "$step" || code=$?
    done
    finish "$code"
}

# Gives the next step another number than those of the last nine starts, by steps that do nothing. With --kill-on-bad-exit
# slurmd confirms a kill only when the ranks have ended, for up to KillWait. After MessageTimeout (10 s) slurmctld takes it
# for lost and sends it again a minute later, to a step of that number, which may be the one of the next start by then.
number_step() {
    local number
    for ((number = 0; number < restarts % 10; number++)); do
        srun --overlap --nodes=1 --ntasks=1 true || say "srun cannot start a step that does nothing" &
    done
    wait || true # a signal interrupts it
}

# The file reaches ranks that have no handler yet, the signal reaches scripts that handle only signals. Sent once, because
# a second signal tells the trainer to hurry.
stop_ranks() {
    # No bare `return`: in a trap it returns the status of the interrupted command, 138, which ends the script.
    if [ ! -e "$DS_TRAINER_STOP_FILE" ]; then
        say "asking the ranks to stop at a checkpoint"
        touch "$DS_TRAINER_STOP_FILE"
        scancel --signal=USR1 "$SLURM_JOB_ID" || true
    fi
}

# How often SLURM has restarted this job; if scontrol fails, the number at the start of this run.
restarts_now() {
    local shown
    shown="$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | grep -o ' Restarts=[0-9]*')" || true
    printf '%s' "${shown##*=}" | grep . || printf '%s' "$restarts"
}

# Sets `code` and `verdict` (restart or end), `hosts` to be excluded, and says why. Where the package is in a container
# that srun starts, it is asked there. If it cannot be asked, only a stop at a checkpoint restarts the job.
judge() {
    local ask=("${container[@]}" python -m ds_trainer.launching.restarts) answer lines line
    if [ ${#srun_args[@]} -gt 0 ]; then ask=(srun --nodes=1 --ntasks=1 "${srun_args[@]}" "${ask[@]}"); fi
    if answer="$("${ask[@]}" "$state" "$restarts" "$1")"; then
        mapfile -t lines <<<"$answer"
        read -r code verdict hosts <<<"${lines[0]}"
        for line in "${lines[@]:1}"; do say "$line"; done
    else
        code="$1" verdict=end hosts=""
        if grep -qs '"code": 75,' "$DS_TRAINER_OUTCOME_DIR"/rank-*.json; then code=75 verdict=restart; fi
        say "${ask[*]} failed; the ranks ended with code $code, srun with $1"
    fi
}

# Sets `excluded`, the nodes that the next start of this job is to do without: those of before and $1, if the job's
# partition has enough others; else nothing.
choose_excluded() {
    local others
    excluded="" before="$(scontrol --oneliner show job "$SLURM_JOB_ID" | grep -o ' ExcNodeList=[^ ]*')" || true
    before="${before##*=}" before="${before/#(null)/}"
    excluded="${before:+$before,}$1"
    others="$(sinfo -h -N -p "$SLURM_JOB_PARTITION" -t idle,mixed,allocated,completing -o %N | sort -u |
        grep -cvxF -- "$(scontrol show hostnames "$excluded")")" || true
    if [ "${others:-0}" -lt "$SLURM_JOB_NUM_NODES" ]; then
        say "not excluded: $1, since partition $SLURM_JOB_PARTITION has only ${others:-0} other nodes for this job"
        excluded=""
    fi
}

# Ends the script with the code of the ranks; requeues the job first if that code requests it.
finish() {
    local code verdict hosts now
    judge "$1"
    if [ "$(restarts_now)" -gt "$restarts" ]; then
        say "this was run $restarts; SLURM has already restarted the job, and that run continues it"
        exit "$code"
    fi
    now="$(date +%s)"
    if [ "$by_slurm" = 1 ] && [ "$now" -lt "$((${job_end:-$now + 60} - 10))" ]; then
        say "SLURM ended the job (scancel, preemption, a dead node) and decides whether to restart it"
        exit "$code"
    fi
    if [ "$verdict" = end ]; then
        rm -rf "$state"
    elif [ "$restarts" -ge "$max_restarts" ]; then
        say "not requeued: no restarts left (MAX_RESTARTS=$max_restarts)"
    else
        local excluded="" before=""
        if [ -n "$hosts" ]; then choose_excluded "${hosts// /,}"; fi
        say "requeueing"
        # SLURM now ends this script, and only a pending job can be changed.
        trap '' TERM
        if ! scontrol requeue "$SLURM_JOB_ID"; then
            say "not requeued by this script: SLURM has already done it, or the job was submitted with --no-requeue"
        elif [ -n "$excluded" ] && scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$excluded"; then
            say "excluded from this job: ${hosts// /,} (to undo: scontrol update JobId=$SLURM_JOB_ID ExcNodeList=$before)"
        elif [ -n "$excluded" ]; then
            say "not excluded: ${hosts// /,}, since scontrol failed"
        fi
    fi
    exit "$code"
}
