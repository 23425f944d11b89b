"""Requests of an engine for its rows: one request for a response, or a chain of them for a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from megarlhf.rollout.responses import FinishedResponses, Response, ResponsePart


class EngineRequest(NamedTuple):
    """Tokens that an engine is asked for: a response, a part of one, or a turn of a conversation."""

    prompt: Tensor
    """Prompt, and what was written after it."""
    seed: int
    part: ResponsePart


class News(NamedTuple):
    """News of a row from outside the engine, the same on all ranks of the engine."""

    row: int
    kind: Literal["ready", "opening", "final", "observed", "over", "anew"]
    """`ready`: the conversation goes on where it was left. `opening`: it begins, with `tokens` as its prompt if there
    are any. `final`: it begins, and is over after its first turn. `observed`: `tokens` follow the last turn. `over`: it
    has ended. `anew`: it begins anew; more news follow."""
    tokens: list[int] = []  # noqa: RUF012 - never changed


class RequestSource(Protocol):
    """Requests of an engine for each of its rows: one, or a chain of them. The ranks of an engine keep the same state
    of its rows, and one of them, the owner of the row, makes its response."""

    failure: str
    """Message about a failure outside the engine that ends the run; empty: none."""

    @property
    def num_waiting(self) -> int:
        """Rows that wait for something outside the engine."""
        ...

    def restart(self, bank: FinishedResponses, version: int) -> None:
        """Begin to draw the rows that `bank` does not hold, with weights of this version. Collective over all ranks."""
        ...

    def begin(self, row: int, *, mine: bool) -> EngineRequest | None:
        """Begin a row; returns its first request, None if something has to come in before. mine: this rank owns it"""
        ...

    def drawn(self, row: int, response: Response) -> Response | None:
        """Take what was drawn for the row's request. Returns the row's response on its owner if the row is done."""
        ...

    def news(self) -> list[News]:
        """News that have come in on this rank, without waiting."""
        ...

    def take(self, news: News) -> EngineRequest | Response | None:
        """Take news, on all ranks of the engine. Returns the row's next request, or its response on its owner."""
        ...

    def wait(self) -> None:
        """Wait a moment for news, where the engine has nothing to do."""
        ...


class WholeRows:
    """Rows of one request each."""

    failure = ""
    num_waiting = 0

    def __init__(self, prompts: Sequence[Tensor], seeds: Sequence[int], parts: Sequence[ResponsePart]) -> None:
        self._requests = [EngineRequest(*row) for row in zip(prompts, seeds, parts, strict=True)]
        self._mine: set[int] = set()

    def restart(self, bank: FinishedResponses, version: int) -> None:
        self._mine.clear()

    def begin(self, row: int, *, mine: bool) -> EngineRequest:
        (self._mine.add if mine else self._mine.discard)(row)
        return self._requests[row]

    def drawn(self, row: int, response: Response) -> Response | None:
        return response if row in self._mine else None

    def news(self) -> list[News]:
        return []

    def take(self, news: News) -> EngineRequest:
        raise AssertionError("a row of one request has no news")

    def wait(self) -> None:
        raise AssertionError("a row of one request waits for nothing")
