"""The batch scripts with stand-ins for Slurm's programs: what follows from how a run ends; counted attempts."""

import os

import pytest

from megarlhf.commands import launch
from tests.refuses import missing_names


@pytest.fixture
def memory(tmp_path):
    """The folder that a job's attempts leave for the next, with these files in it."""
    folder = tmp_path / "job-412345.state"

    def write(**files):
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        return folder

    return write


def leave_points(run_dir, *points):
    for point in points:
        (run_dir / "resume" / point).mkdir(parents=True)
        (run_dir / "resume" / point / "MANIFEST.json").touch()


STATUSES = {"2": 2, "4": 4, "130": 130, "75": 0, "1": 0, "3": 0, "137": 0, "0": 0}


@pytest.mark.parametrize("status, ends, requeued", [(k, v, v == 0 and k != "0") for k, v in STATUSES.items()])
def test_what_follows_from_the_status_of_a_run(submit, status, ends, requeued):
    """What is queued again has not failed. Not covered: what Slurm makes of it."""
    done, record = submit("sft", "-c", "x", TASK_STATUS=status)
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
def test_attempts_without_a_newer_resume_point_are_counted(submit, tmp_path, memory, lines, restart, ends):
    """Three in a row; the run's newest resume point is step_000001 where there are lines of it."""
    folder = memory(attempts=lines, run_dir=f"{tmp_path}/run\n")
    newest = lines.split()[-1] if lines else "none"
    leave_points(tmp_path / "run", *(("step_000000", newest) if newest != "none" else ()))
    (tmp_path / "run" / "resume" / "step_000009").mkdir(parents=True)  # without a manifest: half-written
    done, record = submit("sft", "-c", "x", TASK_STATUS="1", SLURM_RESTART_COUNT=restart)
    assert done.returncode == ends, done.stderr
    assert (record / "requeued").exists() == (ends == 0)
    assert (folder / "attempts").read_text() == f"{lines}{restart} 1 {newest}\n"
    if ends:
        assert not missing_names(done.stderr, "3 attempts in a row", "newer resume point")


def test_a_newer_resume_point_is_progress(submit, tmp_path, memory):
    """With a limit of one attempt."""
    memory(attempts="0 1 step_000010\n", run_dir=f"{tmp_path}/run\n")
    leave_points(tmp_path / "run", "step_000010", "step_000010_update_0002")
    done, record = submit("sft", "-c", "x", TASK_STATUS="1", SLURM_RESTART_COUNT="1", MEGARLHF_MAX_ATTEMPTS="1")
    assert done.returncode == 0, done.stderr
    assert (record / "requeued").exists()


