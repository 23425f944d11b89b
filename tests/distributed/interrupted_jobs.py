"""Commands that ranks run and that are cut off, receive a signal, hang, or find no room on the disk."""

import contextlib
import errno
import importlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from megarlhf.commands import cli
from megarlhf.observe.records.jsonl import StepLines
from megarlhf.parallel import step as training_step
from megarlhf.resume.points import point, writer
from megarlhf.runtime import Runtime
from megarlhf.trainers.supervised import rm
from tests.distributed.jobs import command_status


class Killed(Exception):
    """Stands for a process that ends in the middle, wherever it is."""


@contextlib.contextmanager
def at_call(calls: int, owner: str, name: str, action: Callable[[], None]) -> Iterator[list[int]]:
    """`action` happens at the call numbered `calls` of a method (`module:Class`) or function (`module`), before it does
    anything. Yields a list with one item for each call so far."""
    module, _, kind = owner.partition(":")
    place: Any = importlib.import_module(module)
    place = getattr(place, kind) if kind else place
    real, made = getattr(place, name), list[int]()

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        if len(made) == calls:
            action()
        return real(*arguments, **options)

    with mock.patch.object(place, name, counted):
        yield made


def _kill() -> None:
    raise Killed


def command_until(runtime: Runtime, calls: int, owner: str, method: str, *argv: str) -> tuple[str, str]:
    """A command that is cut off at the call numbered `calls` of a method (`module:Class`), before it does anything.

    Returns: `killed`, or `ended` where there were fewer calls; and what this rank wrote.
    """
    main, killed = cli.main, -1

    def main_until(*arguments: Any) -> int:
        try:
            return main(*arguments)
        except Killed:
            return killed

    with at_call(calls, owner, method, _kill), mock.patch.object(cli, "main", main_until):
        status, written = command_status(runtime, *argv)
    assert status in (0, killed), written
    return ("killed" if status == killed else "ended"), written


def command_with_signal(runtime: Runtime, calls: int, owner: str, method: str, *argv: str) -> tuple[int, str]:
    """A command that receives SIGTERM at the call numbered `calls` of a method; its status and what it wrote."""
    return command_with(runtime, signal.SIGTERM, 0, calls, owner, method, *argv)


def command_with(
    runtime: Runtime, number: int, rank: int, calls: int, owner: str, method: str, *argv: str
) -> tuple[int, str]:
    """The same of any signal, that one rank receives."""

    def receive() -> None:
        if runtime.rank == rank:
            os.kill(os.getpid(), number)
            time.sleep(0.1)  # until it is noted, in a thread

    with at_call(calls, owner, method, receive) as made:
        result = command_status(runtime, *argv)
    assert len(made) >= calls, f"{owner}.{method} was called {len(made)} times only"
    return result


def command_that_is_late(runtime: Runtime, kind: str, calls: int, *argv: str) -> tuple[int, str]:
    """A command whose rule reward, at a call of rank 0, hangs, or takes longer than its limit where nothing can
    interrupt it."""
    from tests.distributed.faulty_rules import as_in_a_collective

    def wait() -> None:
        if runtime.is_main:
            time.sleep(1000) if kind == "hangs" else as_in_a_collective(lambda: time.sleep(3))

    with at_call(calls, "megarlhf.rollout.rewards.score", "call_in_rank", wait) as made:
        result = command_status(runtime, *argv)
    assert len(made) >= calls
    return result


def command_that_hangs(runtime: Runtime, calls: int, owner: str, method: str, *argv: str) -> tuple[int, str]:
    """A command in which a call of a method does not come to its end by itself; its status and what it wrote."""
    with at_call(calls, owner, method, lambda: time.sleep(1000)) as made:
        result = command_status(runtime, *argv)
    assert len(made) >= calls
    return result


def stopped_rollout(runtime: Runtime, run: str, *argv: str) -> tuple[int, str, list[tuple[list[str], bool, bool]]]:
    """SIGTERM to rank 1 when the second rollout begins; status, words, and how things stand when the engine is closed:
    the resume points, whether the run is locked, whether the ranks can still talk."""
    from megarlhf.resume.points.point import find_points

    engine, seen = "megarlhf.rollout.megatron_engine:MegatronEngine", []

    def look() -> None:
        points = [point.path.name for point in find_points(Path(run))]
        seen.append((points, (Path(run) / "lock").exists(), dist.is_initialized()))

    with at_call(1, engine, "close", look):
        return *command_with(runtime, signal.SIGTERM, 1, 2, engine, "generate", *argv), seen


