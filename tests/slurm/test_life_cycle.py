"""The batch scripts under a real Slurm of two nodes, with a program in place of megarlhf: what is queued again, what is
not, and where.

Not covered: a Slurm with control groups or accounting, and containers.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.refuses import missing_names
from tests.slurm.cluster import CPU, ENDED, KILL_WAIT, Cluster, missing, output, running_cluster

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "slurm"

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def work(cluster, tmp_path) -> Iterator[Path]:
    """The directory that jobs are submitted from; `bin/megarlhf` is the stand-in."""
    program = tmp_path / "bin" / "megarlhf"
    program.parent.mkdir()
    stand_in = Path(__file__).with_name("stand_in.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    program.chmod(0o755)
    site = f"export PATH={program.parent}:$PATH MASTER_ADDR=127.0.0.1\nsrun_args+=(--wait=4)\n"
    (tmp_path / "site.sh").write_text(site)
    yield tmp_path
    cluster.call("scancel", "--user=root")  # also after a failure: the next test gets free nodes


def submit(cluster: Cluster, work: Path, *arguments: str, command: str = "sft", nodes: int = 2, **environ: str) -> int:
    """`sbatch slurm/run.sbatch COMMAND -c x.yaml run.dir=run ARGUMENTS`; what begins with `--` goes to sbatch."""
    options = [f"--nodes={nodes}", *CPU, *(word for word in arguments if word.startswith("--"))]
    words = [word for word in arguments if not word.startswith("--")]
    environ = {"MEGARLHF_ENV": str(work / "site.sh")} | environ
    words = [str(SLURM / "run.sbatch"), command, "-c", "x.yaml", f"run.dir={work}/run", *words]
    return cluster.submit(*options, *words, cwd=work, **environ)


def log(work: Path, run: str = "run") -> list[str]:
    path = work / run / "log"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def state(work: Path, job: int) -> list[Path]:
    return list(work.glob(f"*-{job}.state"))


def until(condition: str, work: Path, seconds: float = 30) -> None:
    """Until a line of the log contains `condition`."""
    deadline = time.monotonic() + seconds
    while not any(condition in line for line in log(work)):
        assert time.monotonic() < deadline, f"no {condition!r} in {log(work)}"
        time.sleep(0.1)


def test_a_job_on_two_nodes_ends_and_leaves_nothing_behind(cluster, work) -> None:
    job = submit(cluster, work, "steps=1")
    assert cluster.wait(job, ENDED, 60) == "COMPLETED", output(work, job)
    one, two = cluster.nodes
    assert log(work)[0] == f"restart 0 rank 0: sft begins at step 0 on {one}"
    assert f"restart 0 rank 1: sft begins at step 0 on {two}" in log(work)
    assert state(work, job) == []


def test_a_time_limit_saves_and_queues_the_job_again(cluster, work) -> None:
    """The signal comes from Slurm, before the limit; the ranks leave a second apart and srun returns 75."""
    job = submit(cluster, work, "--time=2", "--signal=USR1@60", "steps=1000")
    begun = time.monotonic()
    until("restart 0 rank 1: sft saved", work, 90)
    assert time.monotonic() - begun < 100, "after the limit"
    cluster.wait(job, ["RUNNING"], 60, until=lambda: cluster.job(job)["Restarts"] == "1")
    until("restart 1 rank 1: sft begins", work)
    saved = next(line for line in log(work) if "rank 0: sft saved" in line)
    assert "after SIGUSR1" in saved
    step = saved.split()[7]
    assert any(f"restart 1 rank 0: sft begins at step {step} " in line for line in log(work)), log(work)
    assert "srun ended with 75, SIGTERM received: 0" in output(work, job)


@pytest.mark.parametrize("how", [(), ("--batch", "--signal=TERM")], ids=["scancel", "scancel --batch"])
def test_a_cancelled_job_saves_and_stays_cancelled(cluster, work, how) -> None:
    """The first way gives the ranks KillWait seconds, the second as many as they need."""
    job = submit(cluster, work, "steps=100")
    until("rank 1: sft begins", work)
    cluster.call("scancel", *how, str(job))
    assert cluster.wait(job, ENDED, 60) == ("FAILED" if how else "CANCELLED")
    deadline = time.monotonic() + KILL_WAIT
    while "SIGTERM received" not in output(work, job) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [line for line in log(work) if "rank 0: sft saved" in line and "after SIGTERM" in line], log(work)
    assert "srun ended with 75" in output(work, job), output(work, job)
    time.sleep(2)
    assert cluster.job(job)["Restarts"] == "0"


def test_a_killed_task_ends_the_attempt_and_the_job_goes_on(cluster, work) -> None:
    """Rank 1 is killed and rank 0 hangs, as in a collective: it is ended, and the second attempt resumes."""
    job = submit(cluster, work, "every_step=yes", "steps=6", "do=kill@0.3.1", "do=hang@0.4.0")
    assert cluster.wait(job, ENDED, 90) == "COMPLETED", output(work, job)
    assert cluster.job(job)["Restarts"] == "1"
    assert "srun ended with 137" in output(work, job)
    assert [line for line in log(work) if "restart 1 rank 0: sft begins at step 3" in line], log(work)


def test_a_crash_loop_is_stopped_and_progress_is_not(cluster, work) -> None:
    """Crashes in step 2 of every attempt. Attempt 0 comes from no resume point to step 1, which is progress; the
    next two do not advance, and with a limit of two the job ends."""
    job = submit(cluster, work, "every_step=yes", "steps=6", "do=exit:1@*.2.0", MEGARLHF_MAX_ATTEMPTS="2")
    assert cluster.wait(job, ("FAILED",), 90) == "FAILED", output(work, job)
    facts = cluster.job(job)
    assert (facts["Restarts"], facts["ExitCode"]) == ("2", "1:0")
    assert not missing_names(output(work, job), "2 attempts in a row", "newest: step_000001")


def test_a_job_that_advances_is_never_stopped(cluster, work) -> None:
    """One step in each of four attempts, with a limit of one."""
    deeds = [f"do=exit:1@{attempt}.{attempt + 2}.{rank}" for attempt in range(4) for rank in (0, 1)]
    job = submit(cluster, work, "every_step=yes", "steps=6", *deeds, MEGARLHF_MAX_ATTEMPTS="1")
    assert cluster.wait(job, ENDED, 120) == "COMPLETED", output(work, job)
    assert cluster.job(job)["Restarts"] == "4"


@pytest.mark.parametrize("status", ["2", "4"])
def test_a_mistake_and_bad_numbers_are_not_tried_again(cluster, work, status) -> None:
    """Rank 1 ends with the status and rank 0 hangs: srun says 137, the job's status is the rank's."""
    job = submit(cluster, work, "steps=6", f"do=exit:{status}@0.1.1", "do=hang@0.1.0")
    assert cluster.wait(job, ENDED, 60) == "FAILED"
    assert cluster.job(job)["ExitCode"] == f"{status}:0"
    assert cluster.job(job)["Restarts"] == "0"
    assert "srun ended with" in output(work, job)


def test_the_watchdog_is_tried_again(cluster, work) -> None:
    job = submit(cluster, work, "steps=2", "do=exit:3@0.1.0", "do=exit:3@0.1.1")
    assert cluster.wait(job, ENDED, 60) == "COMPLETED", output(work, job)
    assert "srun ended with 3," in output(work, job)
    assert cluster.job(job)["Restarts"] == "1"


def test_a_drained_node_is_left_at_the_next_start(cluster, work) -> None:
    """Slurm lets a job on a drained node go on; queued again, the job comes to the other one."""
    job = submit(cluster, work, "every_step=yes", "steps=100", nodes=1)
    until("rank 0: sft begins", work)
    node = cluster.job(job)["NodeList"]
    cluster.call("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    try:
        cluster.call("scancel", "--signal=USR1", str(job))
        cluster.wait(job, ["RUNNING"], 60, until=lambda: cluster.job(job)["Restarts"] == "1")
        assert cluster.job(job)["NodeList"] == next(name for name in cluster.nodes if name != node)
        until("restart 1 rank 0: sft begins", work)
    finally:
        cluster.call("scontrol", "update", f"NodeName={node}", "State=RESUME")


def test_three_stages_run_one_after_the_other(cluster, work) -> None:
    """sft is interrupted and queued again; rm waits for the end of it, rl for both."""
    for name in ("sft", "rm", "rl"):
        (work / f"{name}.yaml").touch()
    (work / "site.sh").open("a").write(
        'words=steps=3; if [[ $SLURM_JOB_NAME == *sft ]]; then words+=" do=kill@0.2.0"; fi\n'
        'launcher=(bash -c "exec \\"\\$@\\" $words" task)\n'
    )
    arguments = [str(SLURM / "pipeline.sh"), f"{work}/runs", "sft.yaml", "rm.yaml", "rl.yaml", "--nodes=1", *CPU]
    environ = cluster.environment | {"MEGARLHF_ENV": str(work / "site.sh")}
    said = cluster.call(*arguments, cwd=work, env=environ)
    jobs = [int(line.split()[2].rstrip(",")) for line in said.splitlines()]
    for job in jobs:
        assert cluster.wait(job, ENDED, 90) == "COMPLETED", output(work, job)
    assert [cluster.job(job)["Restarts"] for job in jobs] == ["1", "0", "0"]
    finished = [(work / "runs" / name / "FINISHED").stat().st_mtime for name in ("sft", "rm", "rl")]
    assert finished == sorted(finished)


def test_a_stage_does_not_start_from_a_run_that_has_not_finished(cluster, work) -> None:
    job = submit(cluster, work, "steps=1", command="rl", MEGARLHF_AFTER=f"{work}/other")
    assert cluster.wait(job, ENDED, 60) == "FAILED"
    assert cluster.job(job)["ExitCode"] == "2:0"
    assert "other/FINISHED" in output(work, job)
    assert not (work / "run").exists()


def test_one_gpu_per_task(cluster, work) -> None:
    """Two tasks on a node of two GPUs (files, here), each with its own."""
    program = work / "bin" / "megarlhf"
    program.write_text('#!/bin/sh\necho "$SLURM_LOCALID:$CUDA_VISIBLE_DEVICES" >>gpus\n')
    options = ["--ntasks-per-node=2", "--gpus-per-node=2", "--gpus-per-task=1"]
    job = submit(cluster, work, *options, nodes=1)
    assert cluster.wait(job, ENDED, 60) == "COMPLETED", output(work, job)
    assert sorted((work / "gpus").read_text().split()) == ["0:0", "1:1"]


def test_an_array_of_conversions(cluster, work) -> None:
    """Each line of the file is a command; quotes keep a space."""
    program = work / "bin" / "megarlhf"
    program.write_text('#!/bin/sh\nprintf "%s|" "$@" >"did.$SLURM_ARRAY_TASK_ID"\n')
    (work / "list").write_text("relayout --megatron a --out 'b c'\nmegatron-to-hf --megatron d --out e\n")
    environ = {"MEGARLHF_ENV": str(work / "site.sh")}
    options = ["--mem=100", "--cpus-per-task=1", "--array=1-2"]
    job = cluster.submit(*options, str(SLURM / "convert.sbatch"), "list", cwd=work, **environ)
    deadline = time.monotonic() + 60
    while len(list(work.glob("did.*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (work / "did.1").read_text() == "convert|relayout|--megatron|a|--out|b c|"
    assert (work / "did.2").read_text() == "convert|megatron-to-hf|--megatron|d|--out|e|"
    assert job


def test_a_lost_node_is_not_used_again(cluster, work) -> None:
    """The last test of the module: it waits for SlurmdTimeout and takes a node away. The job was on that node, with
    its batch script; Slurm queues it again, and the next attempt excludes the node from then on."""
    job = submit(cluster, work, "every_step=yes", "steps=1000", nodes=1)
    until("rank 0: sft begins", work)
    node = cluster.job(job)["NodeList"]
    cluster.lose_node(node)
    cluster.wait(job, ["RUNNING"], 150, until=lambda: cluster.job(job)["Restarts"] == "1")
    other = next(name for name in cluster.nodes if name != node)
    assert cluster.job(job)["NodeList"] == other
    until("restart 1 rank 0: sft begins", work)
    (memory,) = state(work, job)
    assert (memory / "excluded").read_text().split() == [node]
    assert (memory / "attempts").read_text().startswith("0 lost ")
    cluster.call("scancel", "--signal=USR1", str(job))
    deadline = time.monotonic() + 30
    while cluster.job(job)["ExcNodeList"] != node and time.monotonic() < deadline:
        time.sleep(0.3)
    assert cluster.job(job)["ExcNodeList"] == node
