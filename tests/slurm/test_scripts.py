"""The batch scripts with stand-ins for Slurm's programs: what reaches the tasks, and what a job is submitted with.

Not covered: Slurm itself (`test_life_cycle.py`), and the clusters' own scripts.
"""

import os
import shlex
import shutil
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest

from megarlhf.commands import launch
from tools import slurm_scripts

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "slurm"

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
    echo "JobId=412345 Restarts=$? ExcNodeList=${ASKED:-(null)} BatchFlag=1"
    exit
}
[[ "$*" == "--oneliner show node"* ]] && { echo "NodeName=${*: -1} State=${NODE_STATE:-IDLE} BootTime=None"; exit; }
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
    for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE), ("srun", SRUN), ("megarlhf", MEGARLHF)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "sleep").write_text('#!/bin/sh\necho "$@" >>"$RECORD/slept"\nexec /bin/sleep 0.05\n')
    (folder / "sleep").chmod(0o755)
    base = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RECORD": str(record), "HOME": str(tmp_path)}
    base |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "job"}

    def run(*arguments, script="sft", **environ):
        command = ["bash", str(SLURM / f"{script}.sbatch"), *arguments]
        return subprocess.run(command, env=base | JOB | environ, capture_output=True, text=True), record

    return run


def words(path):
    return path.read_bytes().decode().split("\0")[:-1]


def environment(path):
    return dict(entry.split("=", 1) for entry in words(path))


@pytest.mark.parametrize("script", ["sft", "rm", "dpo", "rl", "eval"])
def test_every_task_gets_the_command_line_and_the_rendezvous(submit, script):
    """The port: 10000 + 412345 mod 20000 = 22345. An argument with a space stays one argument."""
    arguments = ["-c", "configs/x.yaml", "run.dir=/data/my runs", "train.num_steps=3"]
    done, record = submit(*arguments, script=script)
    assert done.returncode == 0, done.stderr
    for task in ("0", "1"):
        assert words(record / f"argv.{task}") == [script, *arguments]
        env = environment(record / f"env.{task}")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node07", "22345")
        assert (env["SLURM_PROCID"], env["SLURM_NTASKS"]) == (task, "2")
        assert (env["OMP_NUM_THREADS"], env["SLURM_EXPORT_ENV"]) == ("1", "ALL")
        if script != "eval":
            assert env["SLURM_JOB_END_TIME"] == str(int(datetime(2100, 1, 1, 23).timestamp()))
    assert words(record / "srun") == ["--kill-on-bad-exit=0", "--wait=60", "--label"]
    assert f"megarlhf {script} -c configs/x.yaml" in done.stdout


def test_a_rendezvous_left_over_from_the_login_node_is_not_used(submit):
    """A task that took itself for rank 0 of 1 would train alone."""
    left_over = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    done, record = submit("sft", MASTER_ADDR="login1", MASTER_PORT="1", **left_over)
    assert done.returncode == 0, done.stderr
    env = environment(record / "env.0")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node07", "22345")
    assert not set(left_over) & set(env)
    assert env["MEGARLHF_DIRECTORY"] == os.getcwd()


def asked(script):
    lines = [line.split() for line in (SLURM / f"{script}.sbatch").read_text().splitlines()]
    return dict(line[1].partition("=")[::2] for line in lines if line[:1] == ["#SBATCH"])


@pytest.mark.parametrize(
    "script, nodes", [("sft", "1"), ("rm", "1"), ("dpo", "1"), ("rl", "4"), ("eval", "1"), ("test-gpu", "1")]
)
def test_what_a_job_asks_for_unless_told_otherwise(script, nodes):
    """Whole nodes and cores beside each GPU; training is told before its time ends and may be queued again. Not
    covered: a Slurm that reads it."""
    trains = {"--open-mode": "append", "--signal": "USR1@600", "--requeue": ""}
    assert asked(script) == {
        "--job-name": f"megarlhf-{script}",
        "--nodes": nodes,
        "--ntasks-per-node": "8",
        "--gpus-per-node": "8",
        "--cpus-per-task": "8",
        "--mem": "0",
        "--exclusive": "",
        "--output": "%x-%j.out",
        **({"--no-requeue": ""} if script in ("eval", "test-gpu") else trains),
    }


