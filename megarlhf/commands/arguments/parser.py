"""Command lines: a parser whose errors suggest the nearest known word, and types of arguments.

A type turns a text into a value, or raises ArgumentTypeError.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the nearest known word, printed by the first of several ranks."""

    below: Callable[[], str] | None = None
    """Makes text that the help ends with."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep the words for errors: argparse's error of a missing argument does not name wrong ones."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        text = super().format_help()
        return text if self.below is None else f"{text}\n{self.below()}\n"

    def error(self, message: str) -> NoReturn:
        """Print the message and end with exit status 2."""
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            print(f"{self.prog}: {self._better(message)}", file=sys.stderr)
        sys.exit(2)

    def _better(self, message: str) -> str:
        if wrong := re.fullmatch(r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL):
            name, given, known = wrong.groups()
            choices = re.findall(r"[\w.-]+", known)
            meant = _suggestion(given, choices)
            kind = "command" if name == "COMMAND" else name
            return f"unknown {kind} {given!r}{meant + ' Known' if meant else '; known'}: {', '.join(choices)}"
        if message.startswith("the following arguments are required: "):
            known_options = self.options()
            options = [word for word in self._given if word.startswith("--") and word != "--"]
            unknown = [o for o in options if not any(name.startswith(o.partition("=")[0]) for name in known_options)]
            problems = [f"{message.partition(': ')[2]} is missing", *map(self._unknown, unknown)]
        elif message.startswith("unrecognized arguments: "):
            problems = list(map(self._unknown, message.partition(": ")[2].split()))
        else:
            return message
        return "; ".join([*problems, f"see `{self.prog} --help`"])

    def _unknown(self, given: str) -> str:
        name = given.partition("=")[0]
        if not given.startswith("-"):
            return f"{given!r} is one too many"
        if "." in name:
            return f"unknown option {given}: a key of the configuration has no dashes before it: {given.lstrip('-')}"
        return f"unknown option {name}{_suggestion(name, self.options())}"

    def options(self) -> list[str]:
        """Options of this parser and of its commands."""
        inner = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        below = [sub for action in inner for sub in action.choices.values()]
        return list(dict.fromkeys([*self._option_string_actions, *(o for sub in below for o in sub.options())]))

    def takes_value(self, option: str) -> bool:
        """Whether the word after this option is its value."""
        action = self._option_string_actions.get(option)
        return action is not None and action.nargs != 0


def _suggestion(given: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def command_first(argv: Sequence[str], commands: Mapping[str, Callable[[], Parser]]) -> list[str]:
    """The words with the command's name first, if it comes after some of its options."""
    for n, word in enumerate(argv):
        if word in commands and (n == 0 or not commands[word]().takes_value(argv[n - 1])):
            return [word, *argv[:n], *argv[n + 1 :]]
    return list(argv)


class Once(argparse.Action):
    """An option that may be given once. By default argparse silently keeps the last value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if (before := getattr(namespace, self.dest)) != self.default:
            parser.error(f"{option_string} is given twice ({before} and {values}), and only one can count; give one")
        setattr(namespace, self.dest, values)


def add_families(parser: argparse.ArgumentParser) -> None:
    """Add `--family` to a command without a configuration, which has `model.families`."""
    text = "a module of yours with a model family (mine.family); may be given several times"
    parser.add_argument("--family", dest="families", action="append", default=[], metavar="MODULE", help=text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """`10,11,11`"""
    return tuple(positive(part) for part in text.split(","))


def positive_float(text: str, of: str = "") -> float:
    """of: the unit, for the error"""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive, finite number{of}")
    return value


def gigabits(text: str) -> float:
    return positive_float(text, of=" of gigabits per second")


def num_bytes(text: str) -> int:
    """`5GB`, `500MB`, `2GiB`, or bytes."""
    digits = text.rstrip("BbKkMmGgTtIi ")
    unit = text[len(digits) :].strip().upper() or "B"
    try:
        size = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB") from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive size; give one such as 5GB")
    return size
