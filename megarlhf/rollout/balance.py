"""Assignment of samples to engines, so that all engines finish at about the same time.

    chunks = chunk_by_length(prompts, parts, missing, num_engines, seen)
    assignment = assign("length", chunks, num_engines)

The functions are pure: every rank gets the same result. A sample's tokens follow from its seed, not from the engine
that draws it. The samples of a prompt stay together in a chunk, because an engine computes their prompt once (prefix
cache).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megarlhf.config.rollout import Balance
from megarlhf.layout import split_evenly
from megarlhf.rollout.responses import ResponsePart
from megarlhf.rollouts import Rollouts

CHUNKS_PER_ENGINE = 4
"""Least number of chunks per engine. With fewer prompts, the samples of a prompt are divided."""
FIRST_SHARE = 0.75
"""Engines begin with this share of all chunks under `on_demand`. The rest is large enough to level out engines of
equal speed."""


@dataclass(frozen=True)
class PromptChunk:
    """Samples of a prompt that one engine draws together."""

    rows: tuple[int, ...]
    work: float
    """Expected tokens: the prompt's, once, and the responses', with earlier parts, whose keys and values are computed
    again."""


@dataclass(frozen=True)
class EngineAssignment:
    """Assignment of samples to engines."""

    first: Sequence[Sequence[int]]
    """Rows with which each engine begins, in their order."""
    queue: Sequence[Sequence[int]] = ()
    """Rows of further chunks, in the order in which engines take them."""
    max_unfinished: int = 0
    """An engine with so many unfinished samples, a fair share of all, takes no further chunk."""


class SeenLengths:
    """Lengths of earlier responses, from which lengths are expected. They only affect which engine draws a sample."""

    def __init__(self, max_prompts: int = 1 << 16) -> None:
        """max_prompts: number of prompts, the last ones, that are remembered"""
        self._max_prompts = max_prompts
        self._mean: float | None = None
        self._by_prompt: dict[bytes, float] = {}

    def expected(self, prompt: Tensor, part: ResponsePart) -> float:
        """Expected tokens of a part of a response. The response is expected to be as long as the prompt's last ones, or
        as all of the last rollout; one that is longer already, or of which nothing is known, as long as it may be."""
        known = self._by_prompt.get(_key(prompt), self._mean)
        rest = 0.0 if known is None else known - len(part.so_far)
        return min(rest, part.max_tokens) if rest > 0 else part.max_tokens

    def record_drawn(
        self, prompts: Sequence[Tensor], parts: Sequence[ResponsePart], drawn: Rollouts, longest: int
    ) -> None:
        """Record the responses that are whole after their parts were drawn: finished, or of `longest` tokens. Of a
        conversation all that was written counts."""
        if drawn.dialogues:
            over = [n for n, dialogue in enumerate(drawn.dialogues) if dialogue.is_over]
            lengths = drawn.positions_N.tolist()
            self.record([prompt_of(prompts[n], parts[n]) for n in over], [lengths[n] for n in over])
            return
        counts = drawn.responses.lengths_N.tolist()
        lengths = [len(part.so_far) + count for part, count in zip(parts, counts, strict=True)]
        whole = [n for n, finished in enumerate(drawn.finished_N.tolist()) if finished or lengths[n] == longest]
        self.record([prompt_of(prompts[n], parts[n]) for n in whole], [lengths[n] for n in whole])

    def record(self, prompts: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Record whole responses: prompts and response tokens."""
        if not lengths:
            return
        self._mean = sum(lengths) / len(lengths)
        lengths_by_prompt: dict[bytes, list[int]] = {}
        for prompt, length in zip(prompts, lengths, strict=True):
            lengths_by_prompt.setdefault(_key(prompt), []).append(length)
        for key, own in lengths_by_prompt.items():
            self._by_prompt.pop(key, None)
            self._by_prompt[key] = sum(own) / len(own)
        for key in list(self._by_prompt)[: -self._max_prompts]:
            del self._by_prompt[key]


def chunk_by_length(
    prompts: Sequence[Tensor],
    parts: Sequence[ResponsePart],
    rows: Sequence[int],
    num_engines: int,
    seen: SeenLengths,
) -> list[PromptChunk]:
    """Chunks of rows with equal prompts, the most work first. With few prompts, the rows of one are divided.

    prompts: rows that end with the earlier parts of their responses
    """
    by_prompt: dict[bytes, list[int]] = {}
    for row in rows:
        by_prompt.setdefault(_key(prompt_of(prompts[row], parts[row])), []).append(row)
    largest = max(1, -(-len(rows) // (CHUNKS_PER_ENGINE * num_engines)))
    chunks = []
    for own in by_prompt.values():
        prompt = prompt_of(prompts[own[0]], parts[own[0]])
        for share in split_evenly(len(own), -(-len(own) // largest)):
            chunk = tuple(own[n] for n in share)
            work = sum(len(parts[row].so_far) + seen.expected(prompt, parts[row]) for row in chunk)
            chunks.append(PromptChunk(chunk, len(prompt) + work))
    return sorted(chunks, key=lambda chunk: (-chunk.work, chunk.rows))


def prompt_of(row: Tensor, part: ResponsePart) -> Tensor:
    """The prompt alone of a row that ends with the earlier parts of its response."""
    return row[: len(row) - len(part.so_far)]


def assign(balance: Balance, chunks: Sequence[PromptChunk], num_engines: int) -> EngineAssignment:
    """Assign chunks to engines.

    `fixed`: equal numbers of rows in their order. `length`: the longest chunks first, each to the engine with the least
    work so far (Graham 1969: at most 4/3 of the shortest possible). `on_demand`: the first chunks as with `length`, and
    the rest in a queue (list scheduling).
    """
    rows = sorted(row for chunk in chunks for row in chunk.rows)
    if balance == "fixed" or num_engines == 1:
        return EngineAssignment([[rows[n] for n in share] for share in split_evenly(len(rows), num_engines)])
    num_first = len(chunks) if balance == "length" else int(len(chunks) * FIRST_SHARE) // num_engines * num_engines
    first: list[list[int]] = [[] for _ in range(num_engines)]
    by_work = [(0.0, engine) for engine in range(num_engines)]
    for chunk in chunks[:num_first]:
        work, engine = by_work[0]
        first[engine] += chunk.rows
        heapq.heapreplace(by_work, (work + chunk.work, engine))
    queue = [chunk.rows for chunk in chunks[num_first:]]
    return EngineAssignment(first, queue, max_unfinished=-(-len(rows) // num_engines))


def _key(prompt: Tensor) -> bytes:
    return hashlib.blake2b(prompt.cpu().numpy().tobytes(), digest_size=8).digest()
