"""Faults that are the same each time, at random moments where there is one to choose."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.record import Result
from benchmarks.faults.rules import HANG_MARK
from benchmarks.faults.runs import plant
from benchmarks.faults.trial import CannotHappen, NotHappened, Trial


def launcher_killed(trial: Trial) -> Result:
    """Only the launcher is killed: its ranks end themselves, and the same command goes on."""
    command = trial.start()
    moment = trial.wait_for_moment(command)
    ranks = command.ranks()
    command.kill([command.pid])
    command.wait()
    if command.pid in ranks:
        raise NotHappened("the ranks had not been started")
    happened = f"the launcher of {len(ranks)} ranks was killed {moment}"
    if left_over := command.left_over(20):
        return Result(happened, recovered=False, problem=f"processes were left running: {left_over}")
    trial.require_unfinished()
    return trial.goes_on(happened)


def disk_full(trial: Trial) -> Result:
    """No room for a resume point: said, and the run goes on; or it is killed before there is room again."""
    with _small_disk(trial, "48m") as disk:
        command = trial.start()
        trial.wait_for_moment(command, first=2)
        _fill(disk / "filler")
        warned = command.wait_until(lambda: "no resume point of" in " ".join(command.said.split()))
        if not warned and "no resume point of" not in " ".join(command.said.split()):
            raise NotHappened("the run ended before it wrote a resume point")
        happened = f"the disk was full: {_sentence(command.said, 'WARNING: no resume point of')}"
        killed = trial.random.random() < 0.5
        if killed:
            command.kill()
            happened += "; all processes were killed"
        (disk / "filler").unlink()
        return trial.goes_on(happened) if killed else trial.went_on(command, happened)


def read_only_directory(trial: Trial) -> Result:
    """The file system is read-only when the run starts again: refused, and nothing lost."""
    with _small_disk(trial, "64m") as disk:
        command = trial.start()
        moment = trial.wait_for_moment(command, first=1)
        command.kill()
        trial.require_unfinished()
        _mount("-o", "remount,ro", str(disk))
        problem = trial.refused("ead-only")
        _mount("-o", "remount,rw", str(disk))
        result = trial.goes_on(f"read-only after a kill {moment}")
        return with_problem(result, problem)


def changed_data(trial: Trial) -> Result:
    """Two lines of the data change places under a killed run: refused; with the old data it goes on."""
    data = Path(trial.case.tree["data"]["train"])
    mine = trial.folder / data.name
    shutil.copy(data, mine)
    trial.overrides = (f"data.train={mine}",)
    command = trial.start()
    moment = trial.wait_for_moment(command, first=8)
    command.kill()
    trial.require_unfinished()
    lines = mine.read_text().splitlines(keepends=True)
    lines[0], lines[1] = lines[1], lines[0]
    mine.write_text("".join(lines))
    problem = trial.refused("gives other samples")
    shutil.copy(data, mine)
    return with_problem(trial.goes_on(f"two lines changed places after a kill {moment}"), problem)


def changed_configuration(trial: Trial) -> Result:
    """Another learning rate for a killed run: refused, and named; with the old one it goes on."""
    command = trial.start()
    moment = trial.wait_for_moment(command, first=8)
    command.kill()
    trial.require_unfinished()
    problem = trial.refused("actor.optim.lr", "actor.optim.lr=2e-3")
    return with_problem(trial.goes_on(f"another learning rate after a kill {moment}"), problem)


def second_job(trial: Trial) -> Result:
    """The same command while the run is going: refused, the holder is named, and the first run is as if alone."""
    trial.moments = (0, trial.case.steps // 2)  # until a start looks, a small model makes many steps
    command = trial.start()
    moment = trial.wait_for_moment(command)
    ranks = command.ranks()
    second = trial.start()
    status, said = second.wait(), " ".join(second.said.split())
    result = trial.went_on(command, f"a second start {moment}: status {status}")
    if status == 2 and "has finished" in said:
        raise NotHappened("the first run had made its last step")
    if status != 2 or not any(f"{pid}" in said for pid in ranks):
        result = with_problem(result, f"the second start ended with {status}: {second.said[-500:]}")
    return result


def hanging_reward(trial: Trial) -> Result:
    """A reward function does not return: the watchdog names it and ends the run with 3; the same command goes on."""
    hang = trial.folder / "hang"
    trial.environment[HANG_MARK] = str(hang)
    command = trial.start()
    trial.wait_for_moment(command, first=1)
    hang.touch()
    status = command.wait()
    trial.require_unfinished()
    if not hang.with_name("hang.happened").exists():
        raise NotHappened("no reward was asked for")
    happened = f"a reward function did not return: status {status}"
    if status != 3 or "hang_once" not in command.said:
        return Result(happened, recovered=False, problem=f"status {status}, expected 3: {command.said[-800:]}")
    return trial.goes_on(happened)


def engine_exception(trial: Trial) -> Result:
    """vLLM raises in the middle of a rollout: it is built anew, and the run is as if nothing had happened."""
    call = 2 + trial.random.randrange(12)
    command = trial.start(environment=plant(f"vllm.v1.engine.llm_engine:LLMEngine.step:{call}:raise:0"))
    result = trial.went_on(command, f"LLMEngine.step raised in call {call}")
    if not (trial.folder / "planted").exists():
        raise NotHappened("fewer calls")
    if result.recovered and trial.metric("engine_rebuilds") != 1:
        result = with_problem(result, f"{trial.metric('engine_rebuilds')} engines were built anew")
    return result


def nan_gradient(trial: Trial) -> Result:
    """A NaN in one gradient: the step is skipped and kept, and the run ends as the one in which that happens each time.
    Up to there it is the run that nothing happened to."""
    command = trial.start(environment=trial.case.environment)
    result = trial.went_on(command, "the gradient of step 6 had a NaN")
    if not (trial.folder / "planted").exists():
        raise NotHappened("fewer calls")
    kept = list((trial.run / "failures").glob("step_000006*"))
    if trial.metric("skipped_steps") != 1 or not kept:
        result = with_problem(result, f"skipped_steps {trial.metric('skipped_steps')}, kept {kept}")
    plain = trial.site.reference(trial.site.case("sft")).results["metrics"]
    mine = trial.reference.results["metrics"]
    if mine[:6] != plain[:6] or mine[6] == plain[6]:
        result = with_problem(result, "the steps before are not those of the undisturbed run")
    return result


def time_limit(trial: Trial) -> Result:
    """The job's time is nearly over: saved and left with 75 before it is, and gone on in the next job."""
    before_end = 20
    end = int(time.time() + before_end + 11 + trial.random.random() * 3)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": str(end)}
    command = trial.start(f"checkpoint.seconds_before_end={before_end}", environment=job)
    status = command.wait()
    trial.require_unfinished()
    left = end - time.time()
    happened = f"a time limit: status {status}, {left:.0f} s before it"
    if status != 75 or left < 0 or "time is nearly over" not in " ".join(command.said.split()):
        return Result(happened, recovered=False, problem=f"status {status}, expected 75: {command.said[-500:]}")
    return trial.goes_on(happened, allowed=1)


