#!/usr/bin/env bash
# SFT, then a reward model, then PPO, as three jobs that wait for each other:
#
#     slurm/pipeline.sh runs/math configs/sft.yaml configs/rm.yaml configs/ppo.yaml --nodes=2 --time=8:00:00
#
# The runs go to runs/math/sft, runs/math/rm and runs/math/rl, whatever the files say, and a stage starts from the
# models of those before it. What follows the three files is given to every sbatch. A stage begins when the job
# before it has ended with 0 (a job that is queued again has not ended) and when that run has written FINISHED.
# After a stage has failed, the same command submits the stages that have not finished.
set -euo pipefail

if (($# < 4)); then
    echo "pipeline.sh: got $# arguments; expected: slurm/pipeline.sh DIRECTORY SFT_FILE RM_FILE RL_FILE [sbatch's options]" >&2
    exit 2
fi
out=$1 sft=$2 rm=$3 rl=$4
options=("${@:5}")
for option in "${options[@]}"; do
    case $option in
    --dependency* | -d* | --export | --export=*)
        if [[ $option != --export=ALL* ]]; then
            echo "pipeline.sh: got $option; the stages need dependencies and an environment of their own. Give" \
                "--export=ALL,NAME=VALUE for a variable, and submit pipeline.sh when earlier jobs have ended" >&2
            exit 2
        fi
        ;;
    esac
    if [[ $option =~ ^[a-z_.]+= ]]; then
        echo "pipeline.sh: got $option; expected sbatch's options behind the three files. Put it into the stage's file" >&2
        exit 2
    fi
done
scripts=$(dirname "${BASH_SOURCE[0]}")
for file in "$sft" "$rm" "$rl"; do
    if [[ ! -f $file ]]; then
        echo "pipeline.sh: $file is not there; name a configuration" >&2
        exit 2
    fi
done
if [[ $out == *:* ]]; then
    echo "pipeline.sh: got the directory $out; a colon separates names in MEGARLHF_AFTER: give one without" >&2
    exit 2
fi

job= # the one submitted last
stage() { # COMMAND CONFIGURATION OVERRIDES...; $MEGARLHF_AFTER: the runs that must have finished before
    if [[ -f $out/$1/FINISHED ]]; then
        echo "$1: not submitted, because $out/$1/FINISHED is there: the run has finished"
        return
    fi
    local wait=() after=
    if [[ -n $job ]]; then
        wait=("--dependency=afterok:$job" --kill-on-invalid-dep=yes)
        after=", after job $job"
    fi
    job=$(sbatch --parsable "--job-name=megarlhf-$1" "${wait[@]}" "${options[@]}" "$scripts/run.sbatch" "$1" -c "$2" \
        "run.dir=$out/$1" "${@:3}")
    echo "$1: job $job$after"
}

actor=$out/sft/checkpoints/latest/actor
reward_model=$out/rm/checkpoints/latest/reward_model
stage sft "$sft"
MEGARLHF_AFTER=$out/sft stage rm "$rm" "reward_model.model.path=$actor"
MEGARLHF_AFTER=$out/sft:$out/rm stage rl "$rl" "actor.model.path=$actor" "critic.model.path=$reward_model" \
    "reward_model.model.path=$reward_model"
