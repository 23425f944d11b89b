"""Random numbers of a conversation, which do not depend on what else runs in its process.

Only the standard library is imported; numpy and torch are used where something else has imported them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class _Generator(NamedTuple):
    """A generator of the whole process."""

    name: str
    seed: Callable[[int], Any]
    get: Callable[[], Any]
    set: Callable[[Any], None]


def _generators() -> Iterator[_Generator]:
    """The generators of `random`, of numpy and of torch on the CPU."""
    yield _Generator("random", random.seed, random.getstate, random.setstate)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        yield _Generator("numpy", lambda seed: numpy.seed(seed % 2**32), numpy.get_state, numpy.set_state)
    if (generator := getattr(sys.modules.get("torch"), "default_generator", None)) is not None:
        yield _Generator(
            "torch", lambda seed: generator.manual_seed(seed % 2**63), generator.get_state, generator.set_state
        )


class RandomState:
    """States of the process's random generators while a conversation's code runs.

    Not covered: threads of the user's code, callbacks of an event loop, and generators of GPUs.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[str, Any] = {}

    def load(self) -> None:
        """Give the process the conversation's states: those of the last `save`, or those that its seed gives."""
        for generator in _generators():
            if generator.name in self._states:
                generator.set(self._states[generator.name])
            else:
                generator.seed(self._seed)

    def save(self) -> None:
        """Keep the process's states."""
        self._states = {generator.name: generator.get() for generator in _generators()}
