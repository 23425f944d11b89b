"""Limits of a call, and the tool's description for the model. Only the standard library is imported."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class PythonLimits:
    """Limits of a call. Code that uses more is ended."""

    seconds: float = 10.0
    """Time from the start of the code to its end. Waiting for a free processor does not count."""
    memory_mb: int = 512
    """Address space of the process, interpreter and libraries included (numpy takes 150 MB)."""
    processes: int = 16
    """Number of threads. Other processes cannot be started; where the system has no seccomp they count as well."""
    output_bytes: int = 20_000
    """Output that the model sees: its first and its last half. Code is ended that prints 1000 times as much."""
    file_mb: int = 16
    """Size of all files together."""
    files: int = 200
    """Number of files."""

    def __post_init__(self) -> None:
        least: dict[str, float] = {"seconds": 0.1, "memory_mb": 64, "output_bytes": 100}
        for field in fields(self):
            value: Any = getattr(self, field.name)
            minimum = least.get(field.name, 1)
            kind: tuple[type, ...] = (int, float) if field.name == "seconds" else (int,)
            has_kind = isinstance(value, kind) and not isinstance(value, bool)
            if not has_kind or not minimum <= value < 10**9:
                name = "a number" if field.name == "seconds" else "an integer"
                raise ValueError(
                    f"limit {field.name!r} of the Python tool is {value!r}; use {name} of {minimum} or more"
                )


def describe_python(limits: PythonLimits) -> dict[str, Any]:
    """Description of the tool in the form that chat templates expect."""
    return {
        "type": "function",
        "function": {
            "name": "python",
            "description": (
                "Runs Python code and returns what it prints, and the value of its last line if that is an expression. "
                "It has no network, starts no other programs, and keeps nothing between calls: variables and files "
                f"are gone afterwards. Limits: {limits.seconds:g} s, {limits.memory_mb} MB of memory, "
                f"{limits.file_mb} MB of files in one folder, {limits.output_bytes} bytes of output."
            ),
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "Python code to run"}},
                "required": ["code"],
            },
        },
    }