@pytest.mark.parametrize("script", sorted(slurm_scripts.SCRIPTS))
def test_the_scripts_are_what_their_parts_make(script):
    """A change belongs into slurm/parts/ or tools/slurm_scripts.py; then `make slurm-scripts`."""
    assert (SLURM / f"{script}.sbatch").read_text() == slurm_scripts.text(script)
    assert "@" not in {line.strip()[:1] for line in slurm_scripts.text(script).splitlines()}


def test_the_first_hour_is_told_where_to_write_and_how_to_start_ranks(submit, tmp_path):
    """The checks start their ranks themselves, by the words that the cluster's script has changed. Not covered: what
    the words do."""
    python = tmp_path / "bin" / "python3"
    python.write_text('#!/bin/sh\nprintf \'%s\\0\' "$@" "$MASTER_ADDR" "$MASTER_PORT" >"$RECORD/python"\n')
    python.chmod(0o755)
    site = tmp_path / "cluster.sh"
    site.write_text('srun_args+=("--container-image=my image")\nlauncher=(env WRAPPED=yes)\n')
    done, record = submit("runs/check", "--only", "sft", script="test-gpu", MEGARLHF_ENV=str(site))
    assert done.returncode == 0, done.stderr
    *arguments, address, port = words(record / "python")
    assert arguments[:4] == ["-m", "tools.gpu_check", "--out", "runs/check"]
    assert arguments[4] == "--srun"
    options = ["--kill-on-bad-exit=0", "--wait=60", "--label", "--container-image=my image"]
    assert shlex.split(arguments[5]) == ["srun", *options, "env", "WRAPPED=yes"]
    assert arguments[6:] == ["--only", "sft"]
    assert (address, port) == ("node07", "22345")


def test_there_are_no_other_scripts():
    assert {path.stem for path in SLURM.glob("*.sbatch")} == set(slurm_scripts.SCRIPTS)


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
    done, record = submit("-c", "x.yaml", script="rm", MEGARLHF_ENV=str(script))
    assert done.returncode == 0, done.stderr
    env = environment(record / "env.1")
    assert (env["NCCL_SOCKET_IFNAME"], env["MASTER_ADDR"], env["WRAPPED"]) == ("ib0", "node07-ib", "yes")
    assert words(record / "srun")[-1] == "--container-image=image.sqsh"
    assert words(record / "argv.1") == ["rm", "-c", "x.yaml"]


@pytest.mark.parametrize(
    "status, ends, requeued",
    [
        ("2", 2, False),
        ("4", 4, False),
        ("130", 130, False),
        ("75", 0, True),
        ("1", 0, True),
        ("3", 0, True),
        ("137", 0, True),
        ("0", 0, False),
    ],
)
def test_what_follows_from_the_status_of_a_run(submit, status, ends, requeued):
    """What is queued again has not failed. Not covered: what Slurm makes of it."""
    done, record = submit("-c", "x", TASK_STATUS=status)
    assert (record / "argv.0").exists()
    assert done.returncode == ends, done.stderr
    assert (record / "requeued").exists() == requeued


@pytest.mark.parametrize(
    "lines, restart, ends",
    [
        ("", "0", 0),
        ("0 1 none\n1 1 none\n", "2", 1),  # the third in a row
        ("0 1 none\n1 1 step_000001\n2 1 step_000001\n", "3", 0),  # the second after progress
        ("0 1 none\n1 stopped none\n", "2", 0),  # what came from outside counts for nothing
        ("0 75 none\n1 75 none\n", "2", 1),  # saved, and yet no step further
        ("0 1 step_000003\n1 lost step_000003\n", "2", 0),
    ],
)
def test_attempts_without_a_newer_resume_point_are_counted(submit, tmp_path, lines, restart, ends):
    """Three in a row; the run's newest resume point is step_000001 where there are lines of it."""
    memory = tmp_path / "job-412345.state"
    memory.mkdir()
    (memory / "attempts").write_text(lines)
    (memory / "run_dir").write_text(f"{tmp_path}/run\n")
    newest = lines.split()[-1] if lines else "none"
    for point in ("step_000000", newest):
        if newest != "none":
            (tmp_path / "run" / "resume" / point).mkdir(parents=True)
            (tmp_path / "run" / "resume" / point / "MANIFEST.json").touch()
    (tmp_path / "run" / "resume" / "step_000009").mkdir(parents=True)  # without a manifest: half-written
    done, record = submit("-c", "x", TASK_STATUS="1", SLURM_RESTART_COUNT=restart)
    assert done.returncode == ends, done.stderr
    assert (record / "requeued").exists() == (ends == 0)
    assert (memory / "attempts").read_text() == f"{lines}{restart} 1 {newest}\n"
    if ends:
        assert "3 attempts in a row ended without a newer resume point" in done.stderr


