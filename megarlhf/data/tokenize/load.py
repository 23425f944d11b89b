"""Sets of records, as the configuration names them, to samples on disk: tokenized once, then mapped by every rank."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from megarlhf.config import DataConfig, PromptDataConfig, SourceConfig
from megarlhf.config.data import PHASES
from megarlhf.data.sample_types import Encoder, PromptSample, Skipped
from megarlhf.data.samples.columns import FORMAT, Columns, ColumnWriter
from megarlhf.data.samples.dataset import Joined, Samples, Stored, positions_of_shared
from megarlhf.data.samples.encoders import Form, PairEncoder, PromptEncoder, SFTEncoder, form_of_record
from megarlhf.data.samples.megatron_indexed import IndexedOptions, IndexedSamples
from megarlhf.data.samples.split import phase_share, set_aside
from megarlhf.data.samples.truncation import CuttingEncoder
from megarlhf.data.sources.adapters import digest_of_adapter
from megarlhf.data.sources.fields import LEFT_OUT, Fields, LeftOut, Reader
from megarlhf.data.sources.find import FoundSource, files_in_words, find
from megarlhf.data.tokenize.cache import cache_directory, digest_of_file, entry, key_of, stamp
from megarlhf.data.tokenize.workers import EncodingJob, encode_all

logger = logging.getLogger(__name__)
Sample = TypeVar("Sample")
Whole = Stored[Sample] | IndexedSamples[Sample]
"""All samples of a set."""
_SHOWN_COLUMNS = 20
_READERS = ("tokenizers", "transformers", "sentencepiece", "jinja2", "reasoning-gym")
"""Packages of which another version may make other tokens or rows."""


@dataclass(frozen=True)
class SetLoader(Generic[Sample]):
    """How sets become samples in a run."""

    data: PromptDataConfig
    encoder: Encoder[Sample]
    sample_type: type[Sample]
    fields: Fields = ()
    """What each record must have, apart from what the encoder looks for."""
    run_dir: Path | None = None
    """Where `data.cache: none` keeps them."""
    indexed: IndexedOptions[Sample] | None = None
    """How sets of kind `megatron` are read; None where there may be none."""

    def train_and_validation(
        self, command: str | None = None
    ) -> tuple[Samples[Sample], Samples[Sample] | list[Sample], list[str]]:
        """Training and held-out samples (none without any), and what was skipped, in words.

        command: whose share of `data.phases` is read

        Raises: ValueError for what cannot be read, encoded or kept.
        """
        data, notes, shared = self.data, list[str](), list[str]()
        parts = [self._part(source, notes, command) for source in data.train]
        held: Samples[Sample] | list[Sample] = []
        if data.validation is not None:
            held, of_held = self.whole(data.validation, "validation")
            notes += of_held
            if data.validation != data.train:  # else it is said with the configuration
                shared = _shared_in_words("held-out prompts", held, _joined(parts))
        elif data.validation_share is not None:
            kept, away = set_aside([part for _, part in parts], data.validation_share, data.split_seed)
            for source, left in zip(data.train, kept, strict=True):
                if source.weight is not None and not len(left):
                    raise ValueError(
                        f"data.validation_share = {data.validation_share:g} sets all samples of {source.words} aside, "
                        f"and its weight is {source.weight:g}; give a smaller share, or this set more data"
                    )
            wholes = [stored for stored, _ in parts]
            held = _joined(list(zip(wholes, away, strict=True)))
            parts = list(zip(wholes, kept, strict=True))
            trained = sum(len(part) for _, part in parts)
            notes.append(
                f"data.validation_share = {data.validation_share:g}: {len(held)} samples are set aside "
                f"({len(held) / (len(held) + trained):.2g} of all), and {trained} are trained on"
            )
        weights = [source.weight for source in data.train if source.weight is not None]
        return _joined(parts, weights or None), held, notes + shared

    def test(self, train: Samples[Sample]) -> tuple[Samples[Sample], list[str]]:
        """The samples of `data.test`, and what was skipped, in words, with how many prompts stand in `train` too.
        Raises: ValueError as above."""
        assert self.data.test is not None, "asked only where there is some"
        test, notes = self.whole(self.data.test, "test")
        if self.data.test != self.data.train:
            notes += _shared_in_words("prompts of data.test", test, train)
        return test, notes

    def whole(self, sources: Sequence[SourceConfig], part: str = "train") -> tuple[Samples[Sample], list[str]]:
        """All samples of some sets, and what was skipped, in words. `part`: of sets with a split of Megatron's. Raises:
        ValueError as above."""
        notes: list[str] = []
        stored = [self.stored(source, notes, part) for source in sources]
        weights = [source.weight for source in sources if source.weight is not None]
        return _joined([(each, each) for each in stored], weights or None), notes

    def _part(
        self, source: SourceConfig, notes: list[str], command: str | None
    ) -> tuple[Whole[Sample], Samples[Sample]]:
        stored = self.stored(source, notes)
        shares = self.data.phase_shares()
        if shares is None:
            return stored, stored
        assert command is not None, "refused for commands without a phase"
        phase = PHASES[command]
        share = phase_share(stored, shares, phase, self.data.split_seed)
        notes.append(
            f"{source.words}: data.phases = {self.data.phases} gives {command} {len(share)} of {len(stored)} samples"
        )
        return stored, share

    def stored(self, source: SourceConfig, notes: list[str], part: str = "train") -> Whole[Sample]:
        """All samples of one set, tokenized by whoever comes first. Raises: ValueError."""
        if source.kind == "megatron":
            assert self.indexed is not None, "refused for commands that read none"
            samples = self.indexed.open(source, part)
            notes.append(f"{source.words}: {len(samples)} samples of {self.indexed.sequence_length} + 1 tokens")
            return samples
        place = find(source)
        cache = cache_directory(self.data.cache, self.run_dir)
        encoder = self._encoder()
        key = key_of(
            {
                "format": FORMAT,
                "bos": "as the tokenizer writes it",  # not in every text whose tokenizer has one, as of old
                "tokenizer": "as tokenizer.json stands",  # not as transformers rewrites it, as of old
                "content": _content(place, cache),
                "adapter": digest_of_adapter(source.adapter),
                "columns": source.columns,
                "encoder": encoder.key(),
                "versions": {name: _version(name) for name in _READERS},
            }
        )
        job = EncodingJob(source, _of_one_form(encoder, place), self.sample_type, self.fields)
        directory, made = entry(cache, key, lambda partial: _tokenize(place, job, partial, self.data.workers))
        columns = Columns(directory, self.sample_type)
        manifest = columns.manifest
        logger.info("%s: %d samples %s %s", source.words, columns.num_samples, "kept in" if made else "of", directory)
        notes.append(self._in_words(manifest, source))
        return Stored(columns)

    def _in_words(self, manifest: dict[str, Any], source: SourceConfig) -> str:
        """What was read of a set. Raises: ValueError where too much of it was skipped."""
        skipped, most = Skipped(manifest["num_records"], Counter(manifest["skipped"])), self.data.max_skipped
        share = skipped.share(but=LEFT_OUT)
        words = f"{source.words}: {skipped.describe()}" + f", {100 * share:.2g} % of them" * bool(share)
        if share > most:
            raise ValueError(
                f"{words}, and data.max_skipped = {most:g} allows {100 * most:g} %. Raise the limits, mend the data, "
                f"or set data.max_skipped={math.ceil(100 * share) / 100:g} if so many are meant to be left out"
            )
        changed = "".join(f"; {how}: {count}" for how, count in sorted(manifest["changed"].items()))
        changed += _unread_in_words(manifest["unread"], manifest["num_records"] - skipped.count())
        return f"{'WARNING: ' * bool(share)}{words}{changed}{files_in_words(source)}"

    def _encoder(self) -> Any:
        encoder: Any = self.encoder
        if isinstance(self.data, DataConfig) and self.data.over_long == "cut":
            assert isinstance(encoder, SFTEncoder), "refused for other commands"
            return CuttingEncoder(encoder)
        return encoder


def _of_one_form(encoder: Any, place: FoundSource) -> Any:
    """The encoder, told what the first record of the set is. What is wrong with that one is said when it is encoded."""
    if isinstance(encoder, CuttingEncoder):
        return CuttingEncoder(_of_one_form(encoder.encoder, place))
    if not isinstance(encoder, SFTEncoder | PairEncoder | PromptEncoder) or encoder.template != "auto":
        return encoder
    first = first_record(encoder, place)
    return encoder if first is None else replace(encoder, form=first[0])


def first_record(encoder: Any, place: FoundSource) -> tuple[Form, Mapping[str, Any]] | None:
    """What the first record of a set that can be used is read as, and the record, where a look at the disk tells it."""
    reader = Reader(place.source, ())
    for where, row in place.first_rows(3):
        with contextlib.suppress(LeftOut, ValueError):
            record = reader.record(row, where)
            if (form := form_of_record(encoder, record)) is not None:
                return form, record
    return None


def _unread_in_words(columns: Mapping[str, int], records: int) -> str:
    """Columns of which nothing is in the samples, in words; how many records have one where it is not all."""
    if not columns:
        return ""
    shown = [name if count == records else f"{name} (in {count})" for name, count in sorted(columns.items())]
    more = f" and {len(shown) - _SHOWN_COLUMNS} others" * (len(shown) > _SHOWN_COLUMNS)
    return f"; columns that are not read: {', '.join(shown[:_SHOWN_COLUMNS])}{more}"


def _content(place: FoundSource, cache: Path) -> list[Any]:
    """What a source consists of, wherever it lies."""
    if place.kind == "files":
        return ["files", *(digest_of_file(file, cache) for file in _files(place))]
    if place.kind == "saved":
        return ["saved", *((file.name, digest_of_file(file, cache)) for file in _files(place))]
    if place.kind == "generated":
        return ["generated", str(place.source.path)]
    return ["hub", str(place.source.path), place.source.subset, place.source.split, _hub_revision(place.source)]


def _hub_revision(source: SourceConfig) -> str:
    """The commit that the hub has of a dataset. Raises: ValueError where the hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(str(source.path)).sha)
    except Exception as error:  # network, name, permission: one message for all
        raise ValueError(
            f"{source.path} is not on disk, and asking the Hugging Face hub for it failed: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}; check the name, or download it where there is a network"
        ) from error


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tokenize(place: FoundSource, job: EncodingJob, directory: Path, workers: int | None) -> None:
    """Raises: ValueError, also for a source without a usable record."""
    logger.info("tokenizing %s", job.source.words)
    before = _stamps(place)
    writer = ColumnWriter(directory, job.sample_type)
    try:
        encode_all(job, place.chunks(), writer, workers)
        if not writer.num_records:
            raise ValueError(f"no rows in {job.source.words}; give data")
        if not writer.num_samples:
            skipped = Skipped(writer.num_records, writer.skipped).describe()
            raise ValueError(f"{job.source.words}: no usable records: {skipped}; raise the limits or give other data")
        if _stamps(place) != before:
            raise ValueError(f"{job.source.words} was changed while it was read; start again when it is whole")
        writer.finish(source=job.source.words)
    finally:
        writer.close()


