"""Assertions on refusals by what they name, so that their sentences can be improved freely."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refuses(*names: str, error: type[BaseException] = ValueError) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error whose message has each of the names: keys, values, files, remedies. Their order is free.

    `with refuses("train.stop.patience", "data.validation"): load(...)`
    """
    assert names, "an error that may say anything proves little"
    with pytest.raises(error) as caught:
        yield caught
    missing = missing_names(str(caught.value), *names)
    assert not missing, f"{missing} not in: {caught.value}"


def missing_names(message: str, *names: str) -> list[str]:
    """Names that a message does not have as whole words. White space in the message counts as one space."""
    text = " ".join(message.split())
    return [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]


def lines_naming(output: str, *names: str) -> list[str]:
    """Lines of an output that have all of the names."""
    return [line for line in output.splitlines() if not missing_names(line, *names)]


def command_refuses(ranks: Any, argv: Sequence[str], *names: str, world: int = 1, status: int = 2) -> str:
    """Run a command on ranks of a pool; it ends with this status and names all of those. Returns what it wrote."""
    (ended, output), *_ = ranks.run(world, "command_status", *argv)
    assert (ended, missing_names(output, *names)) == (status, []), output
    return output
