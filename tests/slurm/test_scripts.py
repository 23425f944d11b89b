"""The batch scripts with stand-ins for Slurm's programs: what reaches the tasks, and what a job is submitted with.

Not covered: Slurm itself (`test_life_cycle.py`), what follows from how a run ends (`test_attempts.py`), and the
clusters' own scripts.
"""

import os
import shlex
import shutil
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.refuses import missing_names

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "slurm"


def words(path):
    return path.read_bytes().decode().split("\0")[:-1]


def environment(path):
    return dict(entry.split("=", 1) for entry in words(path))


@pytest.mark.parametrize("command", ["sft", "rm", "dpo", "rl", "eval", "generate"])
def test_every_task_gets_the_command_line_and_the_rendezvous(submit, command):
    """The port: 10000 + 412345 mod 20000 = 22345. An argument with a space stays one argument."""
    arguments = ["-c", "configs/x.yaml", "run.dir=/data/my runs", "train.num_steps=3"]
    done, record = submit(command, *arguments)
    assert done.returncode == 0, done.stderr
    for task in ("0", "1"):
        assert words(record / f"argv.{task}") == [command, *arguments]
        env = environment(record / f"env.{task}")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node07", "22345")
        assert (env["SLURM_PROCID"], env["SLURM_NTASKS"]) == (task, "2")
        assert (env["OMP_NUM_THREADS"], env["SLURM_EXPORT_ENV"]) == ("1", "ALL")
        once = command in ("eval", "generate")
        assert (record / "requeue").exists() == once, "Slurm would begin it anew where results are already"
        if not once:
            assert env["SLURM_JOB_END_TIME"] == str(int(datetime(2100, 1, 1, 23).timestamp()))
    assert words(record / "srun") == ["--kill-on-bad-exit=0", "--wait=60", "--label"]
    assert f"megarlhf {command} -c configs/x.yaml" in done.stdout


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


@pytest.mark.parametrize("script, name", [("run", "megarlhf"), ("test-gpu", "megarlhf-test-gpu")])
def test_what_a_job_asks_for_unless_told_otherwise(script, name):
    """Whole nodes and cores beside each GPU; training is told before its time ends and may be queued again. Not
    covered: a Slurm that reads it."""
    trains = {"--open-mode": "append", "--signal": "USR1@600", "--requeue": ""}
    assert asked(script) == {
        "--job-name": name,
        "--nodes": "1",
        "--ntasks-per-node": "8",
        "--gpus-per-node": "8",
        "--cpus-per-task": "8",
        "--mem": "0",
        "--exclusive": "",
        "--output": "%x-%j.out",
        **({"--no-requeue": ""} if script == "test-gpu" else trains),
    }


@pytest.mark.parametrize("command", ["sft", "eval"])
def test_the_signal_before_the_time_limit_is_for_training(submit, tmp_path, command):
    """It would end what has no handler for it."""
    (tmp_path / "bin/megarlhf").write_text('#!/bin/sh\ntouch "$RECORD/argv.0"\nkill -USR1 $$\necho still here\n')
    done, _ = submit(command, "-c", "x.yaml")
    assert ("still here" in done.stdout) == (command == "eval")


def test_the_functions_are_found_beside_the_script_that_was_submitted(submit, tmp_path):
    """Slurm runs a copy of the script elsewhere, and may not name the original."""
    folder = tmp_path / "my clone.sbatch-jobs"
    shutil.copytree(SLURM, folder / "slurm")
    (folder / "slurm/job.sh").write_text('echo "these: $*"; exit 0\n')
    done, _ = submit("sft", "-c", "other.sbatch", SCRIPT=str(folder / "slurm/run.sbatch"))
    assert done.returncode == 2, "a folder whose name has .sbatch in it"
    (folder).rename(tmp_path / "my clone")
    done, _ = submit("sft", "-c", "other.sbatch", SCRIPT=str(tmp_path / "my clone/slurm/run.sbatch"))
    assert (done.returncode, done.stdout) == (0, "these: sft -c other.sbatch\n"), done.stderr
    done, _ = submit("sft", "-c", "x", SCRIPT="(null)", SLURM_SUBMIT_DIR=str(tmp_path / "my clone"))
    assert (done.returncode, done.stdout) == (0, "these: sft -c x\n"), done.stderr
    done, record = submit("sft", "-c", "x", SCRIPT="/gone/slurm/run.sbatch")
    assert done.returncode == 2
    assert not missing_names(done.stderr, "/gone/slurm/job.sh is not there", "no copy")
    assert not (record / "argv.0").exists()


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


def test_a_job_shorter_than_its_signal_is_said(submit):
    soon = datetime.fromtimestamp(time.time() + 300).isoformat(timespec="seconds")
    done, _ = submit("sft", "-c", "x", JOB_ENDS=soon)
    assert done.returncode == 0
    assert not missing_names(done.stderr, "--time", "--signal", "checkpoint.seconds_before_end")
    done, _ = submit("sft", "-c", "x", JOB_ENDS="2100-01-01T00:00:00")
    assert "--signal" not in done.stderr


