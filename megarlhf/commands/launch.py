"""Starting ranks and joining a run: a plain start starts the local ranks and ends with them.

Ranks of a plain start write their errors to files for the process that started them, which prints each error once and
ends with its status. Under torchrun or srun there is no such process: rank 0 prints at once, and another rank only
after a while without an error of rank 0, since a launcher ends all ranks when one has failed.

A signal that asks a plain start to stop is forwarded to its ranks, which save and end by themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarlhf import runtime
from megarlhf.atomic_write import atomic_write
from megarlhf.collective_errors import on_first_rank
from megarlhf.commands.process_tree import PARENT
from megarlhf.planning.machine.determinism import require_deterministic_device
from megarlhf.planning.machine.nodes import check_nodes, require_gpus
from megarlhf.resume.points.point import find_points
from megarlhf.resume.signals import (
    INTERRUPTED,
    KEEP_EARLY,
    TO_BE_QUEUED_AGAIN,
    Repeats,
    StopRun,
    early,
    heard_signals,
    held_back,
    ignore_stop_signals,
    leave_terminal,
)
from megarlhf.runtime import RankInfo

MARK = "MEGARLHF_LAUNCHED"
"""Variable in ranks of a plain start: the folder to which they write their errors."""
JOB_STATE = "MEGARLHF_JOB_STATE"
"""Variable of the batch scripts in slurm/: the folder that keeps a job's state from one attempt to the next."""
SAVED = (TO_BE_QUEUED_AGAIN, INTERRUPTED)
"""Exit statuses of a run that was asked to stop and has saved."""

WATCHDOG = 3
"""Exit status of a rank that the watchdog has ended."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
"""Time from the first rank's failure until the others are stopped. They may report the same error, or another."""
SAVE_SECONDS = 60.0
"""Time for the others to leave after a first rank has saved and left."""
KILL_SECONDS = 1.0
"""Time after SIGKILL to wait for a rank's own processes. In a container nobody may reap them."""
SILENCE_SECONDS = 3.0
"""Time after which another rank than 0 prints its error under torchrun or srun."""


@dataclass(frozen=True)
class RanksEnd:
    """How the ranks of a plain start have ended."""

    status: int
    """Exit status of the run; 0 where it is complete."""
    messages: tuple[tuple[str, str], ...] = ()
    """Pairs of the ranks that report a message ("" for all of them, else " (rank 1)") and the message, each once."""
    at_once: bool = False
    """Whether a signal has ended the ranks before they could save."""


def local_ranks(nproc: int, argv: Sequence[str], program: Sequence[str] = ("-m", "megarlhf")) -> int:
    """Run `megarlhf ARGV` again as `nproc` ranks of this machine, and print their errors; returns the exit status.

    See `run_local_ranks`.
    """
    end = run_local_ranks(nproc, argv, program)
    for label, message in end.messages:
        print(f"{end.at_once * chr(10)}megarlhf {argv[0]}{label}: {message}", file=sys.stderr)
    return end.status


def run_local_ranks(nproc: int, argv: Sequence[str], program: Sequence[str] = ("-m", "megarlhf")) -> RanksEnd:
    """Run `megarlhf ARGV` again as `nproc` ranks of this machine, and wait for them. No process outlives it.

    The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 asks the ranks to save and stop, and their status is returned. A second
    SIGINT or SIGTERM stops the ranks and their own processes at once.
    """
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    # Made by the first rank with an error, so that no folder is left over if this process is killed.
    reports = str(Path(tempfile.gettempdir()) / f"megarlhf-ranks-{uuid.uuid4().hex}")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, reports, ignore_errors=True)
        # Here, not on rank 0: a port that is free now may be taken by the time a rank is ready.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {"OMP_NUM_THREADS": threads, **os.environ, MARK: reports, PARENT: str(os.getpid())}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), runtime.STORE_IS_THERE: "True"}
        environment |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        with _received_signals() as received:
            with held_back() if argv[0] in KEEP_EARLY else contextlib.nullcontext():
                ranks = [
                    # In a session of its own, a rank can be stopped with its processes, and Ctrl-C reaches only us.
                    subprocess.Popen(
                        [sys.executable, *program, *argv],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        start_new_session=True,
                    )
                    for rank in range(nproc)
                ]
            try:
                failed = _wait(ranks, received, Path(reports))
            finally:
                _stop(ranks)
        if received.at_once or (failed is not None and _died_of(received.forwarded, ranks[failed].returncode, reports)):
            stopped = ("", f"stopped ({received.last.name}); all ranks have ended")
            return RanksEnd(128 + received.last, (stopped,), at_once=True)
        return _read_end(Path(reports), failed, ranks)


