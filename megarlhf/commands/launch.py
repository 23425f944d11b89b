"""Becoming ranks: a plain start launches local ranks by torchrun; a launched process joins its run."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from megarlhf import runtime
from megarlhf.runtime import RankInfo


def local_ranks(nproc: int, argv: Sequence[str]) -> int:
    """Run `megarlhf ARGV` again as `nproc` ranks of this machine; returns the exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    # torchrun would say that it sets one thread per rank; say the number instead.
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    return call([*command, "-m", "megarlhf", *argv], {"OMP_NUM_THREADS": threads, **os.environ, MARK: "1"})


def call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command in the foreground; returns its exit status. What asks us to stop is passed on to it."""
    child = subprocess.Popen(command, env=environment)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in handlers:
        signal.signal(number, lambda received, frame: child.send_signal(received))
    try:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the terminal has told the child too; wait for it to end
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


MARK = "MEGARLHF_LAUNCHED"
"""Set in ranks that a plain start launched: the resolved numbers have been printed already."""


def as_rank(info: RankInfo, cfg: Any, entry: str) -> int:
    """Join the run as this rank and call `entry`, a `module:function`, with (cfg, runtime)."""
    logging.basicConfig(
        level=os.environ.get("MEGARLHF_LOG_LEVEL", "INFO" if info.rank == 0 else "WARNING"),
        format=f"[rank {info.rank}] %(levelname)s %(name)s: %(message)s",
    )
    quieten()
    joined = runtime.initialize(info, seed=cfg.run.seed)
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(cfg, joined)
    # Not after a failure: leaving the group may wait for ranks that are stuck in a collective; the launcher ends them.
    runtime.shutdown()
    return 0


def quieten() -> None:
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
