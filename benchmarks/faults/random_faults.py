"""Faults at random moments: kills, signals, damaged files, ranks that stop answering."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from pathlib import Path

from benchmarks.faults.processes import Command
from benchmarks.faults.record import Result
from benchmarks.faults.trial import NotHappened, Trial
from megarlhf.resume.points.point import find_points

_making = threading.Lock()
WRITING_SECONDS = 0.12
"""About as long as a resume point of these models is written."""


def sigkill(trial: Trial) -> Result:
    """The whole machine is lost, or one rank is killed."""
    command = trial.start()
    moment = trial.wait_for_moment(command)
    return trial.goes_on(f"{kill(trial, command)} {moment}")


def sigkill_newest_removed(trial: Trial) -> Result:
    """SIGKILL after two resume points, and the newest is gone at the next start: the one before has its own slices."""
    command = trial.start()
    if not command.wait_until(lambda: len(find_points(trial.run)) >= 2):
        raise NotHappened("the run ended before it had two resume points")
    moment = trial.wait_for_moment(command, first=find_points(trial.run)[-1].position.step)
    victim = kill(trial, command)
    newest = find_points(trial.run)[-1]
    shutil.rmtree(newest.path)
    return trial.goes_on(f"{victim} {moment}, and {newest.position.name} was removed")


def sigkill_while_writing(trial: Trial) -> Result:
    """The same, while a resume point is incomplete; also shown by what lies there afterwards."""
    command = trial.start()
    moment = trial.wait_for_moment(command)
    _wait_for_writer(trial, command)
    victim = kill(trial, command)
    if not (begun := list((trial.run / "resume").glob(".step_*.partial"))):
        raise NotHappened("the resume point was complete")
    files = sum(path.is_file() for path in begun[0].rglob("*"))
    return trial.goes_on(f"{victim} with {files} files of {begun[0].name}, {moment}")


def writer_killed(trial: Trial) -> Result:
    """The process that writes a resume point is killed: no such point, and the run goes on."""
    command = trial.start()
    trial.wait_for_moment(command)
    ranks = command.ranks()
    writers: list[int] = []
    if not command.wait_until(lambda: writers.extend(command.writers(ranks)) or writers):
        raise NotHappened("no further resume point was written")
    command.kill([trial.random.choice(writers)])
    result = trial.went_on(command, "")
    said = " ".join(command.said.split())
    if "WARNING: no resume point of" not in said:
        raise NotHappened("the resume point was complete")
    result.happened = said[said.index("WARNING: no resume point of") :][:200]
    return result


def stop_signal(trial: Trial) -> Result:
    """SIGTERM, SIGUSR1 or SIGINT, to the launcher or to every rank: saved, left, and gone on from there."""
    command = trial.start()
    moment = trial.wait_for_moment(command)
    number = trial.random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    ranks = trial.random.random() < 0.5
    command.kill(command.ranks() if ranks else [command.pid], number)
    status, said = command.wait(), " ".join(command.said.split())
    trial.require_unfinished()
    happened = f"{number.name} to {'the ranks' if ranks else 'the launcher'} {moment}: status {status}"
    expected = 130 if number == signal.SIGINT else 75
    if status != expected or f"stopped ({number.name})" not in said:
        problem = f"status {status}, expected {expected}; {command.said[-400:]}"
        return Result(happened, recovered=False, metrics_equal=None, problem=problem)
    return trial.goes_on(happened, allowed=1)


def rank_stopped(trial: Trial) -> Result:
    """A rank stops answering (SIGSTOP): the watchdog ends the run, and the same command goes on."""
    command = trial.start()
    moment = trial.wait_for_moment(command, first=1)
    ranks = command.ranks()
    rank = trial.random.randrange(len(ranks))
    command.kill([ranks[rank]], signal.SIGSTOP)
    status = command.wait()
    trial.require_unfinished()
    happened = f"rank {rank} stopped {moment}: status {status}"
    reports = list((trial.run / "failures/watchdog").glob("*"))
    if status != 3 or not reports:
        problem = f"status {status}, expected 3; {len(reports)} reports; {command.said[-600:]}"
        return Result(happened, recovered=False, problem=problem)
    if left_over := command.left_over(15):
        return Result(happened, recovered=False, problem=f"processes were left running: {left_over}")
    return trial.goes_on(happened)


def corrupted(trial: Trial) -> Result:
    """A file of the newest resume point is damaged (each third time one of the second newest as well): they are passed
    over, and the newest good one is used."""
    template = _killed_run(trial)
    shutil.copytree(template, trial.run, symlinks=True)
    points = find_points(trial.run)
    damaged = points[-2:] if trial.random.random() < 1 / 3 else points[-1:]
    happened = []
    for point in damaged:
        file = trial.random.choice(sorted(path for path in point.path.rglob("*") if path.is_file()))
        happened.append(f"{_damage(trial, file)} {file.relative_to(trial.run)}")
    good = points[-1 - len(damaged)].position
    result = trial.goes_on("; ".join(happened))
    said = " ".join(trial.commands[-1].said.split())
    if not all(f"{point.position.name} is passed over" in said for point in damaged):
        result.recovered, result.problem = False, f"not said to be passed over: {result.problem}"
    if f"from resume/{good.name}" not in said:
        result.recovered, result.problem = False, f"not resumed from {good.name}: {result.problem}"
    elif result.metrics_equal:
        result.recovered, result.problem, result.beyond_promise = True, "", 0
    return result


def _killed_run(trial: Trial) -> Path:
    """A run that was killed late and has four resume points; made once, then copied."""
    made = trial.site.root / "killed" / trial.case.name
    with _making:
        if made.exists():
            return made
        maker = Trial(trial.site, trial.case, trial.random, trial.site.root / "killed" / "work")
        command = maker.start()
        if not command.wait_until(lambda: len(find_points(maker.run)) >= 4):
            raise NotHappened("the run ended before it had four resume points")
        command.kill()
        if len(find_points(maker.run)) < 3:
            raise NotHappened("too few resume points")
        maker.run.rename(made)
    return made


def _damage(trial: Trial, file: Path) -> str:
    content, what = bytearray(file.read_bytes()), trial.random.choice(["byte", "truncation", "missing"])
    if what == "missing" or not content:
        file.unlink()
        return "without"
    at = trial.random.randrange(len(content))
    if what == "truncation":
        file.write_bytes(content[:at])
        return f"cut to {at} of {len(content)} bytes:"
    content[at] ^= 1 << trial.random.randrange(8)
    file.write_bytes(content)
    return f"a bit flipped in byte {at} of"


def _wait_for_writer(trial: Trial, command: Command) -> None:
    resume = trial.run / "resume"
    if not command.wait_until(lambda: any(resume.glob(".step_*.partial"))):
        raise NotHappened("no further resume point was written")
    time.sleep(trial.random.random() * WRITING_SECONDS)


def kill(trial: Trial, command: Command) -> str:
    """Kill all processes, or a rank, and say which. Then all have ended."""
    ranks = command.ranks()
    if not ranks or trial.random.random() < 0.5:
        command.kill()
        victim = "all processes were killed"
    else:
        rank = trial.random.randrange(len(ranks))
        command.kill([ranks[rank]])
        victim = f"rank {rank} was killed (status {command.wait()})"
    trial.require_unfinished()
    if left_over := command.left_over(15):
        raise RuntimeError(f"processes were left running after {victim}: {left_over}")
    return victim
