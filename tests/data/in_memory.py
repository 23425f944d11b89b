"""Records and samples as lists in memory, without the cache that a run has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarlhf.config import SourceConfig
from megarlhf.config.data import parse_blend
from megarlhf.data.sample_types import PairSample, PromptSample, SFTSample, Skipped, Unusable, sample_of
from megarlhf.data.samples.dataset import Joined, Samples
from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.samples.megatron_indexed import IndexedOptions, learnt_whole
from megarlhf.data.sources.fields import LeftOut, Reader
from megarlhf.data.sources.find import find
from megarlhf.data.tokenizers.tokenizer import Tokenizer

Source = str | Path | SourceConfig
Records = Sequence[Mapping[str, Any]]


class Record(dict[str, Any]):
    """A record with its location: "data.jsonl, line 3"."""

    where = ""


def source_of(source: Source, split: str | None = None) -> SourceConfig:
    return source if isinstance(source, SourceConfig) else SourceConfig(path=Path(source), split=split)


def load_records(source: Source, *, fields: Sequence[str] = (), split: str | None = None) -> list[Record]:
    source = source_of(source, split)
    reader, records = Reader(source, fields), list[Record]()
    for chunk in find(source).chunks():
        for where, row in chunk.located():
            try:
                record = Record(reader.record(row, where))
            except LeftOut:
                continue
            record.where = where
            records.append(record)
    return records


def open_indexed(
    blend: str | Path | Sequence[str], split: str | None, sequence_length: int, seed: int, part: str = "train"
) -> Samples[SFTSample]:
    """Samples of a prefix or a blend of several, all tokens learnt."""
    blend = blend if isinstance(blend, str) else " ".join(map(str, [blend] if isinstance(blend, Path) else blend))
    named, options = parse_blend(blend), IndexedOptions(sequence_length, seed, learnt_whole)
    parts = [options.open(SourceConfig(path=prefix, kind="megatron", split=split), part) for _, prefix in named]
    weights = [weight for weight, _ in named if weight is not None]
    return parts[0] if len(parts) == 1 else Joined(parts, [len(part) for part in parts], weights or None)


def build_sft(records: Records, tokenizer: Tokenizer, **options: Any) -> tuple[list[SFTSample], Skipped]:
    return _encoded(SFTEncoder(tokenizer=Path(), **options), records, tokenizer)


def build_pairs(records: Records, tokenizer: Tokenizer, **options: Any) -> tuple[list[PairSample], Skipped]:
    return _encoded(PairEncoder(tokenizer=Path(), **options), records, tokenizer)


def build_prompts(records: Records, tokenizer: Tokenizer, **options: Any) -> tuple[list[PromptSample], Skipped]:
    return _encoded(PromptEncoder(tokenizer=Path(), **options), records, tokenizer)


def _encoded(encoder: Any, records: Records, tokenizer: Tokenizer) -> tuple[list[Any], Skipped]:
    encode, samples, skipped = encoder.by(tokenizer), list[Any](), Skipped(len(records))
    for index, record in enumerate(records):
        try:
            samples.append(sample_of(encode(index, record)))
        except Unusable as reason:
            skipped.reasons[str(reason)] += 1
        except ValueError as error:
            raise ValueError(f"{getattr(record, 'where', f'record {index + 1}')}: {error}") from error
    return samples, skipped
