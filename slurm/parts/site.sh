
# ---- the cluster's own part (optional) ---------------------------------------------------------------------
# Everything that differs between clusters goes into one script of yours, sourced here when MEGARLHF_ENV names
# it. It may load modules, activate a virtual environment, set NCCL's variables, put another MASTER_ADDR (a
# name on the fast network), and change two arrays. Containers see shared directories under their own names:
#
#     module load cuda && source /shared/venv/bin/activate
#     export NCCL_SOCKET_IFNAME=ib0
#     srun_args+=(--container-image=/shared/megarlhf.sqsh --container-mounts=/shared --container-workdir="$PWD") # pyxis
#     launcher=(apptainer exec --nv --bind /shared --pwd "$PWD" /shared/megarlhf.sif)                        # apptainer
if [[ -n ${MEGARLHF_ENV:-} ]]; then
    set +u # modules and activation scripts read unset variables
    trap 'echo "@NAME@.sbatch: MEGARLHF_ENV = $MEGARLHF_ENV ended the job with status $?; it is sourced: no exit" >&2' EXIT
    # shellcheck source=/dev/null
    source "$MEGARLHF_ENV" || {
        trap - EXIT
        die "MEGARLHF_ENV = $MEGARLHF_ENV ended with status $?; let its last command succeed"
    }
    if [[ $(trap -p EXIT) == *MEGARLHF_ENV* ]]; then trap - EXIT; fi
    set -u
fi
export MEGARLHF_DIRECTORY=$PWD # a task that works elsewhere, as in a container, would take relative paths for others
# ------------------------------------------------------------------------------------------------------------
