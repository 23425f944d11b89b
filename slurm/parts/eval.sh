
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, ${SLURM_NTASKS:-?} tasks: megarlhf @COMMAND@ $*"
exec srun "${srun_args[@]}" "${launcher[@]}" megarlhf @COMMAND@ "$@"
