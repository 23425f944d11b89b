"""The batch scripts with stand-ins for Slurm's programs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "slurm"

SQUEUE = """#!/usr/bin/env bash
echo "${*: -1}" | sed "s/.*%e/${JOB_ENDS-2100-01-01T23:00:00}/; s/.*%r/None/"
"""

SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "requeue 412345" ]] && {
    echo yes >>"$RECORD/requeued"
    [[ $(wc -l <"$RECORD/requeued") -gt ${REQUESTS_LOST:-0} ]] || { echo "Unexpected message received" >&2; exit 1; }
    exit
}
[[ "$*" == "--oneliner show job 412345" ]] && {
    [[ -z ${UNDERSTOOD:-} || ! -s $RECORD/requeued ]]
    echo "JobId=412345 Restarts=$? ExcNodeList=${ASKED:-(null)} BatchFlag=1 Command=$SCRIPT -c x WorkDir=/"
    exit
}
[[ "$*" == "--oneliner show node"* ]] && { echo "NodeName=${*: -1} State=${NODE_STATE:-IDLE} BootTime=None"; exit; }
[[ "$*" == "update JobId=412345 Requeue=0" ]] && { echo no >"$RECORD/requeue"; exit; }
[[ "$*" == "update JobId=412345 ExcNodeList="* ]] && { echo "$3" >"$RECORD/excluded"; exit; }
[[ "$*" == "show hostnames node[07-08]" ]] || { echo "unexpected: scontrol $*" >&2; exit 1; }
printf '%s\\n' node07 node08
"""

# Writes down its own options, then starts the command once for each task, as srun does.
SRUN = """#!/usr/bin/env bash
while [[ ${1:-} == -* ]]; do printf '%s\\0' "$1" >>"$RECORD/srun"; shift; done
[[ -z ${STOPPED:-} ]] || kill -TERM "$PPID"
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_STEP_ID=0 "$@" || exit
done
"""

MEGARLHF = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$RECORD/argv.$SLURM_PROCID"
env -0 >"$RECORD/env.$SLURM_PROCID"
said=$MEGARLHF_JOB_STATE/exit.$SLURM_PROCID
[[ -z ${TASK_SAYS:-} ]] || printf '%s\\nwhat is wrong\\n' "$TASK_SAYS" >"$said"
[[ -z ${RUN_DIR:-} ]] || echo "$RUN_DIR" >"$MEGARLHF_JOB_STATE/run_dir"
[[ -z ${RUN_FINISHES:-} ]] || { sleep 0.05; touch "$RUN_DIR/FINISHED"; }
exit "${TASK_STATUS:-0}"
"""

JOB = {"SLURM_JOB_ID": "412345", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_NTASKS": "2"}


@pytest.fixture
def submit(tmp_path):
    """Run the script as Slurm would; returns (the finished process, the folder of records)."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    folder.mkdir()
    record.mkdir()
    for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE), ("srun", SRUN), ("megarlhf", MEGARLHF)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "sleep").write_text('#!/bin/sh\necho "$@" >>"$RECORD/slept"\nexec /bin/sleep 0.05\n')
    (folder / "sleep").chmod(0o755)
    base = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RECORD": str(record), "HOME": str(tmp_path)}
    base |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "job"}

    def run(*arguments, script="run", **environ):
        """Slurm runs a copy of the script."""
        original, copy = SLURM / f"{script}.sbatch", tmp_path / "slurm_script"
        shutil.copy(original, copy)
        env = base | JOB | {"SCRIPT": str(original)} | environ
        return subprocess.run(["bash", str(copy), *arguments], env=env, capture_output=True, text=True), record

    return run