def test_a_clusters_script_that_exits_is_named(submit, tmp_path):
    script = tmp_path / "cluster.sh"
    script.write_text("exit 1\n")
    done, _ = submit("sft", "-c", "x.yaml", MEGARLHF_ENV=str(script))
    assert done.returncode == 2
    assert not missing_names(done.stderr, f"MEGARLHF_ENV = {script}", "status 1", "exit")
    script.write_text("exit 0\n")
    assert submit("sft", "-c", "x.yaml", MEGARLHF_ENV=str(script))[0].returncode == 2, "a job that did nothing"
    script.write_text("(exit 7)\n")
    done, _ = submit("sft", "-c", "x.yaml", MEGARLHF_ENV=str(script))
    assert (done.returncode, "ended with status 7" in done.stderr) == (2, True)
    script.write_text("trap 'echo theirs' EXIT\n")
    done, _ = submit("sft", "-c", "x.yaml", MEGARLHF_ENV=str(script))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "theirs")
    assert "ended the job" not in done.stderr


@pytest.mark.parametrize("missing", ["megarlhf", "srun"])
def test_a_program_that_is_not_there_is_no_success(submit, tmp_path, missing):
    """127 is also what `wait` says of a status that it has handed out before. An image may have the command."""
    if missing == "srun":  # as the shell says it
        (tmp_path / "bin" / missing).write_text("#!/bin/sh\nexit 127\n")
    else:
        (tmp_path / "bin" / missing).unlink()
        (tmp_path / "site.sh").write_text("launcher=(env)\n")
        plain, _ = submit("sft", "-c", "x", PATH=f"{tmp_path}/bin{os.pathsep}/usr/bin{os.pathsep}/bin")
        assert plain.returncode == 2
        assert not missing_names(plain.stderr, "megarlhf is not on PATH", "MEGARLHF_ENV=/shared/site.sh")
    path = f"{tmp_path}/bin{os.pathsep}/usr/bin{os.pathsep}/bin"
    site = str(tmp_path / "site.sh") if missing == "megarlhf" else ""
    done, record = submit("sft", "-c", "x", PATH=path, MEGARLHF_ENV=site)
    assert done.returncode == 127, done.stderr
    assert not (record / "requeued").exists()
    assert (tmp_path / "job-412345.state").exists()


def test_a_stop_before_the_first_task_is_obeyed(submit, tmp_path):
    (tmp_path / "bin" / "squeue").write_text('#!/usr/bin/env bash\n[[ "$*" == *%e* ]] && kill -TERM "$PPID"\n')
    done, record = submit("sft", "-c", "x")
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
    squeue = (tmp_path / "bin/squeue").read_text()
    for name, text in (("scancel", ""), ("squeue", running + squeue.partition("\n")[2])):
        words = '[[ "$*" == *%T* ]] || [[ $0 == *scancel ]] || exec "$0.other" "$@"\n'
        first = (words + count + fails).replace("{0}", name) if name == lost else count.replace("{0}", name)
        (tmp_path / "bin" / name).write_text("#!/usr/bin/env bash\n" + first + text)
        (tmp_path / "bin" / name).chmod(0o755)
        (tmp_path / "bin" / f"{name}.other").write_text(squeue)
        (tmp_path / "bin" / f"{name}.other").chmod(0o755)
    done, record = submit("sft", "-c", "x", STOPPED="1", TASK_STATUS="75")
    assert done.returncode == 75, done.stderr
    calls = (record / "scancel").read_text().splitlines()
    signals = [word.partition("=")[2] for call in calls for word in call.split() if word.startswith("--signal")]
    assert signals == (["TERM", "USR1"] if lost == "scancel" else ["USR1"]), done.stderr


@pytest.mark.parametrize("answer", ["", "N/A", "2001-01-01T00:00:00"])
def test_no_end_of_the_job_is_better_than_a_wrong_one(submit, answer):
    """`date` takes nothing for midnight; the run would save and stop at once, again and again."""
    done, record = submit("sft", "-c", "x", JOB_ENDS=answer)
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
    done, record = submit("sft", "-c", "x", TASK_STATUS="1", NODE_STATE=state, ASKED=asked)
    assert done.returncode == 0, done.stderr
    file = record / "excluded"
    assert (file.read_text().strip() if file.exists() else None) == excluded


def test_a_run_that_has_to_come_first_must_have_finished(submit, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "FINISHED").touch()
    (tmp_path / "b" / "checkpoints" / "latest").mkdir(parents=True)
    done, record = submit("sft", "-c", "x", MEGARLHF_AFTER=f"{tmp_path}/a")
    assert done.returncode == 0, done.stderr
    assert (record / "argv.0").exists()
    done, _ = submit("sft", "-c", "x", MEGARLHF_AFTER=f"{tmp_path}/a:{tmp_path}/b")
    assert done.returncode == 2
    assert not missing_names(done.stderr, "MEGARLHF_AFTER", f"{tmp_path}/b/FINISHED")


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
    ("arguments", "environ", "name"),
    [
        ((), {}, "sbatch slurm/run.sbatch COMMAND -c FILE"),
        (("train",), {}, "sft, rm, dpo, rl, eval or generate"),
        (("sft",), {"SLURM_JOB_ID": ""}, "start it with sbatch"),
        (("sft",), {"SLURM_JOB_NODELIST": "other"}, "unexpected: scontrol show hostnames other"),
        (("sft",), {"MEGARLHF_ENV": "/does/not/exist"}, "/does/not/exist"),
    ],
)
def test_a_wrong_start_fails_before_any_task(submit, arguments, environ, name):
    done, record = submit(*arguments, **environ)
    assert done.returncode != 0
    assert name in done.stderr
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
