
# ---- the cluster's own part (optional) ---------------------------------------------------------------------
# Everything that differs between clusters goes into one script of yours, sourced here when MEGARLHF_ENV names
# it. It may load modules, activate a virtual environment, set NCCL's variables, put another MASTER_ADDR (a
# name on the fast network), and change two arrays. Containers see shared directories under their own names:
#
#     module load cuda && source /shared/venv/bin/activate
#     export NCCL_SOCKET_IFNAME=ib0
#     srun_args+=(--container-image=/shared/megarlhf.sqsh --container-mounts=/shared)    # enroot and pyxis
#     launcher=(apptainer exec --nv --bind /shared /shared/megarlhf.sif)                 # apptainer
if [[ -n ${MEGARLHF_ENV:-} ]]; then
    set +u # modules and activation scripts read unset variables
    # shellcheck source=/dev/null
    source "$MEGARLHF_ENV" || die "MEGARLHF_ENV = $MEGARLHF_ENV ended with status $?; let its last command succeed"
    set -u
fi
# ------------------------------------------------------------------------------------------------------------
