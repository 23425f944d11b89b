"""Loading of the configuration's sets: records are tokenized once to samples on disk, which every rank maps."""

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
from megarlhf.data.samples.columns import FORMAT, ColumnWriter
from megarlhf.data.samples.dataset import Joined, Samples, Stored, positions_of_shared
from megarlhf.data.samples.encoders import Form, PairEncoder, PromptEncoder, SFTEncoder, form_of_record
from megarlhf.data.samples.megatron_indexed import IndexedOptions, IndexedSamples
from megarlhf.data.samples.split import phase_share, set_aside
from megarlhf.data.samples.truncation import CuttingEncoder
from megarlhf.data.sources.adapters import digest_of_adapter
from megarlhf.data.sources.environment_source import is_environment, look_at_source
from megarlhf.data.sources.fields import LEFT_OUT, LeftOut, Reader
from megarlhf.data.sources.find import FoundSource, find
from megarlhf.data.tokenize.cache import cache_directory, digest_of_file, entry, key_of, stamp
from megarlhf.data.tokenize.workers import EncodingJob, encode_all

logger = logging.getLogger(__name__)
Sample = TypeVar("Sample")
Whole = Stored[Sample] | IndexedSamples[Sample]
"""The samples of a whole set."""
_SHOWN_COLUMNS = 20
_READERS = ("tokenizers", "transformers", "sentencepiece", "jinja2", "reasoning-gym")
"""Packages whose versions may change tokens or rows."""


@dataclass(frozen=True)
class SetLoader(Generic[Sample]):
    """Loads the sets of a run as samples."""

    data: PromptDataConfig
    encoder: Encoder[Sample]
    sample_type: type[Sample]
    fields: Sequence[str] = ()
    """Columns that each record must have as texts, apart from those that the encoder checks."""
    run_dir: Path | None = None
    """Directory for the samples with `data.cache: none`."""
    indexed: IndexedOptions[Sample] | None = None
    """Options for sets of kind `megatron`. None where these are not allowed."""

    def train_and_validation(
        self, command: str | None = None
    ) -> tuple[Samples[Sample], Samples[Sample] | list[Sample], list[str]]:
        """Training samples, held-out samples (empty without any), and notes on skipped records.

        command: its share of `data.phases` is read

        Raises: ValueError for data that cannot be read, encoded or kept.
        """
        data, notes, shared = self.data, list[str](), list[str]()
        parts = [self._part(source, notes, command) for source in data.train]
        held: Samples[Sample] | list[Sample] = []
        if data.validation is not None:
            held, notes_on_held = self.whole(data.validation, "validation")
            notes += notes_on_held
            if data.validation != data.train:  # else a note on the configuration says it
                shared = _note_shared("held-out prompts", held, _joined(parts))
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
        """The samples of `data.test`, and notes on skipped records and on prompts that `train` has too. Raises:
        ValueError as above."""
        assert self.data.test is not None, "asked only where there is some"
        test, notes = self.whole(self.data.test, "test")
        if self.data.test != self.data.train:
            notes += _note_shared("prompts of data.test", test, train)
        return test, notes

    def whole(self, sources: Sequence[SourceConfig], part: str = "train") -> tuple[Samples[Sample], list[str]]:
        """All samples of several sets, and notes on skipped records. `part`: the part of sets with Megatron's split.
        Raises: ValueError as above."""
        notes: list[str] = []
        stored = [self.stored(source, notes, part) for source in sources]
        weights = [source.weight for source in sources if source.weight is not None]
        return _joined([(samples, samples) for samples in stored], weights or None), notes

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
        """All samples of one set, tokenized by the first process that needs them. Raises: ValueError."""
        if source.kind == "megatron":
            assert self.indexed is not None, "refused for commands that read none"
            samples = self.indexed.open(source, part)
            notes.append(f"{source.words}: {len(samples)} samples of {self.indexed.sequence_length} + 1 tokens")
            return samples
        found_source = find(source)
        cache = cache_directory(self.data.cache, self.run_dir)
        encoder = self._encoder()
        key = key_of(
            {
                "format": FORMAT,
                "bos": "as the tokenizer writes it",  # older versions wrote bos in every text
                "tokenizer": "as tokenizer.json stands",  # older versions used transformers' rewriting of it
                "content": _content(found_source, cache),
                "adapter": digest_of_adapter(source.adapter),
                "columns": source.columns,
                "encoder": encoder.key(),
                "versions": {name: _version(name) for name in _READERS},
            }
        )
        job = EncodingJob(source, _of_one_form(encoder, found_source), self.sample_type, self.fields)
        directory, made = entry(cache, key, lambda partial: _tokenize(found_source, job, partial, self.data.workers))
        stored = Stored(directory, self.sample_type)
        logger.info("%s: %d samples %s %s", source.words, len(stored), "kept in" if made else "of", directory)
        notes.append(self._summary(stored.manifest, found_source))
        return stored

    def _summary(self, manifest: dict[str, Any], found_source: FoundSource) -> str:
        """A note on the records of a set. Raises: ValueError where too many were skipped."""
        source = found_source.source
        skipped, most = Skipped(manifest["num_records"], Counter(manifest["skipped"])), self.data.max_skipped
        share = skipped.share(but=LEFT_OUT)
        summary = f"{source.words}: {skipped.describe()}" + f", {100 * share:.2g} % of them" * bool(share)
        if share > most:
            raise ValueError(
                f"{summary}, and data.max_skipped = {most:g} allows {100 * most:g} %. Raise the limits, mend the data, "
                f"or set data.max_skipped={math.ceil(100 * share) / 100:g} if so many are meant to be left out"
            )
        changed = "".join(f"; {how}: {count}" for how, count in sorted(manifest["changed"].items()))
        changed += _note_unread(manifest["unread"], manifest["num_records"] - skipped.count())
        return f"{'WARNING: ' * bool(share)}{summary}{changed}{found_source.describe_files()}"

    def _encoder(self) -> Any:
        encoder: Any = self.encoder
        if isinstance(self.data, DataConfig) and self.data.over_long == "cut":
            assert isinstance(encoder, SFTEncoder), "refused for other commands"
            return CuttingEncoder(encoder)
        return encoder