def _stamps(place: FoundSource) -> list[list[int]]:
    return [stamp(file) for file in _files(place)]


def _files(place: FoundSource) -> list[Path]:
    """Of a source on disk: in the order in which they are read, or of their names."""
    if place.kind == "saved":
        return sorted(file for file in place.files[0].rglob("*") if file.is_file())
    return list(place.files)


def _shared_in_words(what: str, samples: Samples[Any], train: Samples[Any]) -> list[str]:
    """That prompts are trained on too: data that is said to be apart may be a copy. Nothing where none is."""
    shared = positions_of_shared(samples, train)
    if not len(shared):
        return []
    first = f"the first as record {int(samples.records()[shared[0]]) + 1}"
    sample = samples[int(shared[0])]
    text = f": {textwrap.shorten(sample.text, 60)!r}" if isinstance(sample, PromptSample) else ""
    return [f"{len(shared)} of {len(samples)} {what} stand in the training data too, {first}{text}"]


def _joined(
    parts: Sequence[tuple[Whole[Sample], Samples[Sample]]], weights: Sequence[float] | None = None
) -> Samples[Sample]:
    """What is read of each set, one after the other; `parts` has the whole set beside it."""
    if len(parts) == 1:
        return parts[0][1]
    return Joined([samples for _, samples in parts], [stored.num_records for stored, _ in parts], weights)
