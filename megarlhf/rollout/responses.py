"""Settings of sampling, responses and their parts, and the responses that a rollout has finished."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from megarlhf.columns import Ragged
from megarlhf.rollouts import Dialogue, Rollouts, Stretches, VersionRuns


@dataclass(frozen=True)
class StopStrings:
    """Texts that end a response."""

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str] = field(compare=False, repr=False)
    """Decodes a part of a response, as a continuation."""

    def complete_in(self, tokens: Sequence[int], before: Sequence[int] | np.ndarray = ()) -> bool:
        """Whether the response contains one of the texts. Called after each token, it decodes only the end.

        before: tokens of the response before `tokens`
        """
        longest = max(len(text.encode()) for text in self.texts)
        count = longest + 1
        while True:  # a token may be no text, or a part of a character
            missing = max(0, min(count - len(tokens), len(before)))
            earlier = [int(token) for token in before[len(before) - missing :]]
            tail = self.decode([*earlier, *tokens[-count:]])
            if any(text in tail for text in self.texts):
                return True
            if count >= len(before) + len(tokens) or len(tail.encode()) > longest:
                return False
            count *= 2


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings with which responses are drawn."""

    max_tokens: int
    """Maximum tokens of a response; a longer one is truncated."""
    temperature: float = 1.0
    greedy: bool = False
    """Take the most likely token; log-probs are then at temperature 1."""
    end_ids: tuple[int, ...]
    """Tokens that end a response and are part of it: `model_directory.end_tokens`."""
    stop: StopStrings | None = None
    """Texts that end a response."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Filters of the logits, with `top_p` and `top_k`: `algo.sampling.filtered_logits`."""

    def ends(self, tokens: Sequence[int], before: Sequence[int] | np.ndarray = ()) -> bool:
        """Whether a response that did not end before its last token ends with it.

        before: tokens of the response before `tokens`
        """
        if not tokens:
            return False
        return tokens[-1] in self.end_ids or (self.stop is not None and self.stop.complete_in(tokens, before))

    def identity(self) -> dict[str, Any]:
        """Settings that responses depend on, for JSON."""
        stop = {} if self.stop is None else {"stop": list(self.stop.texts)}
        plain = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("end_ids", "stop")
            # Keys of later versions are left out at their default, so that earlier identities stay valid.
            and (field.name not in ("top_p", "top_k", "min_p") or getattr(self, field.name) != field.default)
        }
        return {**plain, "end_ids": list(self.end_ids), **stop}


@dataclass(frozen=True)
class Response:
    """Tokens that were drawn for one row: a response, or the part of it that was asked for."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    versions: VersionRow
    """Weights that drew the tokens."""
    stretches: tuple[int, ...] = ()
    """Lengths of the sampled and observed stretches of a conversation, in turn: `rollouts.Stretches`."""
    observed: list[int] = field(default_factory=list)
    """Tokens of the conversation that were not sampled."""
    dialogue: Dialogue | None = None
    """The environment's part of a conversation; None: there is no environment."""

    @property
    def index(self) -> IndexEntry:
        """Facts that every rank knows of the response."""
        return IndexEntry(len(self.tokens), self.finished, self.versions, self.stretches, self.dialogue)

    @property
    def written(self) -> list[int]:
        """All tokens after the prompt or opening, sampled or not."""
        written, sampled, observed = list[int](), 0, 0
        for n, length in enumerate(self.stretches or (len(self.tokens),)):
            if n % 2:
                written += self.observed[observed : observed + length]
                observed += length
            else:
                written += self.tokens[sampled : sampled + length]
                sampled += length
        return written


class AnsweredTurn(NamedTuple):
    """A turn of a conversation with the environment's answer, as far as one call has drawn it.

    The first of a conversation has no tokens: it is the answer of `reset`.
    """

    tokens: list[int]
    logprobs: list[float]
    version: int
    answer: Mapping[str, Any]
    """`Answer.to_json`."""
    observed: list[int]
    """Tokens of the answer; of the first: the opening, if `reset` had messages."""
    history: str
    """How the chat template writes the turn: `rendering.Delta`."""
    before: str
    """`end_of` the turns that one call has drawn before it."""

    @property
    def is_beginning(self) -> bool:
        """Whether it is the answer of `reset`. Any other turn has tokens."""
        return not self.tokens


@dataclass(frozen=True)
class ResponsePart:
    """Part of a response that one call draws, where a response is drawn in slices (`slices.py`)."""

    so_far: Sequence[int] | np.ndarray
    """Tokens of earlier parts. The row of `prompts` is the prompt and these."""
    until: int
    """Length of the response, earlier parts included, at which this part ends at the latest."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that are drawn now."""
        return self.until - len(self.so_far)

    def ends(self, sampling: Sampling, tokens: Sequence[int]) -> bool:
        """Whether the response ends with the last of the `tokens` that are drawn now."""
        return sampling.ends(tokens, self.so_far)


def parts_of(parts: Sequence[ResponsePart] | None, num_rows: int, sampling: Sampling) -> Sequence[ResponsePart]:
    """The part of each row; whole responses where none are given."""
    return [ResponsePart((), sampling.max_tokens)] * num_rows if parts is None else parts


