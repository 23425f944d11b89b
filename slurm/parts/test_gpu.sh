
# The checks run one after the other, each with ranks of its own: this script starts them, and a step of the job for
# each. The Python that stands here needs megarlhf's environment, as the tasks do.
directory=$1
shift
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: the first hour, into $directory"
words=$(printf '%q ' srun "${srun_args[@]}" "${launcher[@]}")
exec "${MEGARLHF_PYTHON:-python3}" -m tools.gpu_check --out "$directory" --srun "$words" "$@"
