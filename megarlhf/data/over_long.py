"""Responses that are cut at the longest length instead of being left out, for `sft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarlhf.data.encode import Changed
from megarlhf.data.samples import SFTEncoder, SFTSample
from megarlhf.data.tokenizer import Tokenizer

_ANY_LENGTH = 2**31 - 1


@dataclass(frozen=True)
class CuttingEncoder:
    """As `encoder`, but that a text ends `max_response_tokens` behind the first token that is learnt."""

    encoder: SFTEncoder

    def load(self) -> Tokenizer:
        """See `Encoder.load`."""
        return self.encoder.load()

    def by(self, loaded: Tokenizer) -> Callable[[int, Mapping[str, Any]], SFTSample | Changed]:
        """See `Encoder.by`."""
        most = self.encoder.max_response_tokens
        encode = replace(self.encoder, max_response_tokens=_ANY_LENGTH).by(loaded)

        def cut(index: int, record: Mapping[str, Any]) -> SFTSample | Changed:
            sample = encode(index, record)
            end = sample.prompt_length + most
            if len(sample.tokens) <= end:
                return sample
            return Changed(cut_at(sample, end), f"response cut at {most} tokens")

        return cut

    def key(self) -> dict[str, Any]:
        """See `Encoder.key`."""
        return {**self.encoder.key(), "over_long": "cut"}


def cut_at(sample: SFTSample, end: int) -> SFTSample:
    """Its first `end` tokens, with what is learnt of them."""
    pairs = zip(sample.stretches[0::2], sample.stretches[1::2], strict=True)
    kept = [min(border, end) for first, last in pairs if first < end for border in (first, last)]
    return SFTSample(sample.tokens[:end], kept)
