"""Checks of the data before a run: it exists, its first rows can be used, and there are enough records."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import (
    EvaluateConfig,
    GenerateConfig,
    PromptDataConfig,
    RLConfig,
    SFTConfig,
    SourceConfig,
    describe_sources,
)
from megarlhf.config.data import PHASES
from megarlhf.data.records.conversations import prompt_of
from megarlhf.data.sample_types import Encode, Skipped, Unusable
from megarlhf.data.samples.encoders import SFTEncoder, describe_reading, form_of_record
from megarlhf.data.samples.megatron_indexed import PARTS, read_index, split_range
from megarlhf.data.samples.retokenize import Retokenizer
from megarlhf.data.samples.texts import TextEncoder
from megarlhf.data.samples.truncation import CuttingEncoder
from megarlhf.data.sources.adapters import load_adapter
from megarlhf.data.sources.fields import LEFT_OUT, LeftOut, Reader
from megarlhf.data.sources.find import FoundSource, find, source_files
from megarlhf.data.sources.megatron_files import indexed_files
from megarlhf.data.sources.procedural import require_disjoint
from megarlhf.data.text.templates import Conversation, chat_template
from megarlhf.data.tokenize.cache import cache_directory, require_cache
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.planning.batch import require_prompts
from megarlhf.planning.data.encoders import RecordEncoder, indexed_options, sets_of
from megarlhf.planning.data.turns import turn_notes
from megarlhf.planning.machine.capabilities import AnyConfig

_FIRST_ROWS = 64
"""Rows of a set that are tokenized, of its first files together."""
_COUNTED_BYTES = 256 << 20
"""Size of the files whose lines are counted before a run."""


def check_data(command: str, cfg: AnyConfig) -> tuple[list[str], bool]:
    """Check all sets. Data must exist, unless its path may be a name on the Hugging Face hub. One of several splits
    must be named. The first rows must be usable.

    Returns: notes on the reading of each set; whether the records are texts, by the first rows. Raises: ValueError.
    """
    notes: list[str] = []
    forms: set[str | None] = set()
    opened: dict[int, Encode[Any]] = {}
    for key, sources, encoder in sets_of(cfg):
        fields, encode = ["text"], None
        if not isinstance(encoder, TextEncoder):
            fields, encode = [], opened.get(id(encoder)) or opened.setdefault(id(encoder), _opened(cfg, encoder))
        counts: list[int | None] = []
        for source in sources:
            try:
                if source.kind == "megatron":
                    assert isinstance(cfg, SFTConfig | RLConfig), "refused with the configuration"
                    counts.append(_check_indexed(cfg, key, source, notes))
                    continue
                found_source = find(source)
                record, unusable = _check_first_rows(found_source, fields, encode)
                notes += [f"{key} = {source.words}: {unusable}"] * bool(unusable)
                if not isinstance(encoder, TextEncoder):
                    forms.add(None if record is None else form_of_record(encoder, record))
                    notes += _reading(cfg, key, source, encoder, record)
                counts.append(_count_rows(command, cfg, found_source) if key == "data.train" else None)
            except ValueError as error:
                raise ValueError(f"{key}: {error}{_hint(cfg)}; working directory: {Path.cwd()}") from None
            if found_source.kind == "hub":
                notes.append(_hub_note(key, source))
        if key == "data.train":
            require_min_samples(command, cfg, counts)
    require_cache(cache_directory(cfg.data.cache, cfg.run.dir))
    return notes, forms <= {"texts", "raw texts"}


def _reading(
    cfg: AnyConfig, key: str, source: SourceConfig, encoder: RecordEncoder, record: Mapping[str, Any] | None
) -> list[str]:
    """A note on how a record is read. Empty without a record. Raises: ValueError."""
    if record is None or not (reading := describe_reading(encoder, record)):
        return []
    if isinstance(cfg, RLConfig) and reading.startswith("conversations"):
        _require_template_of_scorer(cfg, record)
    notes = turn_notes(cfg, encoder, record) if key == "data.train" else []
    return [f"{key} = {source.words}: {reading}", *notes]


def _opened(cfg: AnyConfig, encoder: RecordEncoder) -> Encode[Any]:
    """The encoding function of the run, which may cut texts that are too long."""
    if isinstance(encoder, SFTEncoder) and isinstance(cfg, SFTConfig) and cfg.data.over_long == "cut":
        return CuttingEncoder(encoder).by(encoder.load())
    return encoder.open()


def _require_template_of_scorer(cfg: RLConfig, record: Mapping[str, Any]) -> None:
    """Raises: ValueError where a reward model that is given conversations as text has no template, or one that leaves
    out a part of the first record."""
    if cfg.reward_model is not None and cfg.uses_reward_model and cfg.retokenizes:
        try:
            tokenizer = load_tokenizer(cfg.reward_model.model.tokenizer_place())
            chat_template(tokenizer)
            if isinstance(asked := prompt_of(record, cfg.data.template_mode), Conversation):
                write = Retokenizer(tokenizer, max_tokens=2**31, may_drop=cfg.data.template_may_drop)
                write("", asked.messages, "a", finished=True, fields=record)
        except ValueError as error:
            raise ValueError(f"reward_model (retokenize: true) is given conversations: {error}") from None


def _hint(cfg: AnyConfig) -> str:
    """Advice for an `eval` without named tasks: it may have been meant to score responses."""
    if isinstance(cfg, EvaluateConfig) and cfg.eval.tasks is None and cfg.tasks() == ("perplexity",):
        if cfg.eval.perplexity_of == "text":
            return ""
        return (
            ". With an actor alone eval measures the perplexity of responses; to score what the actor itself says, "
            "name rewards, such as [{kind: rule, rule: exact_match}]"
        )
    return ""


def _check_indexed(cfg: SFTConfig | RLConfig, key: str, source: SourceConfig, notes: list[str]) -> int:
    """Check indexed data and count its samples. Raises: ValueError for incomplete files, or tokens outside the model's
    vocabulary."""
    part = key.removeprefix("data.")
    samples = indexed_options(cfg).open(source, part if part in PARTS else "train")
    samples.at(0)
    samples.at(len(samples) - 1)
    _require_room(cfg, int(samples.lengths("tokens")[0]))
    eos = load_tokenizer(cfg.actor.model.tokenizer_place()).eos_id
    if (ends := samples.ends()) != {eos}:
        listed = ", ".join(map(str, sorted(ends)[:5]))
        notes.append(
            f"{key} = {source.path}: its documents end with token {listed}, and the tokenizer's end of sequence is "
            f"{eos}: the model learns other borders of texts than it generates (was the data written with "
            "--append-eod and this tokenizer?)"
        )
    return len(samples)


def _require_room(cfg: SFTConfig | RLConfig, tokens: int) -> None:
    """Raises: ValueError where a sample of indexed data does not fit the model or a micro-batch."""
    name = "data.sequence_length" if isinstance(cfg, SFTConfig) else "ptx.max_tokens"
    most = architecture_from_hf(cfg.actor.model.hf_directory()).longest_sequence
    budget = cfg.train.max_tokens_per_micro_batch
    for limit, condition in (
        (most, f"{cfg.actor.model.path} takes {most} (max_position_embeddings)"),
        (budget, f"train.max_tokens_per_micro_batch = {budget}"),
    ):
        if limit is not None and tokens > limit:
            raise ValueError(
                f"a sample of Megatron's indexed data has {tokens} tokens, and {condition}; lower {name} by "
                f"{tokens - limit} or more"
            )


def _check_first_rows(
    found_source: FoundSource, fields: Sequence[str], encode: Encode[Any] | None
) -> tuple[Mapping[str, Any] | None, str]:
    """The first usable record among the first rows, if any, and otherwise the reason. Raises: ValueError for a source
    without rows or without a usable one, or with a refused row."""
    source = found_source.source
    if source.adapter is not None:
        load_adapter(source.adapter)
    if found_source.kind not in ("files", "saved"):
        return None, ""
    rows = found_source.first_rows(max(_FIRST_ROWS // max(1, min(3, len(found_source.files))), 3))
    if not rows and (found_source.kind == "saved" or len(found_source.files) <= 3):
        raise ValueError(f"no rows in {source.words}; give data")
    reader, usable, skipped = Reader(source, fields), list[Mapping[str, Any]](), Skipped(len(rows))
    for index, (where, row) in enumerate(rows):
        try:
            record = reader.record(row, where)
            if encode is not None:
                encode(index, record)
            usable.append(record)
        except LeftOut:
            skipped.reasons[f"{LEFT_OUT} {source.adapter}"] += 1
        except Unusable as reason:
            skipped.reasons[str(reason)] += 1
        except ValueError as error:
            raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from None
    if usable or not rows:
        return next(iter(usable), None), ""
    if found_source.count_rows(0, len(rows) + 1) == len(rows):
        raise ValueError(
            f"no usable records in {source.words}: {skipped.describe()}; raise the limits or give other data"
        )
    return None, f"none of the first {len(rows)} records can be used ({skipped.describe()}); the others were not read"


def _hub_note(key: str, source: SourceConfig) -> str:
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ValueError(
                f"{key} = {source.path} does not exist (working directory: {Path.cwd()}), and {variable} = "
                f"{os.environ[variable]} forbids to look for it on the Hugging Face hub; correct the path"
            )
    return f"{key} = {source.path}: no such file here, so it is taken for a name on the Hugging Face hub"


def _batch(cfg: AnyConfig) -> tuple[str, int] | None:
    """Key and number of the samples that a batch takes from data.train. None for a command that reads its data once."""
    if isinstance(cfg, GenerateConfig | EvaluateConfig):
        return None
    key = "prompts_per_step" if isinstance(cfg, RLConfig) else "mini_batch_samples"
    return f"train.{key}", getattr(cfg.train, key)


def _count_rows(command: str, cfg: AnyConfig, found_source: FoundSource) -> int | None:
    """Count the records of a source. None where that takes too long, or there are enough for a batch anyway."""
    if (batch := _batch(cfg)) is None:
        return None
    needed = cfg.prompts_drawn if isinstance(cfg, RLConfig) else batch[1]
    share = 1 - (cfg.data.validation_share or 0)
    if (shares := cfg.data.phase_shares()) is not None:
        share *= shares[PHASES[command]]
    return found_source.count_rows(_COUNTED_BYTES, math.ceil((needed + 1) / share) if share else 1)


def require_min_samples(command: str, cfg: AnyConfig, counts: Sequence[int | None]) -> None:
    """Check that no batch has a sample twice, which a run refuses too. `counts`: records of each set, if known.

    Raises: ValueError where a batch has more samples than there are records, or more from a set, by its weight, than
    the set has.
    """
    if (batch := _batch(cfg)) is None:
        return
    (key, samples), data, shares = batch, cfg.data, cfg.data.phase_shares()
    if shares is not None:  # as `split.phase_share` cuts them
        first, end = (sum(shares[:n]) for n in (PHASES[command], PHASES[command] + 1))
        counts = [None if count is None else round(end * count) - round(first * count) for count in counts]
    weights = [source.weight for source in data.train if source.weight is not None]
    for source, weight, count in zip(data.train, weights, counts, strict=False):
        if count is not None and (drawn := math.ceil(weight / sum(weights) * samples)) > count:
            raise ValueError(
                f"{key} = {samples}: {source.words} gives {drawn} samples of a batch by its weight, {weight:g} of "
                f"{sum(weights):g}, and has {count} records: some would be in it twice; lower {key} or the weight, or "
                "give more data"
            )
    if None in counts:
        return
    total = sum(count or 0 for count in counts)
    if data.validation_share is not None:
        total = round(total * (1 - data.validation_share))
    if samples > total:
        raise ValueError(
            f"{key} = {samples}: a batch would hold some of the {total} records of data.train = "
            f"{describe_sources(data.train)} twice; set {key} to at most {total}, or give more data"
        )
    if isinstance(cfg, RLConfig):
        require_prompts(cfg, total)


def same_data(data: PromptDataConfig) -> list[str]:
    """Notes on sets that are the same, apparently on purpose.

    Raises: ValueError where two sets share only some files, which must be a mistake.
    """
    notes = []
    if _are_same("data.validation", data.validation, "data.train", data.train):
        notes.append("data.validation is data.train: what is called held-out figures are those of the training data")
    if _are_same("data.test", data.test, "data.train", data.train):
        notes.append("data.test is data.train: what is called test figures are those of the training data")
    if data.validation is not None and _are_same("data.test", data.test, "data.validation", data.validation):
        notes.append("data.test is data.validation: its figures are of data that choices were made on")
    return notes


def _are_same(key: str, held_out: tuple[SourceConfig, ...] | None, other: str, train: tuple[SourceConfig, ...]) -> bool:
    """Tell whether both are the same. Raises: ValueError where they are not, and share files."""
    if held_out is None:
        return False
    _require_other_documents(key, held_out, other, train)
    records = tuple(source for source in held_out if source.kind != "megatron")
    has_indexed, held_out = len(records) < len(held_out), records
    if not held_out:
        return False
    for ours in train:
        for theirs in held_out:
            require_disjoint(ours.path, theirs.path)
    read, held = source_files(train), source_files(held_out)
    if not (read and held):  # hub names and generated data are compared by their names
        return [source.words for source in train] == [source.words for source in held_out]
    if read == held and not has_indexed:
        return True
    pairs = [(a, b) for a in read for b in held if a.is_relative_to(b) or b.is_relative_to(a)]
    if shared := {a if a.is_relative_to(b) else b for a, b in pairs}:
        listed = ", ".join(sorted(map(str, shared))[:5])
        raise ValueError(
            f"{other} = {describe_sources(train)} and {key} = {describe_sources(held_out)} both read {listed}: "
            "held-out data would be trained on. Name other files, or a split of each ({path: ..., split: ...})"
        )
    return False


def _require_other_documents(
    key: str, held_out: Sequence[SourceConfig], other: str, train: Sequence[SourceConfig]
) -> None:
    """Raises: ValueError where both read the same documents of a Megatron file, whatever splits they name."""
    for ours in train:
        for theirs in held_out:
            if {ours.kind, theirs.kind} != {"megatron"} or _tokens(ours) != _tokens(theirs):
                continue
            num_documents = len(read_index(ours.path).lengths)
            first, second = _documents(ours, other, num_documents), _documents(theirs, key, num_documents)
            start, end = max(first.start, second.start), min(first.stop, second.stop)
            if start < end:
                raise ValueError(
                    f"{other} = {ours.words} reads documents {first.start + 1} to {first.stop} of {num_documents}, and "
                    f"{key} = {theirs.words} documents {second.start + 1} to {second.stop}: both would read "
                    f"{end - start} of them. Give both the same split, such as '969,30,1', of which each reads its own "
                    "part, or other files"
                )


def _tokens(source: SourceConfig) -> Path:
    return indexed_files(source.path)[0].resolve()


def _documents(source: SourceConfig, key: str, num_documents: int) -> range:
    """Documents that a set of this key reads."""
    return split_range(source.split, key.removeprefix("data."), num_documents)
