# shellcheck shell=bash
# Functions of the batch scripts in this folder, which source this file on the first node of a job:
#
#   prepare_job       sets the environment of the tasks, the rendezvous and the words that start a task, and sources the
#                     cluster's own script (MEGARLHF_ENV)
#   run_once          starts the tasks by one srun and ends with its status
#   run_and_requeue   does the same for training, and queues the job again where that helps
#
# Slurm's programs are called for this job alone: srun; squeue and scontrol show, to read about it and its nodes;
# scontrol requeue and update, and scancel --signal, to queue it again without failed nodes and to pass signals on.

die() { # end for a mistake of the user; the job is not queued again
    echo "$script: $*" >&2
    exit 2
}

prepare_job() { # arguments: what the script expects on its command line, and the number of arguments that it got
    script=$(basename "$job_script")
    if (($2 == 0)); then die "got no arguments; expected: sbatch slurm/$script $1"; fi
    if [[ -z ${SLURM_JOB_ID:-} || -z ${SLURM_JOB_NODELIST:-} ]]; then
        die "SLURM_JOB_ID and SLURM_JOB_NODELIST are not set; start it with sbatch"
    fi
    # Since Slurm 22.05 srun does not take --cpus-per-task over from sbatch; without this a task gets one core.
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
    # More threads than cores spin: one thread a task, unless the job asked for more cores a task.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
    export SLURM_EXPORT_ENV=ALL # with `sbatch --export=X` srun would pass on X alone, and nothing of what follows here
    export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1

    # When one task has ended, the others have a minute to end by themselves; then they are killed. With
    # --kill-on-bad-exit=1 the first task that leaves after saving would kill those that still save, and srun would
    # return 137 in place of the status of the run.
    srun_args=(--kill-on-bad-exit=0 --wait=60 --label)
    launcher=()

    # Rendezvous: the first host of the job, and a port below the ephemeral range that follows from the job's id, so
    # that two jobs on a node differ. A rank reads its number from SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS; what
    # the shell that submitted the job had exported for another launcher is not for it.
    unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${hosts%%$'\n'*}
    export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
    source_site_script
    export MEGARLHF_DIRECTORY=$PWD # a task that starts elsewhere, as in a container, would mistake relative paths
}

# Everything that differs between clusters goes into one script of yours, named by MEGARLHF_ENV. It may load modules,
# activate a virtual environment, set NCCL's variables, put another MASTER_ADDR (a name on the fast network), and change
# two arrays. A container must see shared directories under their own names:
#
#     source /shared/megarlhf/.venv-gpu/bin/activate
#     export NCCL_SOCKET_IFNAME=ib0
#     srun_args+=(--container-image=/shared/megarlhf.sqsh --container-mounts=/shared --container-workdir="$PWD") # pyxis
#     launcher=(apptainer exec --nv --bind /shared --pwd "$PWD" /shared/megarlhf.sif)                        # apptainer
source_site_script() {
    if [[ -z ${MEGARLHF_ENV:-} ]]; then return; fi
    set +u # modules and activation scripts read unset variables
    local result=0
    if [[ ! -f $MEGARLHF_ENV ]]; then die "MEGARLHF_ENV = $MEGARLHF_ENV is no file on $(hostname)"; fi
    trap 'echo "$script: MEGARLHF_ENV = $MEGARLHF_ENV ended the job with status $?; it is sourced: no exit" >&2
        exit 2' EXIT
    # shellcheck source=/dev/null
    source "$MEGARLHF_ENV" || result=$?
    if ((result)); then
        trap - EXIT
        die "MEGARLHF_ENV = $MEGARLHF_ENV ended with status $result; let its last command succeed"
    fi
    if [[ $(trap -p EXIT) == *MEGARLHF_ENV* ]]; then trap - EXIT; fi
    set -u
}