def test_an_attempt_that_has_not_written_its_end_counts_as_lost(submit, memory):
    folder = memory(attempts="", nodes="node[07-08]\n")
    done, _ = submit("sft", "-c", "x", TASK_STATUS="75", SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert (folder / "attempts").read_text() == "0 lost none\n1 75 none\n"


@pytest.mark.parametrize("says, ends", [("2", 2), ("4", 4), ("1", 0), ("22", 0)])
def test_what_a_rank_says_goes_before_the_status_of_those_killed_after_it(submit, says, ends):
    """srun says 137. What was left by an attempt before does not count: the file is that of this one."""
    done, record = submit("sft", "-c", "x", TASK_STATUS="137", TASK_SAYS=says)
    assert done.returncode == ends, done.stderr
    assert (record / "requeued").exists() == (ends == 0)
    if ends:
        done, _ = submit("sft", "-c", "x", TASK_STATUS="137")
        assert done.returncode == 0


@pytest.mark.parametrize("lost, understood, ends, requests", [(1, "", 0, 2), (1, "yes", 0, 1), (9, "", 75, 6)])
def test_an_answer_of_slurm_s_that_is_lost(submit, lost, understood, ends, requests):
    """Asked again, unless Slurm had understood and counts a restart more than this one."""
    done, record = submit("sft", "-c", "x", TASK_STATUS="75", REQUESTS_LOST=str(lost), UNDERSTOOD=understood)
    assert len((record / "requeued").read_text().split()) == requests
    assert done.returncode == ends
    assert ("job 412345" in done.stderr) == (ends == 75)


def test_an_attempt_counts_as_progress_from_the_point_that_the_job_has_found(submit, tmp_path, memory):
    """A new job on a run that has resume points: the third attempt without a newer one is the last."""
    lines = "0 1 step_000100\n1 1 step_000100\n"
    memory(attempts=lines, began="step_000100\n", run_dir=f"{tmp_path}/run\n")
    leave_points(tmp_path / "run", "step_000100", "step_000200.passed_over")
    done, record = submit("sft", "-c", "x", TASK_STATUS="1", SLURM_RESTART_COUNT="2")
    assert done.returncode == 1
    assert not missing_names(done.stderr, "3 attempts in a row", "newest: step_000100")
    assert not (record / "requeued").exists()


def test_a_response_in_the_rollout_bank_is_progress(submit, tmp_path, memory):
    """A rollout may take longer than an attempt. The bank is emptied by resume points alone, so its lines only rise."""
    bank = tmp_path / "run/bank/step_000001"
    bank.mkdir(parents=True)
    folder = memory(attempts="0 75 none+2\n", began="none\n", run_dir=f"{tmp_path}/run\n")
    (bank / "0001_rank_00000.jsonl").write_text("header\nresponse\n")
    (bank / "0002_rank_00000.jsonl").write_text("header\nresponse\nresponse\n")
    done, record = submit("sft", "-c", "x", TASK_STATUS="75", SLURM_RESTART_COUNT="1", MEGARLHF_MAX_ATTEMPTS="1")
    assert done.returncode == 0, done.stderr
    assert (folder / "attempts").read_text() == "0 75 none+2\n1 75 none+5\n"
    assert launch._progress(tmp_path / "run") == "none+5", "what the first rank says that the job has found"
    (record / "requeued").unlink()
    done, record = submit("sft", "-c", "x", TASK_STATUS="75", SLURM_RESTART_COUNT="2", MEGARLHF_MAX_ATTEMPTS="1")
    assert done.returncode == 75
    assert not (record / "requeued").exists()


@pytest.mark.parametrize("limit", ["abc", "0", "-1"])
def test_a_limit_of_attempts_that_is_none_is_refused_at_once(submit, limit):
    done, record = submit("sft", "-c", "x", MEGARLHF_MAX_ATTEMPTS=limit)
    assert done.returncode == 2
    assert not missing_names(done.stderr, f"MEGARLHF_MAX_ATTEMPTS={limit}", "number from 1")
    assert not (record / "argv.0").exists()


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.mark.parametrize("status", ["134", "137", "3", "2"])
def test_what_happens_after_a_run_has_finished_does_not_count(submit, tmp_path, run_dir, status):
    """The ranks end with `status` after FINISHED has been written: the job is done."""
    done, record = submit("sft", "-c", "x", RUN_DIR=str(run_dir), RUN_FINISHES="yes", TASK_STATUS=status)
    assert (record / "argv.0").exists()
    assert (run_dir / "FINISHED").exists()
    assert done.returncode == 0, done.stderr
    assert not missing_names(done.stdout, "the run had finished", f"srun ended with {status}")
    assert not (record / "requeued").exists()
    assert list(tmp_path.glob("*.state")) == []


def test_a_job_queued_again_after_its_run_has_finished_starts_nothing(submit, memory, run_dir):
    """Its node was lost after FINISHED: the attempt before has written nothing about its end."""
    folder = memory(nodes="node[07-08]\n", run_dir=f"{run_dir}\n")
    os.utime(folder / "run_dir", (1e9, 1e9))
    (run_dir / "FINISHED").touch()
    done, record = submit("sft", "-c", "x", SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert not missing_names(done.stdout, "restart 1", "the run had finished")
    assert list(record.iterdir()) == []
    assert not folder.exists()


@pytest.mark.parametrize("status, ends", [("134", 0), ("2", 2)])
def test_what_an_earlier_job_has_finished_does_not_count(submit, tmp_path, run_dir, status, ends):
    """`train.num_steps` has grown, and the run fails before it removes the FINISHED of the shorter one."""
    (run_dir / "FINISHED").touch()
    os.utime(run_dir / "FINISHED", (1e9, 1e9))
    for restart in ("0", "1"):
        done, record = submit("sft", "-c", "x", RUN_DIR=str(run_dir), TASK_STATUS=status, SLURM_RESTART_COUNT=restart)
        (record / "argv.0").unlink()  # the run was started
        assert done.returncode == ends, done.stderr
        assert "finished" not in done.stdout
        assert (record / "requeued").exists() == (ends == 0)
        (record / "requeued").unlink(missing_ok=True)
    assert (tmp_path / "job-412345.state" / "run_dir").exists()


def test_a_finished_run_without_a_launch_of_this_job_does_not_count(submit, run_dir):
    """The run ends before its first rank has told where it is; `-nt` also holds where its second file is missing."""
    (run_dir / "FINISHED").touch()
    done, record = submit("sft", "-c", "x", f"run.dir={run_dir}", TASK_STATUS="134", SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert (record / "argv.0").exists()
    assert (record / "requeued").exists()


@pytest.mark.parametrize("status", ["0", "134"])
def test_a_job_that_slurm_stops_and_queues_again_after_its_run_has_finished(submit, tmp_path, run_dir, status):
    """SIGTERM reaches the script while the processes end; the next attempt still finds what to go by."""
    environ = {"RUN_DIR": str(run_dir), "RUN_FINISHES": "yes", "TASK_STATUS": status}
    done, record = submit("sft", "-c", "x", STOPPED="yes", **environ)
    assert done.returncode == 0, done.stderr
    assert "SIGTERM received: 1" in done.stdout
    (record / "argv.0").unlink()
    done, record = submit("sft", "-c", "x", SLURM_RESTART_COUNT="1", **environ)
    assert done.returncode == 0, done.stderr
    assert not (record / "argv.0").exists()
    assert list(tmp_path.glob("*.state")) == []