def command_that_skips(runtime: Runtime, calls: int, *argv: str) -> tuple[int | str, str]:
    """A command in which every step counts as a spike once three gradient norms are known; cut off at a call of
    `Trainer.accumulate`, or not (0)."""
    from megarlhf.trainers.run import skipped_steps

    trainer = "megarlhf.parallel.step:Trainer"
    with mock.patch.object(skipped_steps, "MIN_NORMS", 3), mock.patch.object(skipped_steps, "median", return_value=0.0):
        if calls:
            return command_until(runtime, calls, trainer, "accumulate", *argv)
        return command_status(runtime, *argv)


def command_on_a_full_disk(runtime: Runtime, rank: int, first: int, last: int, *argv: str) -> str:
    """A command during whose updates `first` to `last` a rank can write no file beyond 300 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = "megarlhf.parallel.step:Trainer"

    def fill() -> None:
        if runtime.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))

    def free() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    try:
        with at_call(first, trainer, "step", fill), at_call(last + 1, trainer, "step", free):
            status, written = command_status(runtime, *argv)
    finally:
        free()
    assert status == 0, written
    return written


def command_on_a_tight_disk(runtime: Runtime, run: Path, *argv: str) -> str:
    """A command that has room for a point only where none that was passed over takes it."""

    def disk_usage(path: Path) -> Any:
        return SimpleNamespace(free=0 if list((run / "resume").glob("*.passed_over")) else 1 << 40)

    patched = SimpleNamespace(**{**vars(shutil), "disk_usage": disk_usage})
    with mock.patch.object(point, "shutil", patched), mock.patch.object(point, "allocated_bytes", return_value=1 << 40):
        status, written = command_status(runtime, *argv)
    assert status == 0, written
    return written


def command_whose_line_waits(runtime: Runtime, line: int, calls: int, *argv: str) -> tuple[str, str]:
    """A command that finds no room for a line of metrics.jsonl, and is cut off at a call of `Trainer.step`."""
    real, made = StepLines.flush, list[int]()

    def write(self: StepLines) -> None:
        made.extend([1] if self._pending else [])
        if len(made) != line:
            real(self)

    with mock.patch.object(StepLines, "flush", write):
        return command_until(runtime, calls, "megarlhf.parallel.step:Trainer", "step", *argv)


def command_whose_directory_moves(runtime: Runtime, run: Path, *argv: str) -> tuple[int, str]:
    """A command whose run directory gets another name when the third update begins."""
    with at_call(3, "megarlhf.parallel.step:Trainer", "step", lambda: run.rename(f"{run}-moved") and None):
        return command_status(runtime, *argv)


def points_at_updates(runtime: Runtime, run: Path, *argv: str) -> list[list[str]]:
    """The resume points that are there whenever weights are about to change, where writing one takes a second longer
    than anything else."""
    real, real_clip = writer._write_files, training_step.clip_grad_by_total_norm_fp32
    seen: list[list[str]] = []

    def write(*arguments: Any) -> Any:
        time.sleep(1)
        return real(*arguments)

    def clip(*arguments: Any) -> None:
        seen.append([each.position.name for each in point.find_points(run)])
        real_clip(*arguments)

    with (
        mock.patch.object(writer, "_write_files", write),
        mock.patch.object(training_step, "clip_grad_by_total_norm_fp32", clip),
    ):
        status, written = command_status(runtime, *argv)
    assert status == 0, written
    return seen


def command_stopped_while_it_scales(runtime: Runtime, when: str, *argv: str) -> tuple[int, str]:
    """SIGTERM when the scores are `measured` that a reward model is scaled by, or when its head `changes`."""
    real = rm.validation_sums

    def measure(objective: Any, role: Any, samples: Any, should_stop: Any = None) -> Any:
        sums = real(objective, role, samples, should_stop)
        if when == "measured" and should_stop is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return sums

    with mock.patch.object(rm, "validation_sums", measure):
        if when == "measured":
            return command_status(runtime, *argv)
        return command_with_signal(runtime, 1, "megarlhf.trainers.supervised.rm", "divide_head", *argv)


def command_on_a_read_only_disk(runtime: Runtime, patched: bool, *argv: str) -> tuple[int, str, int]:
    """Status, words, and how many roles were built; `patched`: no file can be written."""

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    refused = mock.patch.object(Path, "write_text", refuse) if patched else contextlib.nullcontext()
    with refused, at_call(0, "megarlhf.trainers.supervised.loop", "build_role", _kill) as made:
        return *command_status(runtime, *argv), len(made)
