"""Configurations that come through a pipe, as with `-c <(sed s/8/16/ sft.yaml)`, `-c -` and `-c /dev/stdin`."""

from __future__ import annotations

import contextlib
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_OPTIONS = ("-c", "--config")
_STANDARD_INPUT = "/dev/stdin"


@contextlib.contextmanager
def without_pipes(argv: Sequence[str]) -> Iterator[list[str]]:
    """The arguments, with a temporary file in place of each pipe and of standard input (`-`).

    A pipe can be read once, and only by this process. A configuration is read again by the ranks.
    """
    words = list(argv)
    with contextlib.ExitStack() as stack:
        for n, word in enumerate(words):
            option, equals, value = word.partition("=")
            if option in _OPTIONS and equals and _is_pipe(value):
                words[n] = f"{option}={_copied(value, stack)}"
            elif n and words[n - 1] in _OPTIONS and _is_pipe(word):
                words[n] = _copied(word, stack)
        yield words


def _is_pipe(path: str) -> bool:
    if path in ("-", _STANDARD_INPUT):
        return True
    try:
        return stat.S_ISFIFO(Path(path).stat().st_mode)
    except (OSError, ValueError):
        return False


def _copied(path: str, stack: contextlib.ExitStack) -> str:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megarlhf-config-"))
    file = Path(folder) / "from_a_pipe.yaml"
    file.write_bytes(Path(_STANDARD_INPUT if path == "-" else path).read_bytes())
    return str(file)