VersionRow = tuple[tuple[int, int], ...]
"""Runs (version of the weights, number of tokens that it drew) over the tokens of a response, in their order."""


class IndexEntry(NamedTuple):
    """Facts of a response without its tokens."""

    length: int
    """Number of sampled tokens."""
    finished: bool
    versions: VersionRow
    stretches: tuple[int, ...] = ()
    dialogue: Dialogue | None = None


Index = dict[int, IndexEntry]
"""Entries by row."""


class FinishedResponses:
    """Finished responses of a rollout in progress, which are not drawn again. Each row is on one rank only."""

    def __init__(self, held: Mapping[int, Response] | None = None) -> None:
        self.held: dict[int, Response] = dict(held or {})
        """This rank's responses, by row."""
        self.turns: dict[int, list[AnsweredTurn]] = {}
        """Answered turns of this rank's unfinished conversations, by row."""
        self.num_tokens = 0
        """Tokens of the responses that were added."""

    def add(self, row: int, response: Response) -> None:
        self.held[row] = response
        self.num_tokens += len(response.tokens)
        self.turns.pop(row, None)

    def add_turn(self, row: int, turn: AnsweredTurn, *, first: bool = False) -> None:
        """Keep an answered turn. `first`: the conversation begins, for the first time or anew"""
        self.turns[row] = [*([] if first else self.turns.get(row, [])), turn]


def end_of(turns: Sequence[AnsweredTurn]) -> str:
    """Digest of the last of the turns, by which a record of the next one is known to follow it."""
    if not turns:
        return ""
    ids = np.array([*turns[-1].tokens, -1, *turns[-1].observed], dtype="<i4")
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


def responses_of(rollouts: Rollouts) -> list[Response]:
    """Each sample of rollouts as a response."""
    columns = [
        rollouts.responses.rows(),
        rollouts.logprobs.rows(),
        rollouts.finished_N.tolist(),
        rollouts.versions.versions.rows(),
        rollouts.versions.lengths.rows(),
    ]
    responses = [
        Response(tokens.tolist(), logprobs.tolist(), finished, tuple(zip(runs.tolist(), counts.tolist(), strict=True)))
        for tokens, logprobs, finished, runs, counts in zip(*columns, strict=True)
    ]
    stretches = rollouts.stretches
    if stretches is None:
        return responses
    further = zip(stretches.lengths.rows(), stretches.observed.rows(), rollouts.dialogues, strict=True)
    return [
        replace(response, stretches=tuple(lengths.tolist()), observed=observed.tolist(), dialogue=dialogue)
        for response, (lengths, observed, dialogue) in zip(responses, further, strict=True)
    ]


def rollouts_of(responses: Sequence[Response]) -> Rollouts:
    """Responses as rollouts, on the CPU. `responses_of` is the inverse."""
    rollouts = Rollouts(
        responses=Ragged.from_rows([torch.tensor(r.tokens, dtype=torch.int64) for r in responses], torch.int64),
        logprobs=Ragged.from_rows([torch.tensor(r.logprobs) for r in responses], torch.float32),
        finished_N=torch.tensor([r.finished for r in responses], dtype=torch.bool),
        versions=VersionRuns.from_rows([r.versions for r in responses]),
    )
    dialogues = tuple(r.dialogue for r in responses if r.dialogue is not None)
    if not dialogues:
        return rollouts
    stretches = Ragged.from_rows([torch.tensor(r.stretches) for r in responses], torch.int64)
    observed = Ragged.from_rows([torch.tensor(r.observed, dtype=torch.int64) for r in responses], torch.int64)
    return replace(rollouts, stretches=Stretches(stretches, observed), dialogues=dialogues)


def drawn_by(version: int, response: Response) -> tuple[list[int], Response]:
    """Tokens after the prompt or opening before the first one that a version drew, and the response from there on. It
    is the last version that drew any; if it drew none, the response is empty."""
    last, count = response.versions[-1] if response.versions else (version, 0)
    count, first, stretches = count if last == version else 0, 0, list(response.stretches or [len(response.tokens)])
    skipped = len(response.tokens) - count
    written, observed = response.written, 0
    while skipped >= stretches[0] and len(stretches) > 1:
        skipped, observed = skipped - stretches[0], observed + stretches[1]
        first += stretches[0] + stretches[1]
        stretches = stretches[2:]
    stretches[0] -= skipped
    start = len(response.tokens) - count
    rest = replace(
        response,
        tokens=response.tokens[start:],
        logprobs=response.logprobs[start:],
        versions=((version, count),),
        stretches=tuple(stretches) if response.stretches else (),
        observed=response.observed[observed:],
    )
    return written[: first + skipped], rest


def turn_seed(seed: int, turn: int) -> int:
    """Seed of a turn of a sample. The first has the sample's own seed, so that one turn is drawn as one response."""
    if not turn:
        return seed
    digest = hashlib.blake2b(f"{seed}/turn/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def sample_seed(run_seed: int, step: int, sample: int, refill: int = 0) -> int:
    """Seed of a sample: a function of run seed, step and global sample index, never of a rank.

    refill: number of the round of dynamic sampling; 0 is the step's first
    """
    text = f"{run_seed}/{step}/{sample}" + (f"/{refill}" if refill else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
