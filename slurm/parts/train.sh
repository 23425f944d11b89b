
# Runs that must have finished before this one starts: names of their directories, separated by colons.
IFS=: read -ra earlier_runs <<<"${MEGARLHF_AFTER:-}"
for run in "${earlier_runs[@]}"; do
    if [[ ! -f $run/FINISHED ]]; then
        die "MEGARLHF_AFTER names $run, but $run/FINISHED is not there: that run has not finished. Its checkpoints" \
            "may be of any step; let it end first"
    fi
done

# ---- the life of a job -------------------------------------------------------------------------------------
# What this job has to remember from one attempt to the next, where it was submitted; removed when the run has ended well.
#   run_dir     written by the first rank at each launch: the run's directory
#   began       written by the first rank at the first launch: the progress that it found
#   exit.RANK   status and message of a rank that ended with 2 or 4, which srun hides behind that of a killed rank
#   attempts    RESTART STATUS PROGRESS, a line for each attempt that has ended. PROGRESS: the newest resume point, and
#               after a + how many lines the rollout bank has
#   nodes       nodes of the attempt that runs;   excluded   nodes that failed;   asked   those of sbatch --exclude
attempt=${SLURM_RESTART_COUNT:-0}
memory=${SLURM_SUBMIT_DIR:-$PWD}/${SLURM_JOB_NAME:-@NAME@}-$SLURM_JOB_ID.state
mkdir -p "$memory"
export MEGARLHF_JOB_STATE=$memory
touch "$memory/attempts" "$memory/excluded"
if [[ ! -f $memory/asked ]]; then
    scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | grep -o ' ExcNodeList=[^ (]*' | cut -d= -f2 |
        sed '/^$/d' >"$memory/asked" || true
fi
rm -f "$memory"/exit.*
max_attempts=${MEGARLHF_MAX_ATTEMPTS:-3}
if [[ ! $max_attempts =~ ^[1-9][0-9]*$ ]]; then
    die "got MEGARLHF_MAX_ATTEMPTS=$max_attempts; expected a number from 1 on"
fi

progress() { # the newest resume point, and how many responses the rollout bank has beyond it
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

record() { # of an attempt: its status, and how far the run has come
    echo "$1 $2 $(progress)" >>"$memory/attempts"
}

attempts_without_progress() { # in a row, up to the last; those that were stopped from outside say nothing
    local began
    began=$(cat "$memory/began" 2>/dev/null) || began=none
    awk -v newest="$began" '$2 != "stopped" { count = $3 == newest ? count + 1 : 0; newest = $3 }
        END { print count + 0 }' "$memory/attempts"
}

run_has_finished() { # by this job: an older FINISHED is that of a run with fewer steps, which this job prolongs
    local run_dir
    run_dir=$(cat "$memory/run_dir" 2>/dev/null) && [[ $run_dir/FINISHED -nt $memory/run_dir ]]
}

seconds_of() { # of a time as Slurm writes it; not of nothing, which `date` takes for midnight
    [[ ${1:-} == [0-9]* ]] && date -d "$1" +%s 2>/dev/null
}

failed_nodes() { # of the nodes $1: those that are down, fail or do not answer, and those started after the time $2
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
    if [[ ${1:-} != already ]] && ! queue_again; then
        echo "@NAME@.sbatch: Slurm did not queue job $SLURM_JOB_ID again; submit it by the same command" >&2
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
    echo "@NAME@.sbatch: could not exclude $nodes: scontrol update JobId=$SLURM_JOB_ID ExcNodeList=$nodes" >&2
}

# A cancelled job, a job at its time limit and one that Slurm queues again by itself get SIGTERM, here and in the
# tasks. `scancel --batch --signal=TERM` comes here alone: it cancels without KillWait, in the time that saving takes.
stopped=0
trap stop TERM
# shellcheck disable=SC2317 # called by the trap
stop() {
    local state try signal=TERM
    stopped=$((stopped + 1))
    for ((try = 0; try < 3; try++)); do # an answer may be lost where the controller is busy
        # The tasks may have a SIGTERM already, and end at once at a second. SIGUSR1 too asks to save, however often.
        if ((try)); then sleep 2 && signal=USR1; fi
        state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) || state=RUNNING signal=USR1
        if [[ $state != RUNNING ]] || scancel "--signal=$signal" "$SLURM_JOB_ID"; then return 0; fi
    done
    echo "@NAME@.sbatch: could not tell the tasks to save: scancel --signal=USR1 $SLURM_JOB_ID" >&2
}

if ((attempt)); then
    if run_has_finished; then
        echo "job $SLURM_JOB_ID (restart $attempt): the run had finished before the job was queued again: nothing to do"
        rm -rf "$memory"
        exit 0
    fi
    last=$(tail -n 1 "$memory/attempts" | cut -d' ' -f1)
    if [[ -f $memory/nodes && $last != $((attempt - 1)) ]]; then # the attempt before has not written how it ended
        failed_nodes "$(cat "$memory/nodes")" "$(stat -c %Y "$memory/nodes")" | exclude
        record $((attempt - 1)) lost
    fi
fi
status=75
if grep -qxFf "$memory/excluded" <(echo "$hosts"); then
    echo "got nodes that failed before: $(grep -xFf "$memory/excluded" <(echo "$hosts") | paste -sd,)"
    requeue
    exit 0
fi
echo "$SLURM_JOB_NODELIST" >"$memory/nodes"

if [[ -z ${SLURM_JOB_END_TIME:-} ]]; then # so that ranks in a container know too how much time is left
    ends=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e) || ends=
    if ends=$(seconds_of "$ends") && ((ends > EPOCHSECONDS)); then export SLURM_JOB_END_TIME=$ends; fi
fi

left=$((${SLURM_JOB_END_TIME:-0} - EPOCHSECONDS))
if ((left > 0 && left < 720)); then
    echo "@NAME@.sbatch: this job ends in $left s, and the ranks are told to save 600 s before the end if --signal was not" \
        "given: they have next to no time to train. Give a longer --time, or as --signal=USR1@60 the seconds they need" >&2
fi

echo "job $SLURM_JOB_ID (restart $attempt) on $SLURM_JOB_NODELIST, ${SLURM_NTASKS:-?} tasks," \
    "rendezvous $MASTER_ADDR:$MASTER_PORT: megarlhf @COMMAND@ $*"

if ((stopped)); then # cancelled, or queued again by Slurm, before there was a task to be told
    record "$attempt" stopped
    exit 143
fi
srun "${srun_args[@]}" "${launcher[@]}" megarlhf @COMMAND@ "$@" &
step=$!
status=
while :; do # a signal interrupts wait, not srun; a second 127: that status has been handed out before
    before=$stopped result=0
    wait "$step" || result=$?
    if ((result != 127)) || [[ -z $status ]]; then status=$result; fi
    if [[ $stopped == "$before" ]]; then break; fi
done
for decided in 2 4; do
    if ((status)) && head -qn 1 "$memory"/exit.* 2>/dev/null | grep -qx "$decided"; then
        status=$decided
        break
    fi
done

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
    echo "@NAME@.sbatch: $failures attempts in a row ended without a newer resume point or response (newest:" \
        "$(progress)), the last with status $status: not queued again. $memory/attempts lists them;" \
        "when the cause is removed, submit the job again by the same command" >&2
    exit "$status"
fi
if ((status != 75)); then failed_nodes "$SLURM_JOB_NODELIST" "$EPOCHSECONDS" | exclude; fi
requeue
exit 0