def test_a_newer_resume_point_is_progress(submit, tmp_path):
    """With a limit of one attempt."""
    memory = tmp_path / "job-412345.state"
    memory.mkdir()
    (memory / "attempts").write_text("0 1 step_000010\n")
    (memory / "run_dir").write_text(f"{tmp_path}/run\n")
    for point in ("step_000010", "step_000010_update_0002"):
        (tmp_path / "run" / "resume" / point).mkdir(parents=True)
        (tmp_path / "run" / "resume" / point / "MANIFEST.json").touch()
    done, record = submit("-c", "x", TASK_STATUS="1", SLURM_RESTART_COUNT="1", MEGARLHF_MAX_ATTEMPTS="1")
    assert done.returncode == 0, done.stderr
    assert (record / "requeued").exists()


def test_an_attempt_that_has_not_written_its_end_counts_as_lost(submit, tmp_path):
    memory = tmp_path / "job-412345.state"
    memory.mkdir()
    (memory / "attempts").touch()
    (memory / "nodes").write_text("node[07-08]\n")
    done, _ = submit("-c", "x", TASK_STATUS="75", SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert (memory / "attempts").read_text() == "0 lost none\n1 75 none\n"


@pytest.mark.parametrize("says, ends", [("2", 2), ("4", 4), ("1", 0), ("22", 0)])
def test_what_a_rank_says_goes_before_the_status_of_those_killed_after_it(submit, says, ends):
    """srun says 137. What was left by an attempt before does not count: the file is that of this one."""
    done, record = submit("-c", "x", TASK_STATUS="137", TASK_SAYS=says)
    assert done.returncode == ends, done.stderr
    assert (record / "requeued").exists() == (ends == 0)
    if ends:
        done, _ = submit("-c", "x", TASK_STATUS="137")
        assert done.returncode == 0


@pytest.mark.parametrize("lost, understood, ends, requests", [(1, "", 0, 2), (1, "yes", 0, 1), (9, "", 75, 6)])
def test_an_answer_of_slurm_s_that_is_lost(submit, lost, understood, ends, requests):
    """Asked again, unless Slurm had understood and counts a restart more than this one."""
    done, record = submit("-c", "x", TASK_STATUS="75", REQUESTS_LOST=str(lost), UNDERSTOOD=understood)
    assert len((record / "requeued").read_text().split()) == requests
    assert done.returncode == ends
    assert ("did not queue job 412345 again" in done.stderr) == (ends == 75)


def test_an_attempt_counts_as_progress_from_the_point_that_the_job_has_found(submit, tmp_path):
    """A new job on a run that has resume points: the third attempt without a newer one is the last."""
    memory = tmp_path / "job-412345.state"
    memory.mkdir()
    (memory / "attempts").write_text("0 1 step_000100\n1 1 step_000100\n")
    (memory / "began").write_text("step_000100\n")
    (memory / "run_dir").write_text(f"{tmp_path}/run\n")
    for point in ("step_000100", "step_000200.passed_over"):
        (tmp_path / "run" / "resume" / point).mkdir(parents=True)
        (tmp_path / "run" / "resume" / point / "MANIFEST.json").touch()
    done, record = submit("-c", "x", TASK_STATUS="1", SLURM_RESTART_COUNT="2")
    assert done.returncode == 1
    assert "3 attempts in a row ended without a newer resume point or response (newest: step_000100)" in done.stderr
    assert not (record / "requeued").exists()


def test_a_response_in_the_rollout_bank_is_progress(submit, tmp_path):
    """A rollout may take longer than an attempt. The bank is emptied by resume points alone, so its lines only rise."""
    memory, bank = tmp_path / "job-412345.state", tmp_path / "run/bank/step_000001"
    memory.mkdir()
    bank.mkdir(parents=True)
    (memory / "run_dir").write_text(f"{tmp_path}/run\n")
    (memory / "began").write_text("none\n")
    (memory / "attempts").write_text("0 75 none+2\n")
    (bank / "0001_rank_00000.jsonl").write_text("header\nresponse\n")
    (bank / "0002_rank_00000.jsonl").write_text("header\nresponse\nresponse\n")
    done, record = submit("-c", "x", TASK_STATUS="75", SLURM_RESTART_COUNT="1", MEGARLHF_MAX_ATTEMPTS="1")
    assert done.returncode == 0, done.stderr
    assert (memory / "attempts").read_text() == "0 75 none+2\n1 75 none+5\n"
    assert launch._progress(tmp_path / "run") == "none+5", "what the first rank says that the job has found"
    (record / "requeued").unlink()
    done, record = submit("-c", "x", TASK_STATUS="75", SLURM_RESTART_COUNT="2", MEGARLHF_MAX_ATTEMPTS="1")
    assert done.returncode == 75
    assert not (record / "requeued").exists()


@pytest.mark.parametrize("limit", ["abc", "0", "-1"])
def test_a_limit_of_attempts_that_is_none_is_refused_at_once(submit, limit):
    done, record = submit("-c", "x", MEGARLHF_MAX_ATTEMPTS=limit)
    assert done.returncode == 2
    assert f"got MEGARLHF_MAX_ATTEMPTS={limit}; expected a number from 1 on" in done.stderr
    assert not (record / "argv.0").exists()


def test_a_job_shorter_than_its_signal_is_said(submit):
    soon = datetime.fromtimestamp(time.time() + 300).isoformat(timespec="seconds")
    done, _ = submit("-c", "x", JOB_ENDS=soon)
    assert done.returncode == 0
    assert "Give a longer --time, or as --signal=USR1@60 the seconds they need" in done.stderr
    done, _ = submit("-c", "x", JOB_ENDS="2100-01-01T00:00:00")
    assert "--signal" not in done.stderr


def test_a_clusters_script_that_exits_is_named(submit, tmp_path):
    script = tmp_path / "cluster.sh"
    script.write_text("exit 1\n")
    done, _ = submit("-c", "x.yaml", MEGARLHF_ENV=str(script))
    assert done.returncode == 1
    assert f"MEGARLHF_ENV = {script} ended the job with status 1; it is sourced: no exit" in done.stderr
    script.write_text("trap 'echo theirs' EXIT\n")
    done, _ = submit("-c", "x.yaml", MEGARLHF_ENV=str(script))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "theirs")
    assert "ended the job" not in done.stderr


