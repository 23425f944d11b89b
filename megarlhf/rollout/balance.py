"""Assignment of samples to engines, so that all engines end at about the same time. Pure: every rank finds the same.

    pieces = pieces_of(prompts, missing, num_engines, seen, max_tokens)
    dealt = deal("length", pieces, num_engines)

A sample's tokens follow from its seed, not from who draws it. The samples of a prompt stay together, as a *piece*: an
engine computes their prompt once (prefix cache).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarlhf.config.rollout import Balance
from megarlhf.layout import split_evenly

PIECES_PER_ENGINE = 4
"""Where there are fewer prompts for each engine, the samples of a prompt are cut until there are so many pieces."""
BEGINS_WITH = 2
"""With `on_demand` the engines begin with one part in so many of all pieces. The rest is larger than what engines of
equal speed get apart by on such a part."""


@dataclass(frozen=True)
class PromptChunk:
    """Samples that one engine draws together."""

    rows: tuple[int, ...]
    work: float
    """Tokens expected: of the prompt, once, and of the responses."""


@dataclass(frozen=True)
class Deal:
    """Assignment of samples to engines."""

    first: Sequence[Sequence[int]]
    """By engine: the rows that it begins with, in its order."""
    queue: Sequence[Sequence[int]] = ()
    """Rows of pieces that go to whichever engine asks first, in this order."""
    most: int = 0
    """An engine with so many unfinished samples asks for no more: a fair share of all."""


class SeenLengths:
    """How long responses were: what is expected of the next ones. It changes who draws a sample, and nothing else."""

    def __init__(self, most_prompts: int = 1 << 16) -> None:
        """Remembers so many prompts, those seen last."""
        self._most_prompts = most_prompts
        self._mean: float | None = None
        self._of_prompt: dict[bytes, float] = {}

    def expected(self, prompt: Tensor, max_tokens: int) -> float:
        """Tokens of a response: the mean of the prompt's own when it was last drawn; else that of all of the last
        rollout; else the longest that may be."""
        known = self._of_prompt.get(_key(prompt), self._mean)
        return max_tokens if known is None else min(known, max_tokens)

    def saw(self, prompts: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """A rollout: prompts and response tokens by row."""
        if not lengths:
            return
        self._mean = sum(lengths) / len(lengths)
        by_prompt: dict[bytes, list[int]] = {}
        for prompt, length in zip(prompts, lengths, strict=True):
            by_prompt.setdefault(_key(prompt), []).append(length)
        for key, found in by_prompt.items():
            self._of_prompt.pop(key, None)
            self._of_prompt[key] = sum(found) / len(found)
        for key in list(self._of_prompt)[: -self._most_prompts]:
            del self._of_prompt[key]


def chunk_by_length(
    prompts: Sequence[Tensor], rows: Sequence[int], num_engines: int, seen: SeenLengths, max_tokens: int
) -> list[PromptChunk]:
    """The rows with equal prompts together, the most work first; of few prompts, parts of these."""
    by_prompt: dict[bytes, list[int]] = {}
    for row in rows:
        by_prompt.setdefault(_key(prompts[row]), []).append(row)
    largest = max(1, -(-len(rows) // (PIECES_PER_ENGINE * num_engines)))
    pieces = []
    for together in by_prompt.values():
        response, prompt = seen.expected(prompts[together[0]], max_tokens), len(prompts[together[0]])
        parts = split_evenly(len(together), -(-len(together) // largest))
        pieces += [PromptChunk(tuple(together[n] for n in part), prompt + len(part) * response) for part in parts]
    return sorted(pieces, key=lambda piece: (-piece.work, piece.rows))


def assign(balance: Balance, pieces: Sequence[PromptChunk], num_engines: int) -> Deal:
    """`fixed`: equal numbers of rows in their order. `length`: the longest pieces first, each to the engine with the
    least work so far (Graham 1969: at most 4/3 of the shortest possible). `on_demand`: so with the first of them, and
    the rest in a queue (list scheduling, with the order of `length`)."""
    rows = sorted(row for piece in pieces for row in piece.rows)
    if balance == "fixed" or num_engines == 1:
        return Deal([[rows[n] for n in share] for share in split_evenly(len(rows), num_engines)])
    num_first = len(pieces) if balance == "length" else len(pieces) // (BEGINS_WITH * num_engines) * num_engines
    first = [
        [row for piece in share for row in piece.rows] for share in _longest_first(pieces[:num_first], num_engines)
    ]
    return Deal(first, [piece.rows for piece in pieces[num_first:]], most=-(-len(rows) // num_engines))


def _longest_first(pieces: Iterable[PromptChunk], num_engines: int) -> list[list[PromptChunk]]:
    shares: list[list[PromptChunk]] = [[] for _ in range(num_engines)]
    by_work = [(0.0, engine) for engine in range(num_engines)]
    for piece in pieces:
        work, engine = by_work[0]
        shares[engine].append(piece)
        heapq.heapreplace(by_work, (work + piece.work, engine))
    return shares


def _key(prompt: Tensor) -> bytes:
    return hashlib.blake2b(prompt.cpu().numpy().tobytes(), digest_size=8).digest()
