"""slurm/train.sbatch with stand-ins for srun and scontrol: what reaches the tasks.

Not covered: Slurm itself (marker `slurm`), and the clusters' own scripts.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "slurm" / "train.sbatch"

SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames node[07-08]" ]] || { echo "unexpected: scontrol $*" >&2; exit 1; }
printf '%s\\n' node07 node08
"""

# Writes down its own options, then starts the command once for each task, as srun does.
SRUN = """#!/usr/bin/env bash
while [[ ${1:-} == -* ]]; do printf '%s\\0' "$1" >>"$RECORD/srun"; shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_STEP_ID=0 "$@" || exit
done
"""

MEGARLHF = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$RECORD/argv.$SLURM_PROCID"
env -0 >"$RECORD/env.$SLURM_PROCID"
exit "${TASK_STATUS:-0}"
"""

JOB = {
    "SLURM_JOB_ID": "412345",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "2",
}


@pytest.fixture
def submit(tmp_path):
    """Run the script as Slurm would; returns (the finished process, the folder of records)."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    folder.mkdir()
    record.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("megarlhf", MEGARLHF)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    base = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RECORD": str(record), "HOME": str(tmp_path)}

    def run(*arguments, **environ):
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.run(command, env=base | JOB | environ, capture_output=True, text=True), record

    return run


def words(path):
    return path.read_bytes().decode().split("\0")[:-1]


def environment(path):
    return dict(entry.split("=", 1) for entry in words(path))


def test_every_task_gets_the_command_line_and_the_rendezvous(submit):
    """The port: 10000 + 412345 mod 20000 = 22345. An argument with a space stays one argument."""
    arguments = ["rl", "-c", "configs/x.yaml", "run.dir=/data/my runs", "train.num_steps=3"]
    done, record = submit(*arguments)
    assert done.returncode == 0, done.stderr
    for task in ("0", "1"):
        assert words(record / f"argv.{task}") == arguments
        env = environment(record / f"env.{task}")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node07", "22345")
        assert (env["SLURM_PROCID"], env["SLURM_NTASKS"]) == (task, "2")
        assert env["OMP_NUM_THREADS"] == "1"
    assert words(record / "srun") == ["--kill-on-bad-exit=1", "--label"]
    assert "rendezvous node07:22345: megarlhf rl -c configs/x.yaml" in done.stdout


def test_a_rendezvous_left_over_from_the_login_node_is_not_used(submit):
    done, record = submit("sft", MASTER_ADDR="login1", MASTER_PORT="1")
    assert done.returncode == 0, done.stderr
    env = environment(record / "env.0")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node07", "22345")


def test_what_the_job_asks_for_unless_told_otherwise():
    """Whole nodes, cores beside each GPU, and no start anew from step 0 after a failed node: Slurm's own default may be
    to queue a job again. Not covered: a Slurm that reads it."""
    lines = [line.split() for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    asked = dict(option.partition("=")[::2] for _, option in lines)
    assert asked == {
        "--job-name": "megarlhf",
        "--nodes": "1",
        "--ntasks-per-node": "8",
        "--gpus-per-node": "8",
        "--cpus-per-task": "8",
        "--mem": "0",
        "--exclusive": "",
        "--output": "%x-%j.out",
        "--open-mode": "append",
        "--no-requeue": "",
    }


def test_cores_per_task_reach_srun_and_openmp(submit):
    """srun no longer takes --cpus-per-task over from sbatch by itself."""
    done, record = submit("sft", SLURM_CPUS_PER_TASK="6")
    assert done.returncode == 0, done.stderr
    env = environment(record / "env.1")
    assert (env["SRUN_CPUS_PER_TASK"], env["OMP_NUM_THREADS"]) == ("6", "6")


def test_the_clusters_script_changes_environment_options_and_launcher(submit, tmp_path):
    script = tmp_path / "cluster.sh"
    script.write_text(
        'echo "$UNSET_BY_ANYONE"\nexport NCCL_SOCKET_IFNAME=ib0 MASTER_ADDR="$MASTER_ADDR-ib"\n'
        "srun_args+=(--container-image=image.sqsh)\nlauncher=(env WRAPPED=yes)\n"
    )
    done, record = submit("rm", "-c", "x.yaml", MEGARLHF_ENV=str(script))
    assert done.returncode == 0, done.stderr
    env = environment(record / "env.1")
    assert (env["NCCL_SOCKET_IFNAME"], env["MASTER_ADDR"], env["WRAPPED"]) == ("ib0", "node07-ib", "yes")
    assert words(record / "srun")[-1] == "--container-image=image.sqsh"
    assert words(record / "argv.1") == ["rm", "-c", "x.yaml"]


def test_a_failing_task_fails_the_job(submit):
    done, record = submit("sft", TASK_STATUS="3")
    assert done.returncode == 3
    assert (record / "argv.0").exists()


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ((), {}, "got no command"),
        (("sft",), {"SLURM_JOB_ID": ""}, "start it with sbatch"),
        (("sft",), {"SLURM_JOB_NODELIST": "other"}, "unexpected: scontrol show hostnames other"),
        (("sft",), {"MEGARLHF_ENV": "/does/not/exist"}, "/does/not/exist"),
    ],
)
def test_a_wrong_start_fails_before_any_task(submit, arguments, environ, message):
    done, record = submit(*arguments, **environ)
    assert done.returncode != 0
    assert message in done.stderr
    assert list(record.iterdir()) == []


def test_syntax():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    scripts = [str(SCRIPT), str(ROOT / ".ci" / "run")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0
