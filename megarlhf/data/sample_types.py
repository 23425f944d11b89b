"""Samples of the commands, and protocols of the encoders that make them from records. All of it is picklable.

Lengths are in tokens. A response's length includes the token that ends it, as in rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

Sample = TypeVar("Sample")
Sample_co = TypeVar("Sample_co", covariant=True)


@dataclass(frozen=True)
class SFTSample:
    """A text and its learnt stretches.

    Example: with 9 tokens and stretches [2, 4, 7, 9], tokens 2, 3, 7 and 8 are learnt.
    """

    tokens: list[int]
    stretches: list[int]
    """First token and end (exclusive) of each learnt stretch, in order. Token 0 is never learnt: nothing predicts
    it."""

    @classmethod
    def of_response(cls, tokens: list[int], prompt_length: int) -> SFTSample:
        """A sample in which everything behind the prompt is learnt."""
        return cls(tokens, [prompt_length, len(tokens)])

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first learnt one."""
        return self.stretches[0]

    @property
    def num_learnt(self) -> int:
        """Number of learnt tokens."""
        return sum(self.stretches[1::2]) - sum(self.stretches[0::2])

    def learnt(self) -> list[bool]:
        """A mask: for each token whether it is learnt."""
        mask = [False] * len(self.tokens)
        for first, end in zip(self.stretches[0::2], self.stretches[1::2], strict=True):
            mask[first:end] = [True] * (end - first)
        return mask


@dataclass(frozen=True)
class PairSample:
    """A prompt and two responses, each with the token that ends it."""

    prompt_tokens: list[int]
    chosen_tokens: list[int]
    rejected_tokens: list[int]
    margin: float = 0.0
    """Wanted difference of the scores. Used where the reward model is trained with margins."""


PAIR_SEQUENCES = (("prompt_tokens", "chosen_tokens"), ("prompt_tokens", "rejected_tokens"))
"""Fields that form the two sequences of a pair."""


@dataclass(frozen=True)
class PromptSample:
    """A prompt to respond to."""

    tokens: list[int]
    text: str
    """The rendered prompt. It has a bos only where a chat template writes one."""
    fields: dict[str, Any]
    """Other columns of the record, such as `answer`, for the reward functions."""
    index: int
    """The record's position in the source, counting skipped records."""
    messages: Any = None
    """The conversation that the prompt was rendered from. None for a plain text."""


@dataclass(frozen=True)
class Changed:
    """A sample that does not hold all of its record."""

    sample: Any
    how: tuple[str, ...]
    """Descriptions of the changes. Each is counted over the set."""


def changed(sample: Sample, how: Iterable[str]) -> Sample | Changed:
    """Wrap the sample in `Changed` if there are changes."""
    changes = tuple(how)
    return Changed(sample, changes) if changes else sample


def sample_of(encoded: Any) -> Any:
    """Unwrap the sample, changed or not."""
    return encoded.sample if isinstance(encoded, Changed) else encoded


@dataclass
class Skipped:
    """Counts of records that were left out, by reason."""

    total: int
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self) -> int:
        """Number of records that were left out."""
        return sum(self.reasons.values())

    def share(self, *, but: str = "") -> float:
        """Share of the records that was left out. Records whose reason begins with `but` are not counted at all."""
        absent = sum(count for reason, count in self.reasons.items() if but and reason.startswith(but))
        return (self.count() - absent) / max(1, self.total - absent)

    def describe(self) -> str:
        """One sentence for the log."""
        if not self.count():
            return f"used all {self.total} records"
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.reasons.items()))
        return f"skipped {self.count()} of {self.total} records ({reasons})"


class Unusable(Exception):
    """A record that is skipped. The message is the reason."""


Encode = Callable[[int, Mapping[str, Any]], Sample | Changed]
"""Makes a sample from a record's number in the source and the record. Raises: Unusable for a record that is skipped,
ValueError for one that is refused; the message does not say where the record is."""


class Encoder(Protocol[Sample_co]):
    """Options of making samples from records. Picklable, for worker processes."""

    def load(self) -> Any:
        """Load the tokenizer, which takes long. Workers get it by pickle. Raises: ValueError."""
        ...

    def by(self, loaded: Any, /) -> Callable[[int, Mapping[str, Any]], Sample_co | Changed]:
        """The encoding function, given the result of `load`. Raises: ValueError for a tokenizer that does not fit the
        options."""
        ...

    def key(self) -> dict[str, Any]:
        """Everything beside the records that the samples depend on, as JSON values. Equal in every process."""
        ...


class FieldCheck(Protocol):
    """Checks a prompt's other columns for the rewards that read them. Picklable."""

    def __call__(self, fields: Mapping[str, Any]) -> None:
        """Raises: ValueError for a missing column."""
        ...

    def key(self) -> list[str]:
        """Names of the checks, for `Encoder.key`."""
        ...