def with_problem(result: Result, problem: str) -> Result:
    """The result, which is not recovered if there is a problem."""
    if problem:
        result.recovered, result.problem = False, f"{problem}; {result.problem}"
    return result


def _sentence(said: str, begin: str) -> str:
    text = " ".join(said.split())
    return text[text.index(begin) :][:160]


def _mount(*arguments: str, program: str = "mount") -> None:
    deadline = time.monotonic() + 10
    while (done := subprocess.run([program, *arguments], capture_output=True, text=True, check=False)).returncode:
        if "busy" not in done.stderr or time.monotonic() > deadline:
            raise CannotHappen(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")
        time.sleep(0.2)  # a process that was killed closes its files a little later


def unmount_leftovers(trials: Path) -> None:
    """File systems of trials that were interrupted: their directories could not be removed."""
    for disk in trials.glob("*/disk"):
        if disk.is_mount():
            _mount("-l", str(disk), program="umount")


@contextlib.contextmanager
def _small_disk(trial: Trial, size: str) -> Iterator[Path]:
    """A file system of its own, with the run directory on it."""
    if os.geteuid() != 0:
        raise CannotHappen("to mount a file system takes root")
    disk = trial.folder / "disk"
    disk.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk))
    trial.run = disk / "run"
    try:
        yield disk
    finally:
        trial.end()
        _mount("-l", str(disk), program="umount")


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    stream.write(bytes(size))
