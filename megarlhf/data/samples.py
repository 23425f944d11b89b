"""Samples: records as token ids, with every record that cannot be used counted under its reason.

Nothing is cut: a record over a limit is skipped and counted. Lengths are in tokens; a response's includes its
eos, as in rollout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megarlhf.config import PromptDataConfig
from megarlhf.data.sources import Record, files_in_words, load_records, source_words
from megarlhf.data.templates import Template, prompt_and_response, prompt_text, question, require_template
from megarlhf.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_digest

Records = Sequence[Mapping[str, Any]]
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
    """A prompt and two responses, each with its eos."""

    prompt_tokens: list[int]
    chosen_tokens: list[int]
    rejected_tokens: list[int]
    margin: float = 0.0
    """By how much the scores should differ, where the reward model is trained with margins."""


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


@dataclass
class Skipped:
    """How many records of how many were left out, by reason."""

    total: int
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self) -> int:
        """All that were left out."""
        return sum(self.reasons.values())

    def describe(self) -> str:
        """One sentence for the log."""
        if not self.count():
            return f"used all {self.total} records"
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.reasons.items()))
        return f"skipped {self.count()} of {self.total} records ({reasons})"


class Unusable(Exception):
    """A record that has to be skipped; its text is the reason."""


Encode = Callable[[int, Mapping[str, Any]], Sample]
"""The sample of a record, which is told its number in the source. Raises: Unusable for a record that is skipped, and
ValueError for one that is refused, without words that say where it stands."""


class Encoder(Protocol[Sample_co]):
    """How a command makes samples of records: plain data, which other processes can be given (by pickle)."""

    def open(self) -> Callable[[int, Mapping[str, Any]], Sample_co]:
        """With the tokenizer loaded. Raises: ValueError for one that does not fit the options."""
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


def load_splits(
    data: PromptDataConfig,
    fields: Sequence[str],
    build: Callable[[Records, str], tuple[list[Sample], Skipped]],
) -> tuple[list[Sample], list[Sample], list[str]]:
    """Training and held-out samples (none without held-out data), and what was skipped in words.

    `build` makes the samples of a source's records, which have `fields`; it is told the source for its messages.
    """
    samples: dict[str, list[Sample]] = {"data.validation": []}
    notes = []
    for key, (path, split) in data.sources().items():
        source = source_words(path, split)
        samples[key], skipped = build(load_records(path, fields=fields, split=split), source)
        notes.append(f"{source}: {skipped.describe()}{files_in_words(path, split)}")
    return samples["data.train"], samples["data.validation"], notes


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What all encoders need to know."""

    tokenizer: Path
    """The directory of the tokenizer."""
    max_prompt_tokens: int
    template: Template = "plain"

    def key(self) -> dict[str, Any]:
        """See `Encoder.key`."""
        values = {name: value for name, value in asdict(self).items() if name not in ("tokenizer", "check_fields")}
        return {"samples": type(self).__name__, "tokenizer": tokenizer_digest(self.tokenizer), **values}

    def _loaded(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.tokenizer)
        require_template(self.template, tokenizer)
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class SFTEncoder(_Options):
    """Of records with `prompt` and `response` (or `messages`)."""

    max_response_tokens: int

    def open(self) -> Encode[SFTSample]:
        """See `Encoder.open`."""
        return self.by(self._loaded())

    def by(self, tokenizer: Tokenizer) -> Encode[SFTSample]:
        """With a tokenizer that is there."""

        def sample(index: int, record: Mapping[str, Any]) -> SFTSample:
            prompt, response = prompt_and_response(record, self.template, tokenizer)
            prompt_tokens = _prompt_tokens(prompt, tokenizer, self.max_prompt_tokens)
            response_tokens = _response_tokens(response, tokenizer, self.max_response_tokens)
            return SFTSample.of_response(prompt_tokens + response_tokens, len(prompt_tokens))

        return sample


@dataclass(frozen=True, kw_only=True)
class PairEncoder(_Options):
    """Of records with `prompt`, `chosen` and `rejected`, and `margin` where it is asked for."""

    max_response_tokens: int
    with_margin: bool = False

    def open(self) -> Encode[PairSample]:
        """See `Encoder.open`."""
        return self.by(self._loaded())

    def by(self, tokenizer: Tokenizer) -> Encode[PairSample]:
        """With a tokenizer that is there."""

        def sample(index: int, record: Mapping[str, Any]) -> PairSample:
            if not record["prompt"].strip():  # of which a chat template would make a text
                raise Unusable("empty prompt")
            text = question(record, self.template, tokenizer)
            prompt_tokens = _prompt_tokens(text, tokenizer, self.max_prompt_tokens)
            chosen_tokens, rejected_tokens = (
                _response_tokens(record[name], tokenizer, self.max_response_tokens) for name in ("chosen", "rejected")
            )
            if chosen_tokens == rejected_tokens:
                raise Unusable("chosen equals rejected")
            margin = _margin(record) if self.with_margin else 0.0
            return PairSample(prompt_tokens, chosen_tokens, rejected_tokens, margin)

        return sample


