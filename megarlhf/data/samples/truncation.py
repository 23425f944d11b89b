"""Texts that are cut at the limit over which they would be left out, for `sft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megarlhf.data.sample_types import Changed, sample_of
from megarlhf.data.samples.encoders import SFTEncoder, SFTSample, Unusable
from megarlhf.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class CuttingEncoder:
    """As `encoder`, but that a text is cut at the limit for which it would be skipped. It is still
    skipped where its prompt is too long, or nothing that is learnt stands before the limit."""

    encoder: SFTEncoder

    def load(self) -> Tokenizer:
        """See `Encoder.load`."""
        return self.encoder.load()

    def by(self, loaded: Tokenizer) -> Callable[[int, Mapping[str, Any]], SFTSample | Changed]:
        """See `Encoder.by`."""
        encode = self.encoder.of_any_length(loaded)

        def cut(index: int, record: Mapping[str, Any]) -> SFTSample | Changed:
            made, limit = encode(index, record)
            sample: SFTSample = sample_of(made)
            if len(sample.tokens) <= limit.end:
                return made
            if sample.prompt_length >= limit.end:
                raise Unusable(limit.over)
            other = made.how if isinstance(made, Changed) else ()
            return Changed(cut_at(sample, limit.end), (*other, f"{limit.what} cut at {limit.tokens} tokens"))

        return cut

    def key(self) -> dict[str, Any]:
        """See `Encoder.key`."""
        return {**self.encoder.key(), "over_long": "cut where it would be skipped"}


def cut_at(sample: SFTSample, end: int) -> SFTSample:
    """What is learnt of its first `end` tokens, and all before it: behind the last learnt token nothing is of use."""
    pairs = zip(sample.stretches[0::2], sample.stretches[1::2], strict=True)
    kept = [min(border, end) for first, last in pairs if first < end for border in (first, last)]
    return SFTSample(sample.tokens[: kept[-1]], kept)
