"""Runs inside a process that belongs to the user: what a run changes there is put back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megarlhf import runtime
from megarlhf.commands.launch import silence_libraries
from megarlhf.commands.process_tree import BUSY
from megarlhf.planning.machine.determinism import environment
from megarlhf.planning.machine.gpu_environment import gpu_environment
from megarlhf.resume.signals import STOP_SIGNALS
from megarlhf.runtime import WITHOUT_STEP, detect_rank, is_shell_of_step

_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR2, signal.SIGVTALRM)
_LOGGERS = ("", "megatron", "torch.distributed", "absl", "httpx", "vllm")


@contextlib.contextmanager
def borrowed_process(caller: str, cfg: Any, *, as_rank: bool = False) -> Iterator[None]:
    """Scope of a run in the user's process, with the environment that `cfg` asks for.

    Afterwards, also after a failure, these are as before: environment variables, signal handlers, torch's global
    switches and random numbers, loggers, warnings, the process group, and the notebook's event loop.

    caller:  name of the public function, for messages
    as_rank: whether the process may be a rank that torchrun or srun has started

    Raises: ValueError where no run can start.
    """
    caller = f"megarlhf.{caller}"
    _require_free(caller, as_rank)
    before = dict(os.environ)
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else None
    with _signals(), _switches_of_torch(), _loggers(), warnings.catch_warnings(), _no_event_loop():
        silence_libraries()
        os.environ[BUSY] = caller
        os.environ.update(environment(cfg) | gpu_environment(cfg.roles()))
        try:
            yield
        except BaseException:
            # Leaving the group would wait for ranks that are still in a collective. The launcher ends them.
            if not (dist.is_initialized() and dist.get_world_size() > 1):
                runtime.shutdown()
            raise
        else:
            runtime.shutdown()
        finally:
            os.environ.clear()
            os.environ.update(before)
            if cores is not None:
                os.sched_setaffinity(0, cores)  # vLLM on a CPU binds the process to some
            gc.collect()  # models of the run are in cycles; the next run needs their memory
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def _require_free(caller: str, as_rank: bool) -> None:
    if BUSY in os.environ:
        raise ValueError(
            f"{caller} was called while {os.environ[BUSY]} is at work in this process, or in the one that has started "
            "it: one at a time. A module that a run imports, such as that of a reward, must start nothing: put the "
            'call under `if __name__ == "__main__":`'
        )
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"{caller} was called in the thread {threading.current_thread().name!r}: only the main thread of a process "
            "gets the signals that ask a run to save and stop. Call it there, or in a process of its own"
        )
    if not as_rank and (info := detect_rank(os.environ)) is not None:
        raise ValueError(
            f"{caller} was called in rank {info.rank} of {info.world_size} of a launcher (torchrun, srun), and every "
            "rank would start a run. Start `megarlhf COMMAND -c FILE` with the launcher, or call this in a process "
            "that no launcher has started"
            + f"; this one is below a shell in a Slurm step: start Python by `{WITHOUT_STEP} python`"
            * is_shell_of_step(os.environ)
        )
    if dist.is_initialized():
        raise ValueError(
            f"{caller}: torch.distributed is initialized in this process, and a run makes its own process groups; call "
            "torch.distributed.destroy_process_group() first"
        )


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: a handler of C, which Python cannot set
                signal.signal(number, handler)


@contextlib.contextmanager
def _switches_of_torch() -> Iterator[None]:
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    threads, dtype, compiles = torch.get_num_threads(), torch.get_default_dtype(), _compiles()
    device = torch.device("cuda") if torch.cuda.is_initialized() else torch.device("cpu")
    randomness = runtime.random_state(device)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        torch.backends.cudnn.deterministic = cudnn[0]
        torch.backends.cudnn.benchmark = cudnn[1]
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.disable = not compiles
        runtime.set_random_state(randomness, device)


def _compiles() -> bool:
    """Whether torch.compile is on. The module with the switch takes seconds to import, and is left alone until then."""
    if "torch._dynamo" in sys.modules:
        return not torch._dynamo.config.disable
    return os.environ.get("TORCH_COMPILE_DISABLE", "0") != "1"


@contextlib.contextmanager
def _loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers


@contextlib.contextmanager
def _no_event_loop() -> Iterator[None]:
    """Hide the event loop of a notebook, in which no other loop could run: rewards and engines run their own."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)