@pytest.mark.parametrize("missing", ["megarlhf", "srun"])
def test_a_program_that_is_not_there_is_no_success(submit, tmp_path, missing):
    """127 is also what `wait` says of a status that it has handed out before."""
    if missing == "srun":  # as the shell says it
        (tmp_path / "bin" / missing).write_text("#!/bin/sh\nexit 127\n")
    else:
        (tmp_path / "bin" / missing).unlink()
    path = f"{tmp_path}/bin{os.pathsep}/usr/bin{os.pathsep}/bin"
    done, record = submit("-c", "x", PATH=path)
    assert done.returncode == 127, done.stderr
    assert not (record / "requeued").exists()
    assert (tmp_path / "job-412345.state").exists()


def test_a_stop_before_the_first_task_is_obeyed(submit, tmp_path):
    (tmp_path / "bin" / "squeue").write_text('#!/usr/bin/env bash\n[[ "$*" == *%e* ]] && kill -TERM "$PPID"\n')
    done, record = submit("-c", "x")
    assert done.returncode == 143
    assert not (record / "argv.0").exists()
    assert (tmp_path / "job-412345.state/attempts").read_text() == "0 stopped none\n"


@pytest.mark.parametrize("lost", ["scancel", "squeue"])
def test_a_stop_whose_answer_is_lost_is_passed_on_again(submit, tmp_path, lost):
    """A failing command in the trap would end the script, and Slurm the tasks with it, while they save. Not by SIGTERM:
    the tasks may have had one, and a second would end them at once."""
    count = 'echo "{0} $*" >>"$RECORD/{0}"\n'
    fails = '[[ $(wc -l <"$RECORD/{0}") != 1 ]] || exit 1\n'
    running = '[[ "$*" != *%T* ]] || { echo RUNNING; exit; }\n'
    for name, text in (("scancel", ""), ("squeue", running + SQUEUE.partition("\n")[2])):
        words = '[[ "$*" == *%T* ]] || [[ $0 == *scancel ]] || exec "$0.other" "$@"\n'
        first = (words + count + fails).replace("{0}", name) if name == lost else count.replace("{0}", name)
        (tmp_path / "bin" / name).write_text("#!/usr/bin/env bash\n" + first + text)
        (tmp_path / "bin" / name).chmod(0o755)
        (tmp_path / "bin" / f"{name}.other").write_text(SQUEUE)
        (tmp_path / "bin" / f"{name}.other").chmod(0o755)
    done, record = submit("-c", "x", STOPPED="1", TASK_STATUS="75")
    assert done.returncode == 75, done.stderr
    calls = (record / "scancel").read_text().splitlines()
    signals = [word.partition("=")[2] for call in calls for word in call.split() if word.startswith("--signal")]
    assert signals == (["TERM", "USR1"] if lost == "scancel" else ["USR1"]), done.stderr


