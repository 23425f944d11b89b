set -euo pipefail

die() { # the user's mistake: said, and never queued again
    echo "@NAME@.sbatch: $*" >&2
    exit 2
}
if (($# == 0)); then die "got no arguments; expected: sbatch slurm/@NAME@.sbatch @USAGE@"; fi
if [[ -z ${SLURM_JOB_ID:-} || -z ${SLURM_JOB_NODELIST:-} ]]; then
    die "SLURM_JOB_ID and SLURM_JOB_NODELIST are not set; start it with sbatch"
fi

# Since Slurm 22.05 srun does not take --cpus-per-task over from sbatch; without this a task gets one core.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi
# More threads than cores spin: one thread a task, unless the job asked for more cores a task.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
export SLURM_EXPORT_ENV=ALL # with `sbatch --export=X` srun would pass on X alone, and nothing of what follows here
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1

# When one task has ended, the others have a minute to end by themselves; then they are killed. With
# --kill-on-bad-exit=1 the first task that leaves after saving would kill those that still save, and srun would
# return 137 in place of the status of the run.
srun_args=(--kill-on-bad-exit=0 --wait=60 --label)
launcher=()
