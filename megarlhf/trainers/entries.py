"""Entry points of the trainers: which function runs a command."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

ENTRIES = {
    "sft": "megarlhf.trainers.supervised.sft:run",
    "rm": "megarlhf.trainers.supervised.rm:run",
    "dpo": "megarlhf.trainers.supervised.dpo:run",
    "rl": "megarlhf.trainers.rl.loop:run",
    "generate": "megarlhf.trainers.generation.generate:run",
    "eval": "megarlhf.trainers.generation.evaluate:run",
}
"""`module:function` by command. The function is called with the configuration and the runtime."""


def import_entry(command: str) -> Callable[..., Any]:
    """Import and return the function of a command. Raises KeyError if there is no such command."""
    module, _, function = ENTRIES[command].partition(":")
    entry: Callable[..., Any] = getattr(import_module(module), function)
    return entry
