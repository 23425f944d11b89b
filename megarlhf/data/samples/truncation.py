"""Cutting of texts that are too long, for `sft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarlhf.data.sample_types import Changed, sample_of
from megarlhf.data.samples.encoders import SFTEncoder, SFTSample, Unusable
from megarlhf.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class CuttingEncoder:
    """Encoder that cuts a text at the limit, where `encoder` would skip it. It is still skipped where its prompt is too
    long, or nothing before the limit is learnt."""

    encoder: SFTEncoder

    def load(self) -> Tokenizer:
        return self.encoder.load()

    def by(self, loaded: Tokenizer) -> Callable[[int, Mapping[str, Any]], SFTSample | Changed]:
        encode = self.encoder.of_any_length(loaded)

        def cut(index: int, record: Mapping[str, Any]) -> SFTSample | Changed:
            encoded, limit = encode(index, record)
            sample: SFTSample = sample_of(encoded)
            if len(sample.tokens) <= limit.end:
                return encoded
            if sample.prompt_length >= limit.end:
                raise Unusable(limit.over)
            other = encoded.how if isinstance(encoded, Changed) else ()
            return Changed(cut_at(sample, limit.end), (*other, f"{limit.what} cut at {limit.tokens} tokens"))

        return cut

    def key(self) -> dict[str, Any]:
        return {**self.encoder.key(), "over_long": "cut where it would be skipped"}


def cut_at(sample: SFTSample, end: int) -> SFTSample:
    """The sample up to the last learnt token among its first `end` tokens."""
    pairs = zip(sample.stretches[0::2], sample.stretches[1::2], strict=True)
    kept = [min(border, end) for first, last in pairs if first < end for border in (first, last)]
    return SFTSample(sample.tokens[: kept[-1]], kept)
