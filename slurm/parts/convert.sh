
# The task's line of the file, in the words of a shell: quotes keep spaces, nothing is run or expanded.
line=$(sed -n "${SLURM_ARRAY_TASK_ID:-1}p" "$1") || die "cannot read $1"
if [[ -z $line ]]; then die "$1 has no line ${SLURM_ARRAY_TASK_ID:-1}; submit with --array=1-$(wc -l <"$1")"; fi
mapfile -t words < <(xargs -n 1 printf '%s\n' <<<"$line")
echo "job $SLURM_JOB_ID, line ${SLURM_ARRAY_TASK_ID:-1} of $1: megarlhf convert ${words[*]}"
exec srun "${srun_args[@]}" "${launcher[@]}" megarlhf convert "${words[@]}"