class _Received:
    """Signals that have asked this process to stop. It goes on, to end its ranks in order."""

    def __init__(self) -> None:
        self.at_once = False
        self.forwarded: list[signal.Signals] = []
        """Signals for the ranks, in order."""
        self.last = signal.SIGTERM
        self._repeats = Repeats()

    def receive(self, signum: int, frame: Any) -> None:
        received = signal.Signals(signum)
        kind = self._repeats.kind(received, time.monotonic())
        if received == signal.SIGHUP:
            leave_terminal()
        if kind == "second":
            self.at_once, self.last = True, received
        elif kind == "first":
            self.forwarded.append(received)
            self.last = received


@contextlib.contextmanager
def _received_signals() -> Iterator[_Received]:
    received = _Received()
    before = {signum: signal.signal(signum, received.receive) for signum in heard_signals()}
    for signum in early():  # received while the start was checked
        received.receive(signum, None)
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: _Received, reports: Path) -> int | None:
    """Wait until all ranks have ended, one has failed, or they must stop at once. Forwards signals.

    Returns: the first rank that failed; if none has, the first that has saved and left; None otherwise.
    """
    failed, saved, deadline, num_sent = None, False, float("inf"), 0
    while True:
        for signum in received.forwarded[num_sent:]:
            num_sent += 1
            for rank in ranks:
                rank.send_signal(signum)
        statuses = [rank.poll() for rank in ranks]
        for n, status in enumerate(statuses):
            leaves = status in SAVED and (reports / f"{n}.json").exists()
            if status and (failed is None or (saved and not leaves)):
                failed, saved = n, leaves
                deadline = time.monotonic() + (SAVE_SECONDS if saved else GRACE_SECONDS)
        if received.at_once or time.monotonic() > deadline or None not in statuses:
            return failed
        time.sleep(POLL_SECONDS)


def _died_of(forwarded: Sequence[signal.Signals], status: int, reports: str) -> bool:
    """Whether a forwarded signal has ended a rank, which was not ready to save and has reported nothing."""
    return status in [code for signum in forwarded for code in (-signum, 128 + signum)] and not Path(reports).exists()


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every rank and its own processes at once. SIGTERM would ask a rank to save."""
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
    deadline = time.monotonic() + KILL_SECONDS
    while any(_has_processes(rank.pid) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 10)
    if running and sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # show the cursor, which a progress bar hides


def _has_processes(group: int) -> bool:
    """Whether a group has processes. A killed one counts until it has ended and its parent has reaped it."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _read_end(reports: Path, failed: int | None, ranks: Sequence[subprocess.Popen[bytes]]) -> RanksEnd:
    """Read the ranks' reports, or how the first rank ended. The status of a run that has saved is returned only if
    there was no error."""
    where: dict[str, list[int]] = {}
    statuses: list[int] = []
    for path in sorted(reports.glob("*.json"), key=lambda path: int(path.stem)):
        report = json.loads(path.read_text(encoding="utf-8"))
        where.setdefault(report["message"], []).append(int(path.stem))
        statuses.append(int(report["status"]))
    messages = tuple(
        ("" if len(reporting) == len(ranks) else f" (rank {', '.join(map(str, reporting))})", message)
        for message, reporting in where.items()
    )
    if errors := [status for status in statuses if status not in SAVED]:
        return RanksEnd(errors[0], messages)
    if failed is not None and not (statuses and ranks[failed].returncode in SAVED):
        # Ended by its watchdog, a rank breaks the others' collectives. Its report says why the run ended.
        failed = next((n for n, rank in enumerate(ranks) if rank.returncode == WATCHDOG), failed)
        status = ranks[failed].returncode
        return RanksEnd(status if status > 0 else 128 - status, (*messages, ("", _describe_crash(failed, status))))
    return RanksEnd(statuses[0] if statuses else 0, messages)


def _describe_crash(failed: int, status: int) -> str:
    if status == WATCHDOG:
        how = f"was ended by the watchdog (exit status {status}); its report is above"
    elif status > 0:
        how = f"ended with exit status {status}; its error is above"
    else:
        how = f"was killed by {signal.Signals(-status).name}"
        how += ", as the system does when memory runs out" if -status == signal.SIGKILL else ""
    return f"rank {failed} {how}. All ranks have been ended"


def print_error(command: str, message: str, status: int) -> None:
    """Print the error that ends this process, once for all ranks, under any launcher."""
    info = None
    with contextlib.suppress(ValueError):  # the error may be about the launcher's own variables
        info = runtime.detect_rank(os.environ)
    if info is not None and MARK in os.environ:
        path = Path(os.environ[MARK]) / f"{info.rank}.json"
        if os.environ.get(PARENT) in (None, str(os.getppid())):  # the process that reads it still exists
            path.parent.mkdir(mode=0o700, exist_ok=True)
            atomic_write(path, json.dumps({"status": status, "message": message}), synced=False)
        return
    if status in SAVED and info is not None and info.rank:
        return  # every rank has saved and has the same message
    if info is not None:
        _tell_job(f"exit.{info.rank}", f"{status}\n{message}")
    label = ""
    if info is not None and info.world_size > 1:
        label = f" (rank {info.rank})" if info.rank else ""
        time.sleep(SILENCE_SECONDS if info.rank else 0)
        if info.rank and _heard_from_job("exit.0") == f"{status}\n{message}\n":
            return  # rank 0 has printed it, and the launcher has not ended this rank yet
    print(f"megarlhf {command}{label}: {message}", file=sys.stderr, flush=True)


