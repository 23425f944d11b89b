"""State of one conversation while it is drawn: its tokens, on every rank of an engine, and what its owner knows.

Legend: a position is the number of tokens that were written after the prompt, sampled or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megarlhf.rollout.environments.answer import Answer
from megarlhf.rollout.environments.environment import Talk
from megarlhf.rollout.responses import Response
from megarlhf.rollouts import OVER, Dialogue


@dataclass
class ConversationState:
    """State of one conversation."""

    prompt: list[int]
    until: int
    """Position up to which it is drawn now."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    stretches: list[int] = field(default_factory=lambda: [0])
    versions: list[tuple[int, int]] = field(default_factory=list)
    dialogue: Dialogue = field(default_factory=Dialogue)
    """Whole on the owner, only the opening on the other ranks."""
    finished: bool = False
    """Whether the model ended the last turn."""
    is_final: bool = False
    """Whether the conversation is over after this turn, whatever an environment would say."""
    recorded: int = 0
    """Sampled tokens that the bank has, or that earlier calls have drawn."""
    mine: bool = False
    """Whether this rank owns the row."""
    key: int | None = None
    """Number of the conversation in the pool, on the owner."""
    talk: Talk | None = None
    """Messages before the present turn, on the owner."""
    is_replayed: bool = False
    """Whether the environment is being brought to where the conversation is, on the owner."""

    @property
    def start(self) -> list[int]:
        """Tokens before the first turn."""
        return list(self.dialogue.opening) or self.prompt

    @property
    def position(self) -> int:
        return self.dialogue.added + len(self.written)

    @property
    def turn(self) -> list[int]:
        """Tokens of the present turn so far."""
        return self.sampled[len(self.sampled) - self.stretches[-1] :]

    @property
    def turns(self) -> list[list[int]]:
        """Tokens of each turn."""
        ends = np.cumsum(self.stretches[::2])
        return [self.sampled[end - count : end] for end, count in zip(ends, self.stretches[::2], strict=True)]

    def before_turn(self, number: int) -> list[int]:
        """Tokens before a turn."""
        return self.start + self.written[: sum(self.stretches[: 2 * number])]

    @property
    def num_answered(self) -> int:
        return len(self.stretches) // 2

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[tuple[int, int]]) -> None:
        """Add sampled tokens to the present turn."""
        self.sampled += tokens
        self.logprobs += logprobs
        self.written += tokens
        self.stretches[-1] += len(tokens)
        for version, count in versions:
            if self.versions and self.versions[-1][0] == version:
                count += self.versions.pop()[1]
            if count:
                self.versions.append((version, count))

    def open(self, tokens: Sequence[int]) -> None:
        """Take the prompt that the environment has extended; no tokens: it has not."""
        added = max(0, len(tokens) - len(self.prompt))
        self.dialogue = replace(self.dialogue, opening=tuple(tokens), added=added)

    def observe(self, tokens: Sequence[int]) -> None:
        """Add tokens that were not sampled, after which the next turn begins."""
        self.observed += tokens
        self.written += tokens
        self.stretches += [len(tokens), 0]

    def response(self) -> Response:
        """The sample so far."""
        finished = self.finished and self.dialogue.ended_by in OVER
        stretches, versions = tuple(self.stretches), tuple(self.versions)
        return Response(
            list(self.sampled), list(self.logprobs), finished, versions, stretches, list(self.observed), self.dialogue
        )


def with_answer(dialogue: Dialogue, answer: Answer, history: str) -> Dialogue:
    """The dialogue with an answer that the model reads."""
    return replace(
        dialogue,
        observations=(*dialogue.observations, answer.messages),
        rewards=(*dialogue.rewards, answer.reward),
        rewritten=dialogue.rewritten + (history == "rewritten"),
        white_space=dialogue.white_space + (history == "white_space"),
    )


def digest(tokens: Sequence[int]) -> str:
    """Digest of token ids."""
    return hashlib.blake2b(np.array(tokens, dtype="<i4").tobytes(), digest_size=8).hexdigest()
