"""Samples of drawn lengths, without tokens: responses, and conversations with an environment.

A sample's lengths follow from its seed alone, however many slices it is drawn in. A position is the number of tokens
after the prompt, sampled or observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarlhf.config.environment import EnvironmentConfig
from megarlhf.layout import split_evenly
from megarlhf.rehearsal.fakes.lengths import Lengths, LogNormal, Uniform
from megarlhf.rollout.environments.environment import TurnLimits
from megarlhf.rollout.responses import IndexEntry, ResponsePart, Sampling
from megarlhf.rollouts import OVER, Dialogue, EndedBy

SIGMA = 0.6
"""Deviation of the logarithm of lengths that nobody has given."""
ASSUMED_OF_CONVERSATIONS = (
    "Assumed of conversations: the environment answers at once and adds nothing to prompts; tokens are divided evenly "
    "among turns; the engine's cache still holds what was written before an answer."
)


@dataclass(frozen=True)
class PartialConversation:
    """A conversation, as far as it is drawn."""

    stretches: tuple[int, ...]
    """Lengths of sampled and observed stretches in turn, as in `rollouts.Stretches`."""
    ended_by: EndedBy


@dataclass(frozen=True, kw_only=True)
class ConversationLengths:
    """Lengths of conversations with an environment.

    A sample's seed draws all three, so that the lengths of a sample of an earlier run stay together. Tokens are divided
    evenly. Example: 7 sampled tokens, 5 observed ones and 3 turns are the stretches 3, 3, 2, 2, 2.
    """

    turns: Lengths
    sampled: Lengths
    """Sampled tokens of all turns."""
    observed: Lengths
    """Tokens of all answers of the environment. A conversation of one turn has none, any other one or more an
    answer."""
    limits: TurnLimits

    def draw(self, seed: int, until: int, longest: int) -> PartialConversation:
        """The conversation up to a position, or to its end. It is cut as a real one (`rollout/conversations.py`).

        longest: `rollout.max_response_tokens`
        """
        sampled, given_turns = self.sampled.draw(seed), self.turns.draw(seed)
        count = min(given_turns, self.limits.max_turns, sampled)
        turns = _divided(min(sampled, count * self.limits.max_turn_tokens), count)
        answers = _divided(max(self.observed.draw(seed), count - 1), count - 1)
        stretches: list[int] = []
        position = 0
        for number, turn in enumerate(turns):
            stretches.append(min(turn, until - position))
            position += stretches[-1]
            if stretches[-1] < turn:
                return PartialConversation(tuple(stretches), "turn_cut" if position == longest else "")
            if number == count - 1:
                break
            if position + answers[number] >= longest:
                return PartialConversation(tuple(stretches), "no_room")
            stretches.append(answers[number])
            position += answers[number]
            if position >= until:
                return PartialConversation((*stretches, 0), "")
        if position == longest:
            return PartialConversation(tuple(stretches), "turn_cut")
        return PartialConversation(
            tuple(stretches), "max_turns" if given_turns > self.limits.max_turns else "environment"
        )

    def describe(self, longest: int) -> str:
        """Description for the page."""
        return (
            f"sampled tokens {self.sampled.describe()}; turns {self.turns.describe('turns')}, at most "
            f"{self.limits.max_turns} of {self.limits.max_turn_tokens} tokens; observed tokens of those of several "
            f"turns {self.observed.describe()}; all together at most {longest} tokens"
        )


def conversation_lengths(
    cfg: Any, *, turns: Lengths | None, sampled: Lengths, observed: Lengths | None
) -> ConversationLengths | None:
    """Lengths of conversations, as given or by default; None where there is no environment.

    By default all numbers of turns are equally frequent, and as many tokens are observed as are sampled: together a
    third of the longest, in the mean.
    """
    environment = getattr(cfg, "environment", None)
    if environment is None:
        return None
    longest: int = cfg.rollout.max_response_tokens
    limits = TurnLimits(environment.max_turns, min(environment.max_turn_tokens or longest, longest))
    return ConversationLengths(
        turns=turns or Uniform(1, limits.max_turns),
        sampled=sampled,
        observed=observed or LogNormal(max(2.0, longest / 6), SIGMA),
        limits=limits,
    )


def default_sampled(longest: int, environment: EnvironmentConfig | None = None) -> Lengths:
    """Default number of sampled tokens. A response has a third of the longest, in the mean; a conversation of several
    turns half as many, and at most a third of what its turns may have."""
    if environment is None:
        return LogNormal(max(2.0, longest / 3), SIGMA)
    turn_tokens = min(environment.max_turn_tokens or longest, longest)
    share = longest / (3 if environment.max_turns == 1 else 6)
    return LogNormal(max(2.0, min(share, environment.max_turns * turn_tokens / 3)), SIGMA)


class SampleDraws:
    """Draws samples, slice by slice."""

    def __init__(self, responses: Lengths, conversations: ConversationLengths | None) -> None:
        self._responses, self._conversations = responses, conversations
        self._begun: dict[int, IndexEntry] = {}
        """Conversations that go on, by seed."""

    def index(
        self,
        seeds: Sequence[int],
        parts: Sequence[ResponsePart],
        sampling: Sampling,
        version: int,
        *,
        with_environment: bool,
    ) -> list[IndexEntry]:
        """Facts of each row. Of a response they are those of the part that is drawn now; a conversation has the earlier
        parts too."""
        rows = zip(seeds, parts, strict=True)
        if with_environment:
            return [self._conversation(seed, part, sampling, version) for seed, part in rows]
        return [self._response(seed, part, sampling, version) for seed, part in rows]

    def _response(self, seed: int, part: ResponsePart, sampling: Sampling, version: int) -> IndexEntry:
        whole = min(self._responses.draw(seed), sampling.max_tokens)
        length = min(whole, part.until)
        count = max(1, length - len(part.so_far))
        return IndexEntry(count, length == whole < sampling.max_tokens, ((version, count),))

    def _conversation(self, seed: int, part: ResponsePart, sampling: Sampling, version: int) -> IndexEntry:
        assert self._conversations is not None, "an environment, and no lengths of conversations"
        drawn = self._conversations.draw(seed, part.until, sampling.max_tokens)
        before = self._begun.pop(seed, IndexEntry(0, False, ()))
        assert sum(before.stretches) == len(part.so_far), "a conversation goes on elsewhere than it stopped"
        length = sum(drawn.stretches[::2])
        versions = (*before.versions, (version, length - before.length))
        dialogue = _dialogue(drawn)
        entry = IndexEntry(length, drawn.ended_by in OVER, versions, drawn.stretches, dialogue)
        if not dialogue.is_over:
            self._begun[seed] = entry
        return entry


def drawn_stretches(entry: IndexEntry, part: ResponsePart) -> tuple[int, ...]:
    """Lengths of the sampled and observed stretches that an engine computes now: those between two sampled tokens."""
    rest, position = list(entry.stretches) or [len(part.so_far) + entry.length], len(part.so_far)
    while len(rest) > 1 and position >= rest[0] + rest[1]:
        position -= rest[0] + rest[1]
        rest = rest[2:]
    rest[0] -= position
    return tuple(rest if rest[-1] else rest[:-2])


def _dialogue(drawn: PartialConversation) -> Dialogue:
    """The environment's part: a letter for each observed token, and rewards that differ."""
    turns, answers = drawn.stretches[::2], drawn.stretches[1::2]
    num_answered = len(answers) + bool(drawn.ended_by)
    return Dialogue(
        observations=((), *("a" * tokens for tokens in answers)),
        rewards=tuple(float(tokens % 7) for tokens in turns[:num_answered]),
        ended_by=drawn.ended_by,
    )


def _divided(tokens: int, parts: int) -> list[int]:
    return [len(part) for part in split_evenly(tokens, parts)] if parts else []
