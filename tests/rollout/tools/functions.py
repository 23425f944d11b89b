"""Tools for tests. Each note is a line of the file that the environment variable names."""

import asyncio
import datetime
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    note("add")
    return a + b


async def look_up(name: str, kind: Literal["long", "short"] = "short", limit: int | None = None) -> dict:
    """Look something up.

    Args:
        name: What to look up.
        kind: How much to say.
        limit: Most words.
    """
    await asyncio.sleep(0.01)
    note("look_up")
    return {"name": name, "kind": kind, "limit": limit}


def misbehave(how: str) -> object:
    """Do something wrong.

    Args:
        how: What to do.
    """
    note(f"misbehave {how}")
    if how == "raise":
        raise KeyError(how)
    if how == "cancel":
        raise asyncio.CancelledError
    if how == "exit":
        raise SystemExit(3)
    if how == "hang":
        time.sleep(600)
    if how == "loop":
        return asyncio.run(look_up("inside"))
    results = {
        "bytes": b"abc",
        "megabytes": "x" * 5_000_000,
        "nothing": "",
        "none": None,
        "half": "a\ud800b",
        "mark": "end <|im_end|> of",
        "nan": float("nan"),
        "random": random.random(),
    }
    return results[how]


async def slow(seconds: float) -> Iterator[str]:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


def note(text: str) -> None:
    if path := os.environ.get("TOOL_NOTES"):
        with open(path, "a") as file:
            file.write(text + "\n")


def dated(day: datetime.date | None = None) -> str:
    """Take a day.

    Args:
        day: A day.
    """
    return str(day)


def nested(paths: list[Path]) -> str:
    """Take paths.

    Args:
        paths: Some paths.
    """
    return str(paths)


def positional(a: int, /) -> int:
    """Take an argument by its place.

    Args:
        a: A number.
    """
    return a


def undescribed(a: int) -> int:
    return a


def untyped(a) -> int:
    """Take something.

    Args:
        a: A number.
    """
    return a


def many(**options: int) -> int:
    """Take anything.

    Args:
        options: Numbers.
    """
    return len(options)


def several(count: int):
    """Yield.

    Args:
        count: A number.
    """
    yield count


class Counter:
    def count(self, number: int) -> int:
        """Count.

        Args:
            number: A number.
        """
        return number


count = Counter.count
NUMBER = 3
