"""Becoming ranks: a plain start starts the local ranks and ends with them; a launched process joins its run.

A rank that a plain start has started does not print its errors: it writes them to a file for the process that started
it, which prints each once and ends with their status. Under torchrun or srun there is no such process of ours. There
rank 0 prints at once, and another rank only when rank 0 has printed nothing for a while: a launcher ends all ranks
when one has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from pathlib import Path
from typing import Any

from megarlhf import runtime
from megarlhf.collective_errors import on_first_rank
from megarlhf.runtime import RankInfo

MARK = "MEGARLHF_LAUNCHED"
"""Set in ranks that a plain start launched, to the folder to which they write their errors."""
PARENT = "MEGARLHF_PARENT"
"""Set beside it, to the number of the process that started them."""

WATCHDOG = 3
"""Exit status of a rank that the watchdog has ended."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
"""From the first rank's failure until the others are stopped: they may fail with the same error, or with another."""
STOP_SECONDS = 10.0
"""From the signal that stops a rank until it is killed."""
SILENCE_SECONDS = 3.0
"""After which another rank than 0 prints its error under a launcher that is not ours."""


def local_ranks(nproc: int, argv: Sequence[str], program: Sequence[str] = ("-m", "megarlhf")) -> int:
    """Run `megarlhf ARGV` again as `nproc` ranks of this machine; returns the exit status. Nothing outlives the call:
    what stops this process (Ctrl-C, SIGTERM, SIGHUP) stops the ranks and what they have started."""
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    # The first rank that has something to report makes it: where this process is killed, none is left over.
    reports = str(Path(tempfile.gettempdir()) / f"megarlhf-ranks-{uuid.uuid4().hex}")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, reports, ignore_errors=True)
        environment = {"OMP_NUM_THREADS": threads, **os.environ, MARK: reports, PARENT: str(os.getpid())}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runtime.free_port())}
        environment |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
        with _received_signals() as received:
            ranks = [
                # A session of its own: what a rank starts can be stopped with it, and Ctrl-C reaches only us.
                subprocess.Popen(
                    [sys.executable, *program, *argv],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,
                )
                for rank in range(nproc)
            ]
            try:
                failed = _wait(ranks, received)
            finally:
                _stop(ranks)
        if received:
            print(f"\nmegarlhf {argv[0]}: stopped ({received[0].name}); all ranks have ended", file=sys.stderr)
            return 128 + received[0]
        return _print_errors(argv[0], Path(reports), nproc) or _print_crash(argv[0], failed, ranks)


@contextlib.contextmanager
def _received_signals() -> Iterator[list[signal.Signals]]:
    """The signals that have asked this process to stop; it goes on, to stop its ranks in order."""
    received: list[signal.Signals] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, lambda signum, frame: received.append(signal.Signals(signum)))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[signal.Signals]) -> int | None:
    """Until all ranks have ended, one has failed, or a signal has come; returns the rank that failed first."""
    failed, deadline = None, float("inf")
    while not received and time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        if failed is None and (ended := [n for n, rank in enumerate(ranks) if rank.poll()]):
            failed, deadline = ended[0], time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    return failed if failed is not None else next((n for n, rank in enumerate(ranks) if rank.returncode), None)


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every rank and its own processes: SIGTERM, and SIGKILL for what does not listen."""
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in ranks:
        _signal_group(rank, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for rank in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        _signal_group(rank, signal.SIGKILL)
        rank.wait()
    if running and sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # the cursor, which a progress bar hides


def _signal_group(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, number)


def _print_errors(command: str, reports: Path, nproc: int) -> int:
    """Print what the ranks have reported, each message once; returns its exit status, 0 when there is none."""
    ranks: dict[str, list[int]] = {}
    status = 0
    for path in sorted(reports.glob("*.json"), key=lambda path: int(path.stem)):
        report = json.loads(path.read_text(encoding="utf-8"))
        ranks.setdefault(report["message"], []).append(int(path.stem))
        status = status or int(report["status"])
    for message, where in ranks.items():
        label = "" if len(where) == nproc else f" (rank {', '.join(map(str, where))})"
        print(f"megarlhf {command}{label}: {message}", file=sys.stderr)
    return status


def _print_crash(command: str, failed: int | None, ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    if failed is None:
        return 0
    # A rank that its watchdog has ended takes others with it, whose collectives break: it says why the run ended.
    failed = next((n for n, rank in enumerate(ranks) if rank.returncode == WATCHDOG), failed)
    status = ranks[failed].returncode
    if status == WATCHDOG:
        how = f"was ended by the watchdog (exit status {status}); its report stands above"
    elif status > 0:
        how = f"ended with exit status {status}; its error stands above"
    else:
        how = f"was killed by {signal.Signals(-status).name}"
        how += ", as the system does when memory runs out" if -status == signal.SIGKILL else ""
    print(f"megarlhf {command}: rank {failed} {how}. All ranks have been ended", file=sys.stderr)
    return status if status > 0 else 128 - status


def print_error(command: str, message: str, status: int) -> None:
    """Print the error that ends this process: once for all ranks, whoever started them."""
    info = None
    with contextlib.suppress(ValueError):  # the error may be in the launcher's own variables
        info = runtime.detect_rank(os.environ)
    if info is not None and MARK in os.environ:
        path = Path(os.environ[MARK]) / f"{info.rank}.json"
        if os.environ.get(PARENT) in (None, str(os.getppid())):  # who started us is there to read it
            path.parent.mkdir(mode=0o700, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"status": status, "message": message}), encoding="utf-8")
            partial.rename(path)
        return
    label = ""
    if info is not None and info.world_size > 1:
        label = f" (rank {info.rank})" if info.rank else ""
        time.sleep(SILENCE_SECONDS if info.rank else 0)
    print(f"megarlhf {command}{label}: {message}", file=sys.stderr, flush=True)


def another_rank_has_failed() -> bool:
    """Whether a rank of a plain start has reported an error: what fails here now fails because that rank has gone."""
    return MARK in os.environ and any(Path(os.environ[MARK]).glob("*.json"))


def as_rank(info: RankInfo, cfg: Any, entry: str, check: Callable[[], None] | None = None) -> int:
    """Join the run as this rank, `check` it on the first rank only, and call `entry`, a `module:function`, with
    (cfg, runtime). What `check` refuses is refused on every rank."""
    logging.basicConfig(
        level=os.environ.get("MEGARLHF_LOG_LEVEL", "INFO" if info.rank == 0 else "WARNING"),
        format=f"[rank {info.rank}] %(levelname)s %(name)s: %(message)s",
    )
    silence_libraries()
    joined = runtime.initialize(info, seed=cfg.run.seed, timeout_seconds=cfg.watchdog.collective_timeout())
    if check is not None:
        on_first_rank(check)
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(cfg, joined)
    # Not after a failure: leaving the group may wait for ranks that are stuck in a collective; the launcher ends them.
    runtime.shutdown()
    return 0


def end_with_parent() -> None:
    """In a rank of a plain start: end when the process that started it dies, be it by SIGKILL, or has died already."""
    if PARENT in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != int(os.environ[PARENT]):
            os._exit(128 + signal.SIGTERM)


def silence_libraries() -> None:
    """Keep other projects' routine announcements out of the log; their errors stay."""
    for name in ("megatron", "torch.distributed", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # Megatron-Core reads .grad of views and calls collectives by names that torch has since renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|vllm")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message=r"(Transformer Engine and Apex are|Apex is) not installed")
    warnings.filterwarnings("ignore", message="full scope is deprecated")
    warnings.filterwarnings("ignore", message="When using async grad allreduce it is recommended")
