"""Check of an environment that another Python runs: `main` is run there, as `own_code/interpreter.py` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarlhf.own_code.digest import Source, source_of
from megarlhf.own_code.interpreter import answer_request, ask_process
from megarlhf.rollout.environments.checks import check_environment

SECONDS = 120.0
"""Time limit for importing the user's module."""


def look_at(function: str, args: Mapping[str, Any], interface: str, python: str) -> Source:
    """Check an environment as `check_environment` does, under the interpreter `python`.

    Raises: ValueError, also where `python` cannot run it.
    """
    request = {"function": function, "args": dict(args), "interface": interface}
    answer = ask_process(__name__, request, python, f"environment {function!r}", SECONDS)
    return Source(answer["file"], answer["digest"])


def _answer(request: Mapping[str, Any]) -> dict[str, str]:
    check_environment(request["function"], request["args"], request["interface"])
    return source_of(request["function"], "environment")._asdict()


def main() -> None:
    """Answer a request of `look_at`."""
    answer_request(_answer)


if __name__ == "__main__":
    main()
