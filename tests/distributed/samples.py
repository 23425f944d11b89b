"""Samples of a file, or of the sets of a configuration, in memory and in the order of the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarlhf.config import SourceConfig
from megarlhf.data.sample_types import PairSample, PromptSample, SFTSample
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from tests.data.in_memory import Record, build_pairs, build_prompts, build_sft, load_records

Source = str | Path | Sequence[SourceConfig]


def records_of(source: Source, *fields: str) -> list[Record]:
    sources = [source] if isinstance(source, str | Path) else source
    return [record for one in sources for record in load_records(one, fields=fields)]


def sft_samples(source: Source, model: Path, limit: int = 64) -> list[SFTSample]:
    """`limit`: tokens of the longest prompt and of the longest response that are taken."""
    limits = {"max_prompt_tokens": limit, "max_response_tokens": limit}
    return build_sft(records_of(source, "prompt", "response"), load_tokenizer(model), **limits)[0]


def pair_samples(source: Source, model: Path, limit: int = 64) -> list[PairSample]:
    limits = {"max_prompt_tokens": limit, "max_response_tokens": limit}
    return build_pairs(records_of(source, "prompt", "chosen", "rejected"), load_tokenizer(model), **limits)[0]


def prompt_samples(source: Source, model: Path, limit: int = 64) -> list[PromptSample]:
    return build_prompts(records_of(source, "prompt"), load_tokenizer(model), max_prompt_tokens=limit)[0]
