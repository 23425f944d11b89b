
# Rendezvous: the first host of the job, and a port below the ephemeral range that follows from the job's id,
# so that two jobs on a node differ. A rank finds itself by SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS; what the shell
# that submitted the job had exported for another launcher is not meant for it.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