require_command() { # where no container has it
    if ((${#launcher[@]} == 0)) && [[ ${srun_args[*]} != *--container* ]] && ! command -v "$1" >/dev/null; then
        die "$1 is not on PATH; activate its environment in a script of yours, and name that: export" \
            "MEGARLHF_ENV=/shared/site.sh (job.sh, beside this script, has an example)"
    fi
}

run_once() { # arguments: the command of a task
    require_command "$1"
    # Slurm would begin it anew after a failed node, in a directory that has results already.
    scontrol update "JobId=$SLURM_JOB_ID" Requeue=0 2>/dev/null || true
    echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, ${SLURM_NTASKS:-?} tasks: $*"
    # The signal before the time limit is for training; it would end these tasks.
    # shellcheck disable=SC2016 # expanded in the task
    exec srun "${srun_args[@]}" bash -c 'trap "" USR1; exec "$@"' task "${launcher[@]}" "$@"
}

# ---- training: the life of a job ---------------------------------------------------------------------------
# What this job has to remember from one attempt to the next, where it was submitted; removed when the run has ended well.
#   run_dir     written by the first rank at each launch: the run's directory
#   began       written by the first rank at the first launch: the progress that it found
#   exit.RANK   status and message of a rank that ended with 2 or 4, which srun hides behind that of a killed rank
#   attempts    RESTART STATUS PROGRESS, a line for each attempt that has ended. PROGRESS: the newest resume point, and
#               after a + how many lines the rollout bank has
#   nodes       nodes of the attempt that runs;   excluded   nodes that failed;   asked   those of sbatch --exclude

run_and_requeue() { # arguments: the command of a task
    require_command "$1"
    require_finished "${MEGARLHF_AFTER:-}"
    open_memory
    stopped=0
    trap pass_on_stop TERM
    if ((attempt)); then look_back; fi
    leave_failed_nodes
    echo "$SLURM_JOB_NODELIST" >"$memory/nodes"
    note_end_of_job
    echo "job $SLURM_JOB_ID (restart $attempt) on $SLURM_JOB_NODELIST, ${SLURM_NTASKS:-?} tasks," \
        "rendezvous $MASTER_ADDR:$MASTER_PORT: $*"
    if ((stopped)); then # cancelled, or queued again by Slurm, before there was a task to be told
        record "$attempt" stopped
        exit 143
    fi
    srun "${srun_args[@]}" "${launcher[@]}" "$@" &
    wait_for_tasks $!
    decide
}

require_finished() { # argument: directories of runs that must have finished before this one starts, with colons between
    local run earlier_runs
    IFS=: read -ra earlier_runs <<<"$1"
    for run in "${earlier_runs[@]}"; do
        if [[ ! -f $run/FINISHED ]]; then
            die "MEGARLHF_AFTER names $run, but $run/FINISHED is not there: that run has not finished. Its checkpoints" \
                "may be of any step; let it end first"
        fi
    done
}

open_memory() {
    attempt=${SLURM_RESTART_COUNT:-0}
    memory=${SLURM_SUBMIT_DIR:-$PWD}/${SLURM_JOB_NAME:-megarlhf}-$SLURM_JOB_ID.state
    max_attempts=${MEGARLHF_MAX_ATTEMPTS:-3}
    mkdir -p "$memory"
    export MEGARLHF_JOB_STATE=$memory
    touch "$memory/attempts" "$memory/excluded"
    if [[ ! -f $memory/asked ]]; then
        scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | grep -o ' ExcNodeList=[^ (]*' | cut -d= -f2 |
            sed '/^$/d' >"$memory/asked" || true
    fi
    rm -f "$memory"/exit.*
    if [[ ! $max_attempts =~ ^[1-9][0-9]*$ ]]; then
        die "got MEGARLHF_MAX_ATTEMPTS=$max_attempts; expected a number from 1 on"
    fi
}

progress() { # print the newest resume point, and how many responses the rollout bank has beyond it
    local run_dir newest=none point responses
    run_dir=$(cat "$memory/run_dir" 2>/dev/null) || run_dir=/nonexistent
    for point in "$run_dir"/resume/step_*/MANIFEST.json; do # in the order of their names, which is that of the steps
        point=$(basename "$(dirname "$point")")
        if [[ $point != *.* && $point != step_\* ]]; then newest=$point; fi # .passed_over: set aside
    done
    responses=$(find "$run_dir/bank" -name '*.jsonl' -exec cat {} + 2>/dev/null | wc -l) || true
    if ((responses)); then newest+=+$responses; fi
    echo "$newest"
}

record() { # arguments: an attempt and its status
    echo "$1 $2 $(progress)" >>"$memory/attempts"
}

attempts_without_progress() { # print how many in a row, up to the last; those that were stopped from outside say nothing
    local began
    began=$(cat "$memory/began" 2>/dev/null) || began=none
    awk -v newest="$began" '$2 != "stopped" { count = $3 == newest ? count + 1 : 0; newest = $3 }
        END { print count + 0 }' "$memory/attempts"
}

run_has_finished() { # by this job: an older FINISHED is that of a run with fewer steps, which this job prolongs
    local run_dir
    run_dir=$(cat "$memory/run_dir" 2>/dev/null) && [[ $run_dir/FINISHED -nt $memory/run_dir ]]
}

seconds_of() { # print the seconds of a time as Slurm writes it; fail for nothing, which `date` takes for midnight
    [[ ${1:-} == [0-9]* ]] && date -d "$1" +%s 2>/dev/null
}

failed_nodes() { # print those of the nodes $1 that are down, fail or do not answer, or were started after the time $2
    local node state boot
    while read -r node; do
        state=$(scontrol --oneliner show node "$node" 2>/dev/null) || continue
        boot=$(seconds_of "$(grep -o 'BootTime=[^ ]*' <<<"$state" | cut -d= -f2)") || boot=0
        # Not POWERED_DOWN and POWERING_DOWN, where an idle node of a cloud is put to sleep.
        [[ $state =~ State=([^\ ]*) ]] || continue
        if grep -Eqx '(DOWN|FAIL|FAILING|NOT_RESPONDING)[^A-Z_]*|[A-Z_]+\*' <<<"${BASH_REMATCH[1]//+/$'\n'}" ||
            ((boot > $2)); then
            echo "$node"
        fi
    done < <(scontrol show hostnames "$1")
}

exclude() { # add the nodes of standard input to those that this job is not to be given again
    sort -u "$memory/excluded" - >"$memory/excluded.new"
    mv "$memory/excluded.new" "$memory/excluded"
}

is_queued_again() { # whether Slurm counts one more restart than this one, whatever it has answered
    [[ $(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null) =~ Restarts=([0-9]+) ]] && ((BASH_REMATCH[1] > attempt))
}

queue_again() { # an answer may be lost where the controller is busy
    local try
    for ((try = 0; try < 6; try++)); do
        if ((try)); then sleep 10; fi
        if is_queued_again || scontrol requeue "$SLURM_JOB_ID"; then return; fi
    done
    is_queued_again
}

requeue() { # Slurm ends this script while it runs the loop: SIGTERM is caught, SIGKILL comes KillWait later
    local nodes try
    nodes=$(cat "$memory/asked" "$memory/excluded" | paste -sd,) # Slurm keeps one list: those of sbatch would be lost
    if [[ ${1:-} != already ]]; then echo "job $SLURM_JOB_ID is queued again"; fi
    if [[ ${1:-} != already ]] && ! queue_again; then
        echo "$script: Slurm did not queue job $SLURM_JOB_ID again; submit it by the same command" >&2
        exit "$status"
    fi
    if [[ ! -s $memory/excluded ]]; then return; fi
    for ((try = 0; try < 5; try++)); do # what runs here is ended with the attempt, this command too
        if scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$nodes"; then
            echo "queued again without $nodes"
            return
        fi
        sleep 1
    done
    echo "$script: could not exclude $nodes: scontrol update JobId=$SLURM_JOB_ID ExcNodeList=$nodes" >&2
}

# A cancelled job, a job at its time limit and one that Slurm queues again by itself get SIGTERM, here and in the
# tasks. `scancel --batch --signal=TERM` comes here alone: it cancels without KillWait, in the time that saving takes.
# shellcheck disable=SC2317 # called by the trap
pass_on_stop() {
    local state try signal=TERM
    stopped=$((stopped + 1))
    for ((try = 0; try < 3; try++)); do # an answer may be lost where the controller is busy
        # The tasks may have a SIGTERM already, and end at once at a second. SIGUSR1 too asks to save, however often.
        if ((try)); then sleep 2 && signal=USR1; fi
        state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state=RUNNING signal=USR1
        if [[ $state != RUNNING ]] || scancel "--signal=$signal" "$SLURM_JOB_ID"; then return 0; fi
    done
    echo "$script: could not tell the tasks to save: scancel --signal=USR1 $SLURM_JOB_ID" >&2
}

look_back() { # at the attempt before this one
    local last
    if run_has_finished; then
        echo "job $SLURM_JOB_ID (restart $attempt): the run had finished before the job was queued again: nothing to do"
        rm -rf "$memory"
        exit 0
    fi
    last=$(tail -n 1 "$memory/attempts" | cut -d' ' -f1)
    if [[ -f $memory/nodes && $last != $((attempt - 1)) ]]; then # it has not written how it ended
        failed_nodes "$(cat "$memory/nodes")" "$(stat -c %Y "$memory/nodes")" | exclude
        record $((attempt - 1)) lost
    fi
}

leave_failed_nodes() { # queue the job again if it was given such nodes
    status=75
    if grep -qxFf "$memory/excluded" <(echo "$hosts"); then
        echo "got nodes that failed before: $(grep -xFf "$memory/excluded" <(echo "$hosts") | paste -sd,)"
        requeue
        exit 0
    fi
}

note_end_of_job() { # ranks in a container cannot ask Slurm how much time is left
    local ends left
    if [[ -z ${SLURM_JOB_END_TIME:-} ]]; then
        ends=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e) || ends=
        if ends=$(seconds_of "$ends") && ((ends > EPOCHSECONDS)); then export SLURM_JOB_END_TIME=$ends; fi
    fi
    left=$((${SLURM_JOB_END_TIME:-0} - EPOCHSECONDS))
    if ((left > 0 && left < 720)); then
        echo "$script: this job ends in $left s. Unless --signal says otherwise, the ranks are told to save 600 s before" \
            "the end, and they stop by themselves checkpoint.seconds_before_end before it: give a longer --time" >&2
    fi
}

wait_for_tasks() { # argument: process of srun. Sets status
    local before result decided
    status=
    while :; do # a signal interrupts wait, not srun; a second 127: that status has been handed out before
        before=$stopped result=0
        wait "$1" || result=$?
        if ((result != 127)) || [[ -z $status ]]; then status=$result; fi
        if [[ $stopped == "$before" ]]; then break; fi
    done
    for decided in 2 4; do
        if ((status)) && head -qn 1 "$memory"/exit.* 2>/dev/null | grep -qx "$decided"; then
            status=$decided
            break
        fi
    done
}

decide() { # what follows from the status of the tasks
    local reason failures
    reason=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%r) || reason=
    echo "job $SLURM_JOB_ID (restart $attempt): srun ended with $status, SIGTERM received: $stopped"
    if ((status)) && run_has_finished; then # a crash or a lost node while the processes were ending
        echo "the run had finished; srun ended with $status"
        status=0
    fi
    case $status in
    0)
        if ((!stopped)); then rm -rf "$memory"; fi # else Slurm may have queued the job again, which then looks there
        exit 0
        ;;
    2 | 4 | 126 | 127 | 130) exit "$status" ;; # another attempt would end in the same way. 127: no srun, no megarlhf
    esac
    if ((stopped)) && [[ $reason != TimeLimit ]]; then # cancelled: stays so. Or Slurm has queued it again
        record "$attempt" stopped
        failed_nodes "$SLURM_JOB_NODELIST" "$EPOCHSECONDS" | exclude
        if [[ -s $memory/excluded ]]; then requeue already; fi
        exit "$status"
    fi
    record "$attempt" "$status"
    failures=$(attempts_without_progress)
    if ((failures >= max_attempts)); then
        echo "$script: $failures attempts in a row ended without a newer resume point or response (newest:" \
            "$(progress)), the last with status $status: not queued again. $memory/attempts lists them;" \
            "when the cause is removed, submit the job again by the same command" >&2
        exit "$status"
    fi
    if ((status != 75)); then failed_nodes "$SLURM_JOB_NODELIST" "$EPOCHSECONDS" | exclude; fi
    requeue
    exit 0
}
