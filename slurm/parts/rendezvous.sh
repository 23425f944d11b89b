
# Rendezvous: the first host of the job, and a port below the ephemeral range that follows from the job's id,
# so that two jobs on a node differ. A rank finds itself by SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
