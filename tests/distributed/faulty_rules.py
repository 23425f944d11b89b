"""Rule rewards that hang on rank 1, each in its own way: a run names them as `tests.distributed.faulty_rules:NAME`."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist


def sleeps(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """In a system call, and takes every exception for a reward of 0."""
    try:
        if dist.get_rank() == 1:
            time.sleep(1000)
    except Exception:  # noqa: BLE001 -- as users write it
        return 0.0
    return 1.0


def backtracks(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """In C code that keeps Python's lock, so that no thread runs."""
    return float(dist.get_rank() == 1 and re.match(r"(a+)+$", "a" * 60 + "b") is not None)


def receives(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """In a collective that nobody joins."""
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), src=0)
    return 1.0


def slow(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """Once longer than the limit, and comes to its end in what looks like a collective, where nothing interrupts it."""
    if dist.get_rank() == 1 and not _SLEPT:
        _SLEPT.append(True)
        as_in_a_collective(lambda: time.sleep(3))
    return 1.0


_SLEPT: list[bool] = []


def as_in_a_collective(call: Callable[[], object]) -> None:
    """Calls it from a function that stands, as far as a stack says, in torch's file of collectives."""
    names: dict[str, Any] = {}
    exec(compile("def wait(call):\n    call()\n", "/torch/distributed/distributed_c10d.py", "exec"), names)
    names["wait"](call)
