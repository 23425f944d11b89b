"""A configuration that comes through a pipe, as `-c <(sed s/8/16/ sft.yaml)` and `-c /dev/stdin` give it."""

from __future__ import annotations

import contextlib
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_OPTIONS = ("-c", "--config")


@contextlib.contextmanager
def without_pipes(argv: Sequence[str]) -> Iterator[list[str]]:
    """The arguments, with a file in place of a pipe: it can be read once, and only by this process, and a configuration
    is read again by the ranks that are started. The file is removed at the end."""
    given = list(argv)
    with contextlib.ExitStack() as stack:
        for number, word in enumerate(given):
            option, equals, value = word.partition("=")
            if option in _OPTIONS and equals and _is_pipe(value):
                given[number] = f"{option}={_kept(value, stack)}"
            elif number and given[number - 1] in _OPTIONS and _is_pipe(word):
                given[number] = _kept(word, stack)
        yield given


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(Path(path).stat().st_mode)
    except (OSError, ValueError):
        return False


def _kept(path: str, stack: contextlib.ExitStack) -> str:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megarlhf-config-"))
    file = Path(folder) / "from_a_pipe.yaml"
    file.write_bytes(Path(path).read_bytes())
    return str(file)