def _tell_job(name: str, text: str) -> None:
    """Write a line for the batch script, which runs outside the container and reads no configuration.

    If it cannot be written, the script decides without it.
    """
    if JOB_STATE in os.environ:
        with contextlib.suppress(OSError):
            (Path(os.environ[JOB_STATE]) / name).write_text(f"{text}\n", encoding="utf-8")


def _heard_from_job(name: str) -> str | None:
    """A line that another rank has written there."""
    with contextlib.suppress(OSError):
        return (Path(os.environ[JOB_STATE]) / name).read_text(encoding="utf-8") if JOB_STATE in os.environ else None
    return None


def another_rank_has_failed() -> bool:
    """Whether a rank of a plain start has reported an error. Failures of this rank then follow from its end."""
    return MARK in os.environ and any(Path(os.environ[MARK]).glob("*.json"))


def as_rank(
    info: RankInfo,
    cfg: Any,
    entry: str | Callable[..., object],
    check: Callable[[], None] | None = None,
    *,
    reads: Path | None = None,
) -> int:
    """Join the run as this rank, check it, and call `entry`; returns the exit status.

    entry: a function, or its name as `module:function`, called with (cfg, runtime)
    check: see `join`
    reads: for a command that only reads, the path that it reads. `entry` gets it too, and nodes are not checked
    """
    joined = join(info, cfg, check, only_reads=reads is not None)
    run = _named(entry) if isinstance(entry, str) else entry
    try:
        run(cfg, joined, *([] if reads is None else [reads]))
    except StopRun:  # all ranks have saved
        ignore_stop_signals()
        leave_together()
        raise
    # Not after a failure: leaving the group may wait for ranks in a collective. The launcher ends them.
    leave_together()
    return 0


def _named(entry: str) -> Callable[..., object]:
    module, _, function = entry.partition(":")
    named: Callable[..., object] = getattr(importlib.import_module(module), function)
    return named


def join(
    info: RankInfo, cfg: Any, check: Callable[[], object] | None = None, *, only_reads: bool = False
) -> runtime.Runtime:
    """Join the run as this rank: log, device, process group, and the checks of the nodes. Collective.

    check: called on the first rank only; its error is raised on every rank
    """
    logging.basicConfig(
        level=os.environ.get("MEGARLHF_LOG_LEVEL", "INFO" if info.rank == 0 else "WARNING"),
        format=f"[rank {info.rank}] %(levelname)s %(name)s: %(message)s",
    )
    silence_libraries()
    require_gpus(info.rank)
    joined = runtime.initialize(
        info,
        seed=cfg.run.seed,
        timeout_seconds=cfg.watchdog.collective_timeout(),
        deterministic=cfg.run.deterministic,
    )
    require_deterministic_device(cfg, joined)
    if check is not None:
        on_first_rank(check)
    if only_reads:
        return joined
    for note in check_nodes(cfg, joined):
        logging.getLogger(__name__).warning(note)
    if info.rank == 0:
        if _heard_from_job("began") is None:
            _tell_job("began", _progress(cfg.run.dir))
        _tell_job("run_dir", str(cfg.run.dir.absolute()))
        if JOB_STATE in os.environ and cfg.run.on_existing == "overwrite":
            logging.getLogger(__name__).warning(
                "run.on_existing = overwrite: if Slurm queues this job again, as before a time limit, it will be "
                "refused; with run.on_existing=resume it goes on"
            )
    return joined


def _progress(run_dir: Path) -> str:
    """The newest resume point, and the number of lines in the rollout bank, as the batch script writes them."""
    points = find_points(run_dir)
    lines = 0
    for path in (run_dir / "bank").rglob("*.jsonl"):
        with contextlib.suppress(OSError):
            lines += path.read_bytes().count(b"\n")
    return (points[-1].position.name if points else "none") + (f"+{lines}" if lines else "")


def leave_together() -> None:
    """Leave the run together. srun (--wait) ends the other ranks some time after the first has left, and one of them
    may still be writing."""
    if dist.is_initialized():
        dist.barrier()
    runtime.shutdown()


def silence_libraries() -> None:
    """Keep routine messages of other projects out of the log; their errors stay."""
    for name in ("megatron", "torch.distributed", "absl", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # Megatron-Core reads .grad of views and calls collectives by names that torch has since renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|vllm")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message=r"(Transformer Engine and Apex are|Apex is) not installed")
    # Each rank has chosen its GPU before.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    warnings.filterwarnings("ignore", message="full scope is deprecated")
    warnings.filterwarnings("ignore", message="When using async grad allreduce it is recommended")