@dataclass(frozen=True, kw_only=True)
class PromptEncoder(_Options):
    """Of records with `prompt` (or `messages`)."""

    check_fields: FieldCheck | None = None

    def key(self) -> dict[str, Any]:
        """See `Encoder.key`."""
        return {**super().key(), "check_fields": [] if self.check_fields is None else self.check_fields.key()}

    def open(self) -> Encode[PromptSample]:
        """See `Encoder.open`."""
        return self.by(self._loaded())

    def by(self, tokenizer: Tokenizer) -> Encode[PromptSample]:
        """With a tokenizer that is there."""

        def sample(index: int, record: Mapping[str, Any]) -> PromptSample:
            text = prompt_text(record, self.template, tokenizer)
            others = {key: value for key, value in record.items() if key not in ("prompt", "messages")}
            tokens = _prompt_tokens(text, tokenizer, self.max_prompt_tokens)
            if self.check_fields is not None:
                self.check_fields(others)
            messages = record.get("messages") if self.template == "chat" else None
            return PromptSample(tokens, text, others, index, messages)

        return sample


def build_sft(records: Records, tokenizer: Tokenizer, **options: Any) -> tuple[list[SFTSample], Skipped]:
    """Samples by `SFTEncoder`, whose options they are. ValueError if none can be used."""
    return _built(SFTEncoder(tokenizer=Path(), **options), records, tokenizer)


def build_pairs(records: Records, tokenizer: Tokenizer, **options: Any) -> tuple[list[PairSample], Skipped]:
    """Samples by `PairEncoder`, whose options they are. ValueError if none can be used."""
    return _built(PairEncoder(tokenizer=Path(), **options), records, tokenizer)


def build_prompts(records: Records, tokenizer: Tokenizer, **options: Any) -> tuple[list[PromptSample], Skipped]:
    """Samples by `PromptEncoder`, whose options they are. ValueError if none can be used."""
    return _built(PromptEncoder(tokenizer=Path(), **options), records, tokenizer)


def _built(encoder: Any, records: Records, tokenizer: Tokenizer) -> tuple[list[Any], Skipped]:
    require_template(encoder.template, tokenizer)
    return encode_records(records, encoder.by(tokenizer))


def _margin(record: Mapping[str, Any]) -> float:
    value = record.get("margin")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"margin = {value!r}, expected a number: by how much chosen and rejected should differ")
    return float(value)


def encode_records(records: Records, encode: Encode[Sample]) -> tuple[list[Sample], Skipped]:
    """The sample of every record that is not `Unusable`; errors name the record. ValueError if none can be used."""
    samples: list[Sample] = []
    skipped = Skipped(len(records))
    for index, record in enumerate(records):
        try:
            samples.append(encode(index, record))
        except Unusable as reason:
            skipped.reasons[str(reason)] += 1
        except ValueError as error:
            where = record.where if isinstance(record, Record) else f"record {index + 1}"
            raise ValueError(f"{where}: {error}") from error
    if not samples:
        raise ValueError(
            f"no usable records: {skipped.describe()}; raise the limits or give other data"
            if skipped.total
            else "no records; give data"
        )
    return samples, skipped


def _prompt_tokens(text: str, tokenizer: Tokenizer, limit: int) -> list[int]:
    tokens = tokenizer.encode(text)
    if not text.strip() or not tokens:
        raise Unusable("empty prompt")
    tokens = with_bos(tokens, tokenizer)
    if len(tokens) > limit:
        raise Unusable(f"prompt longer than {limit} tokens")
    return tokens


def with_bos(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Behind begin-of-sequence, where the tokenizer has it; a chat template may have written it itself."""
    if tokenizer.bos_id is None or tokens[:1] == [tokenizer.bos_id]:
        return tokens
    return [tokenizer.bos_id, *tokens]


def _response_tokens(text: str, tokenizer: Tokenizer, limit: int) -> list[int]:
    if not text.strip():
        raise Unusable("empty response")
    tokens = [*tokenizer.encode(text, continuation=True), tokenizer.eos_id]
    if len(tokens) > limit:
        raise Unusable(f"response longer than {limit} tokens")
    return tokens


def require_positions(longest: int, max_positions: int, model: str) -> None:
    """Raises ValueError when a sample has more tokens than the model has positions."""
    if longest > max_positions:
        raise ValueError(
            f"the longest sample has {longest} tokens, {model} has max_position_embeddings = {max_positions}; lower "
            "data.max_prompt_tokens or data.max_response_tokens, so that such samples are skipped and counted"
        )


def require_budget(tokens: Sequence[int], budget: int | None, path: str, sample: str) -> None:
    """Raises ValueError when a sample has more tokens than a packed micro-batch may hold (`None`: it is not packed)."""
    if budget is not None and max(tokens) > budget:
        longest = max(range(len(tokens)), key=tokens.__getitem__)
        raise ValueError(
            f"{path}: usable record {longest} has {tokens[longest]} tokens ({sample}), but "
            f"train.max_tokens_per_micro_batch = {budget}, and no sequence is split; raise it to {tokens[longest]} or "
            "more, or lower data.max_prompt_tokens or data.max_response_tokens: what is longer is skipped and counted"
        )