@pytest.mark.parametrize("answer", ["", "N/A", "2001-01-01T00:00:00"])
def test_no_end_of_the_job_is_better_than_a_wrong_one(submit, answer):
    """`date` takes nothing for midnight; the run would save and stop at once, again and again."""
    done, record = submit("-c", "x", JOB_ENDS=answer)
    assert done.returncode == 0, done.stderr
    assert "SLURM_JOB_END_TIME" not in environment(record / "env.0")


@pytest.mark.parametrize(
    "state, asked, excluded",
    [
        ("DOWN*+DRAIN", "", "ExcNodeList=node07,node08"),
        ("IDLE+CLOUD+POWERED_DOWN", "", None),
        ("MIXED*", "node[01-02]", "ExcNodeList=node[01-02],node07,node08"),
        ("FAILING", "", "ExcNodeList=node07,node08"),
        ("IDLE+DRAIN", "", None),
    ],
)
def test_nodes_that_failed_are_added_to_those_of_the_user(submit, state, asked, excluded):
    done, record = submit("-c", "x", TASK_STATUS="1", NODE_STATE=state, ASKED=asked)
    assert done.returncode == 0, done.stderr
    file = record / "excluded"
    assert (file.read_text().strip() if file.exists() else None) == excluded


def test_a_run_that_has_to_come_first_must_have_finished(submit, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "FINISHED").touch()
    (tmp_path / "b" / "checkpoints" / "latest").mkdir(parents=True)
    done, record = submit("-c", "x", MEGARLHF_AFTER=f"{tmp_path}/a")
    assert done.returncode == 0, done.stderr
    assert (record / "argv.0").exists()
    done, _ = submit("-c", "x", MEGARLHF_AFTER=f"{tmp_path}/a:{tmp_path}/b")
    assert done.returncode == 2
    assert f"MEGARLHF_AFTER names {tmp_path}/b, but {tmp_path}/b/FINISHED is not there" in done.stderr


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.mark.parametrize("status", ["134", "137", "3", "2"])
def test_what_happens_after_a_run_has_finished_does_not_count(submit, tmp_path, run_dir, status):
    """The ranks end with `status` after FINISHED has been written: the job is done."""
    done, record = submit("-c", "x", RUN_DIR=str(run_dir), RUN_FINISHES="yes", TASK_STATUS=status)
    assert (record / "argv.0").exists()
    assert (run_dir / "FINISHED").exists()
    assert done.returncode == 0, done.stderr
    assert f"the run had finished; srun ended with {status}\n" in done.stdout
    assert not (record / "requeued").exists()
    assert list(tmp_path.glob("*.state")) == []