def _of_one_form(encoder: Any, found_source: FoundSource) -> Any:
    """The encoder with the form of the set's first record. Errors of that record are reported when it is encoded."""
    if isinstance(encoder, CuttingEncoder):
        return CuttingEncoder(_of_one_form(encoder.encoder, found_source))
    if not isinstance(encoder, SFTEncoder | PairEncoder | PromptEncoder) or encoder.template != "auto":
        return encoder
    first = first_record(encoder, found_source)
    return encoder if first is None else replace(encoder, form=first[0])


def first_record(encoder: Any, found_source: FoundSource) -> tuple[Form, Mapping[str, Any]] | None:
    """Form and record of the first usable row. None where the first rows on disk have none."""
    reader = Reader(found_source.source)
    for where, row in found_source.first_rows(3):
        with contextlib.suppress(LeftOut, ValueError):
            record = reader.record(row, where)
            if (form := form_of_record(encoder, record)) is not None:
                return form, record
    return None


def _note_unread(columns: Mapping[str, int], records: int) -> str:
    """A note on columns that are not read, each with its number of records if not all have it."""
    if not columns:
        return ""
    shown = [name if count == records else f"{name} (in {count})" for name, count in sorted(columns.items())]
    more = f" and {len(shown) - _SHOWN_COLUMNS} others" * (len(shown) > _SHOWN_COLUMNS)
    return f"; columns that are not read: {', '.join(shown[:_SHOWN_COLUMNS])}{more}"


def _content(found_source: FoundSource, cache: Path) -> list[Any]:
    """A source's content, for the key: digests of its files, or a hub revision."""
    if found_source.kind == "files":
        return ["files", *(digest_of_file(file, cache) for file in _files(found_source))]
    if found_source.kind == "saved":
        return ["saved", *((file.name, digest_of_file(file, cache)) for file in _files(found_source))]
    if found_source.kind == "generated":
        name = str(found_source.source.path)
        return ["generated", name, *([look_at_source(name).digest] if is_environment(name) else [])]
    return [
        "hub",
        str(found_source.source.path),
        found_source.source.subset,
        found_source.source.split,
        hub_revision(found_source.source),
    ]


def hub_revision(source: SourceConfig) -> str:
    """The hub's commit of a dataset. Raises: ValueError where the hub cannot be asked."""
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


def _tokenize(found_source: FoundSource, job: EncodingJob, directory: Path, workers: int | None) -> None:
    """Write the samples of a source. Raises: ValueError, also for a source without a usable record."""
    logger.info("tokenizing %s", job.source.words)
    before = _stamps(found_source)
    writer = ColumnWriter(directory, job.sample_type)
    try:
        encode_all(job, found_source.chunks(), writer, workers)
        if not writer.num_records:
            raise ValueError(f"no rows in {job.source.words}; give data")
        if not writer.num_samples:
            skipped = Skipped(writer.num_records, writer.skipped).describe()
            raise ValueError(f"{job.source.words}: no usable records: {skipped}; raise the limits or give other data")
        if _stamps(found_source) != before:
            raise ValueError(f"{job.source.words} was changed while it was read; start again when it is whole")
        writer.finish(source=job.source.words)
    finally:
        writer.close()


def _stamps(found_source: FoundSource) -> list[list[int]]:
    return [stamp(file) for file in _files(found_source)]


def _files(found_source: FoundSource) -> list[Path]:
    """Files of a source on disk, in the order of reading; of a saved dataset, by name."""
    if found_source.kind == "saved":
        return sorted(file for file in found_source.files[0].rglob("*") if file.is_file())
    return list(found_source.files)


def _note_shared(what: str, samples: Samples[Any], train: Samples[Any]) -> list[str]:
    """A note on prompts that are trained on too: held-out data may be a copy. Empty where there are none."""
    shared = positions_of_shared(samples, train)
    if not len(shared):
        return []
    first = f"the first as record {int(samples.records()[shared[0]]) + 1}"
    sample = samples[int(shared[0])]
    text = f": {textwrap.shorten(sample.text, 60)!r}" if isinstance(sample, PromptSample) else ""
    return [f"{len(shared)} of {len(samples)} {what} are in the training data too, {first}{text}"]


def _joined(
    parts: Sequence[tuple[Whole[Sample], Samples[Sample]]], weights: Sequence[float] | None = None
) -> Samples[Sample]:
    """Join the samples of several sets. `parts`: for each set, all of it and the samples that are read."""
    if len(parts) == 1:
        return parts[0][1]
    return Joined([samples for _, samples in parts], [stored.num_records for stored, _ in parts], weights)
