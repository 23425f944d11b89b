"""Samples: records as token ids, with every record that cannot be used counted under its reason.

Nothing is cut: a record over a limit is skipped and counted. Lengths are in tokens; a response's includes its
eos, as in rollout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megarlhf.config import PromptDataConfig, words_of
from megarlhf.data.sources import Record, files_in_words, load_records
from megarlhf.data.templates import Template, prompt_and_response, prompt_text, question, require_template
from megarlhf.data.tokenizer import Tokenizer

Records = Sequence[Mapping[str, Any]]
Sample = TypeVar("Sample")


@dataclass(frozen=True)
class SFTSample:
    """A prompt and the response to learn."""

    tokens: list[int]
    """Prompt, response, eos."""
    prompt_length: int
    """How many of them are the prompt; the loss is on the others."""


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


class _Unusable(Exception):
    """A record that has to be skipped; its text is the reason."""


def load_splits(
    data: PromptDataConfig,
    fields: Sequence[str],
    build: Callable[[Records, str], tuple[list[Sample], Skipped]],
) -> tuple[list[Sample], list[Sample], list[str]]:
    """Training and held-out samples (none without held-out data), and what was skipped in words.

    `build` makes the samples of a source's records, which have `fields`; it is told the source for its messages.
    """
    for key, default in (("validation_share", None), ("phases", None), ("over_long", "drop")):
        if getattr(data, key, default) != default:
            raise ValueError(f"data.{key} is not there yet; leave it out")
    if data.train[0].weight is not None:
        raise ValueError("weights of data.train are not there yet; leave them out")
    samples: dict[str, list[Sample]] = {"data.validation": []}
    notes = []
    for key, sources in data.sources().items():
        source = words_of(sources)
        samples[key], skipped = build(load_records(sources, fields=fields), source)
        notes.append(f"{source}: {skipped.describe()}{''.join(map(files_in_words, sources))}")
    return samples["data.train"], samples["data.validation"], notes


def build_sft(
    records: Records,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    template: Template = "plain",
) -> tuple[list[SFTSample], Skipped]:
    """Samples of records with `prompt` and `response` (or `messages`). ValueError if none can be used."""

    def sample(index: int, record: Mapping[str, Any]) -> SFTSample:
        prompt, response = prompt_and_response(record, template, tokenizer)
        prompt_tokens = _prompt_tokens(prompt, tokenizer, max_prompt_tokens)
        return SFTSample(prompt_tokens + _response_tokens(response, tokenizer, max_response_tokens), len(prompt_tokens))

    return _usable(records, sample, template, tokenizer)


def build_pairs(
    records: Records,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    template: Template = "plain",
    with_margin: bool = False,
) -> tuple[list[PairSample], Skipped]:
    """Samples of records with `prompt`, `chosen` and `rejected`, and `margin` where it is asked for. ValueError if none
    can be used."""

    def sample(index: int, record: Mapping[str, Any]) -> PairSample:
        if not record["prompt"].strip():  # of which a chat template would make a text
            raise _Unusable("empty prompt")
        prompt_tokens = _prompt_tokens(question(record, template, tokenizer), tokenizer, max_prompt_tokens)
        chosen_tokens, rejected_tokens = (
            _response_tokens(record[name], tokenizer, max_response_tokens) for name in ("chosen", "rejected")
        )
        if chosen_tokens == rejected_tokens:
            raise _Unusable("chosen equals rejected")
        return PairSample(prompt_tokens, chosen_tokens, rejected_tokens, _margin(record) if with_margin else 0.0)

    return _usable(records, sample, template, tokenizer)


def build_prompts(
    records: Records,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    template: Template = "plain",
    check_fields: Callable[[Mapping[str, Any]], None] = lambda fields: None,
) -> tuple[list[PromptSample], Skipped]:
    """Samples of records with `prompt` (or `messages`). ValueError if none can be used, and where `check_fields`
    raises one for the fields of a sample."""

    def sample(index: int, record: Mapping[str, Any]) -> PromptSample:
        text = prompt_text(record, template, tokenizer)
        others = {key: value for key, value in record.items() if key not in ("prompt", "messages")}
        tokens = _prompt_tokens(text, tokenizer, max_prompt_tokens)
        check_fields(others)
        return PromptSample(tokens, text, others, index, record.get("messages") if template == "chat" else None)

    return _usable(records, sample, template, tokenizer)


def _margin(record: Mapping[str, Any]) -> float:
    value = record.get("margin")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"margin = {value!r}, expected a number: by how much chosen and rejected should differ")
    return float(value)


def _usable(
    records: Records,
    sample: Callable[[int, Mapping[str, Any]], Sample],
    template: Template,
    tokenizer: Tokenizer,
) -> tuple[list[Sample], Skipped]:
    """`sample(index, record)` of every record that it does not refuse as `_Unusable`; other errors name the record."""
    require_template(template, tokenizer)
    samples: list[Sample] = []
    skipped = Skipped(len(records))
    for index, record in enumerate(records):
        try:
            samples.append(sample(index, record))
        except _Unusable as reason:
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
        raise _Unusable("empty prompt")
    tokens = with_bos(tokens, tokenizer)
    if len(tokens) > limit:
        raise _Unusable(f"prompt longer than {limit} tokens")
    return tokens


def with_bos(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Behind begin-of-sequence, where the tokenizer has it; a chat template may have written it itself."""
    if tokenizer.bos_id is None or tokens[:1] == [tokenizer.bos_id]:
        return tokens
    return [tokenizer.bos_id, *tokens]


def _response_tokens(text: str, tokenizer: Tokenizer, limit: int) -> list[int]:
    if not text.strip():
        raise _Unusable("empty response")
    tokens = [*tokenizer.encode(text, continuation=True), tokenizer.eos_id]
    if len(tokens) > limit:
        raise _Unusable(f"response longer than {limit} tokens")
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
