"""Types of command-line arguments, for argparse: a text in, a value or an ArgumentTypeError out."""

from __future__ import annotations

import argparse
import math
from typing import Any

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Once(argparse.Action):
    """An option that may be given once: argparse keeps the last and drops the others in silence."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if (before := getattr(namespace, self.dest)) != self.default:
            parser.error(f"{option_string} is given twice ({before} and {values}), and only one would count; give one")
        setattr(namespace, self.dest, values)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """`10,11,11`"""
    return tuple(positive(part) for part in text.split(","))


def gigabits(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive, finite number of gigabits per second")
    return speed


def num_bytes(text: str) -> int:
    """`5GB`, `500MB`, `2GiB`, or bytes."""
    digits = text.rstrip("BbKkMmGgTtIi ")
    unit = text[len(digits) :].strip().upper() or "B"
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB") from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size that holds anything; give one such as 5GB")
    return size
