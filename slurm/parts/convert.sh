
# The task's line of the file, in the words of a shell: quotes keep spaces, nothing is run or expanded.
line=$(sed -n "${SLURM_ARRAY_TASK_ID:-1}p" "$1") || die "cannot read $1"
line=${line%$'\r'} # of a file from Windows: it would be part of the last word, a directory's name
if [[ -z $line || $line == \#* ]]; then
    die "line ${SLURM_ARRAY_TASK_ID:-1} of $1 is empty, a comment or not there; give a conversion in each line of" \
        "--array, of the file's $(grep -c '' "$1")"
fi
text=$(xargs -n 1 printf '%s\n' <<<"$line") || die "line ${SLURM_ARRAY_TASK_ID:-1} of $1 cannot be read: $line"
mapfile -t words <<<"$text"
echo "job $SLURM_JOB_ID, line ${SLURM_ARRAY_TASK_ID:-1} of $1: megarlhf convert ${words[*]}"
exec srun "${srun_args[@]}" "${launcher[@]}" megarlhf convert "${words[@]}"