def test_a_job_queued_again_after_its_run_has_finished_starts_nothing(submit, tmp_path, run_dir):
    """Its node was lost after FINISHED: the attempt before has written nothing about its end."""
    memory = tmp_path / "job-412345.state"
    memory.mkdir()
    (memory / "nodes").write_text("node[07-08]\n")
    (memory / "run_dir").write_text(f"{run_dir}\n")
    os.utime(memory / "run_dir", (1e9, 1e9))
    (run_dir / "FINISHED").touch()
    done, record = submit("-c", "x", SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert "(restart 1): the run had finished before the job was queued again" in done.stdout
    assert list(record.iterdir()) == []
    assert not memory.exists()


@pytest.mark.parametrize("status, ends", [("134", 0), ("2", 2)])
def test_what_an_earlier_job_has_finished_does_not_count(submit, tmp_path, run_dir, status, ends):
    """`train.num_steps` has grown, and the run fails before it removes the FINISHED of the shorter one."""
    (run_dir / "FINISHED").touch()
    os.utime(run_dir / "FINISHED", (1e9, 1e9))
    for restart in ("0", "1"):
        done, record = submit("-c", "x", RUN_DIR=str(run_dir), TASK_STATUS=status, SLURM_RESTART_COUNT=restart)
        (record / "argv.0").unlink()  # the run was started
        assert done.returncode == ends, done.stderr
        assert "finished" not in done.stdout
        assert (record / "requeued").exists() == (ends == 0)
        (record / "requeued").unlink(missing_ok=True)
    assert (tmp_path / "job-412345.state" / "run_dir").exists()


def test_a_finished_run_without_a_launch_of_this_job_does_not_count(submit, run_dir):
    """The run ends before its first rank has told where it is; `-nt` also holds where its second file is missing."""
    (run_dir / "FINISHED").touch()
    done, record = submit("-c", "x", f"run.dir={run_dir}", TASK_STATUS="134", SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert (record / "argv.0").exists()
    assert (record / "requeued").exists()


@pytest.mark.parametrize("status", ["0", "134"])
def test_a_job_that_slurm_stops_and_queues_again_after_its_run_has_finished(submit, tmp_path, run_dir, status):
    """SIGTERM reaches the script while the processes end; the next attempt still finds what to go by."""
    environ = {"RUN_DIR": str(run_dir), "RUN_FINISHES": "yes", "TASK_STATUS": status}
    done, record = submit("-c", "x", STOPPED="yes", **environ)
    assert done.returncode == 0, done.stderr
    assert "SIGTERM received: 1" in done.stdout
    (record / "argv.0").unlink()
    done, record = submit("-c", "x", SLURM_RESTART_COUNT="1", **environ)
    assert done.returncode == 0, done.stderr
    assert not (record / "argv.0").exists()
    assert list(tmp_path.glob("*.state")) == []


def test_a_line_of_the_file_of_conversions_is_a_command(submit, tmp_path):
    (tmp_path / "list").write_bytes(b"verify a b\r\nrelayout --out 'c d' --megatron $HOME\r\n")  # as Windows writes it
    done, record = submit(str(tmp_path / "list"), script="convert", SLURM_ARRAY_TASK_ID="2")
    assert done.returncode == 0, done.stderr
    assert words(record / "argv.0") == ["convert", "relayout", "--out", "c d", "--megatron", "$HOME"]
    (tmp_path / "list").write_text("# conversions\n\nverify a --out 'c d\n")
    for number, message in (("1", "line 1 of"), ("2", "line 2 of"), ("3", "line 3 of"), ("4", "of the file's 3")):
        (record / "argv.0").unlink(missing_ok=True)
        done, _ = submit(str(tmp_path / "list"), script="convert", SLURM_ARRAY_TASK_ID=number)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert not (record / "argv.0").exists()


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ((), {}, "sft.sbatch: got no arguments; expected: sbatch slurm/sft.sbatch -c FILE [key=value ...]"),
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


@pytest.mark.parametrize("path", [*SLURM.glob("*.sbatch"), *SLURM.glob("*.sh")], ids=lambda path: path.name)
def test_syntax(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    scripts = [*map(str, [*SLURM.glob("*.sbatch"), *SLURM.glob("*.sh")]), str(ROOT / ".ci" / "run")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0
