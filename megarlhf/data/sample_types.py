"""The samples that commands work with, and what makes them of records: plain data, which other processes can be given.

Lengths are in tokens; a response's includes the token that ends it, as in rollout.
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
    """A text, and the stretches of it that are learnt."""

    tokens: list[int]
    stretches: list[int]
    """Where learnt tokens stand, in order: the first one of a stretch, the one behind its last, and so on for further
    stretches. Token 0 is in none, since nothing predicts it."""

    @classmethod
    def of_response(cls, tokens: list[int], prompt_length: int) -> SFTSample:
        """Everything behind the prompt is learnt."""
        return cls(tokens, [prompt_length, len(tokens)])

    @property
    def prompt_length(self) -> int:
        """How many tokens stand before the first that is learnt."""
        return self.stretches[0]

    @property
    def num_learnt(self) -> int:
        """Tokens that the loss is on."""
        return sum(self.stretches[1::2]) - sum(self.stretches[0::2])

    def learnt(self) -> list[bool]:
        """For each token whether it is learnt."""
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
    """By how much the scores should differ, where the reward model is trained with margins."""


PAIR_SEQUENCES = (("prompt_tokens", "chosen_tokens"), ("prompt_tokens", "rejected_tokens"))
"""The fields that the two sequences of a pair consist of."""


@dataclass(frozen=True)
class PromptSample:
    """A prompt to respond to."""

    tokens: list[int]
    text: str
    """The rendered prompt; without bos, but for one that a chat template writes."""
    fields: dict[str, Any]
    """All other columns of the record (`answer`, say), for the reward functions."""
    index: int
    """The record's place in the source, skipped ones counted."""
    messages: Any = None
    """The conversation that it was rendered from; None where the prompt was a plain text."""


@dataclass(frozen=True)
class Changed:
    """A sample that is not all of its record."""

    sample: Any
    how: tuple[str, ...]
    """In words, each of which is counted."""


def changed(sample: Sample, how: Iterable[str]) -> Sample | Changed:
    """The sample, as a changed one where there is a word on how."""
    words = tuple(how)
    return Changed(sample, words) if words else sample


def sample_of(made: Any) -> Any:
    """The sample, changed or not."""
    return made.sample if isinstance(made, Changed) else made


@dataclass
class Skipped:
    """How many records of how many were left out, by reason."""

    total: int
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self) -> int:
        """All that were left out."""
        return sum(self.reasons.values())

    def share(self, *, but: str = "") -> float:
        """Left out of all; `but`: reasons that begin so are those of records that are not there."""
        absent = sum(count for reason, count in self.reasons.items() if but and reason.startswith(but))
        return (self.count() - absent) / max(1, self.total - absent)

    def describe(self) -> str:
        """One sentence for the log."""
        if not self.count():
            return f"used all {self.total} records"
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.reasons.items()))
        return f"skipped {self.count()} of {self.total} records ({reasons})"


class Unusable(Exception):
    """A record that has to be skipped; its text is the reason."""


Encode = Callable[[int, Mapping[str, Any]], Sample | Changed]
"""The sample of a record, which is told its number in the source. Raises: Unusable for a record that is skipped, and
ValueError for one that is refused, without words that say where it stands."""


class Encoder(Protocol[Sample_co]):
    """How a command makes samples of records: plain data, which other processes can be given (by pickle)."""

    def load(self) -> Any:
        """What takes long to load, the tokenizer, which other processes are given (by pickle). Raises: ValueError."""
        ...

    def by(self, loaded: Any, /) -> Callable[[int, Mapping[str, Any]], Sample_co | Changed]:
        """With what `load` has returned, here or in another process. Raises: ValueError for a tokenizer that does not
        fit the options."""
        ...

    def key(self) -> dict[str, Any]:
        """All that the result depends on beside the records: what JSON can hold, the same in every process."""
        ...


class FieldCheck(Protocol):
    """Looks at the other columns of a prompt, for the rewards that read them. Picklable."""

    def __call__(self, fields: Mapping[str, Any]) -> None:
        """Raises: ValueError for what is missing."""
        ...

    def key(self) -> list[str]:
        """What it looks for."""
        ...
