"""What can be said of the data before a run: it is there, its first rows are what is read, and they are enough."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import (
    EvaluateConfig,
    PromptDataConfig,
    RLConfig,
    SFTConfig,
    SourceConfig,
    describe_sources,
)
from megarlhf.data.records.conversations import prompt_of
from megarlhf.data.sample_types import Encode, Skipped, Unusable
from megarlhf.data.samples.encoders import SFTEncoder, form_of_record, reading_in_words
from megarlhf.data.samples.megatron_indexed import PARTS, read_index, split_range
from megarlhf.data.samples.retokenize import Retokenizer
from megarlhf.data.samples.texts import TextEncoder
from megarlhf.data.samples.truncation import CuttingEncoder
from megarlhf.data.sources.adapters import load_adapter
from megarlhf.data.sources.fields import LEFT_OUT, Fields, LeftOut, Reader
from megarlhf.data.sources.find import FoundSource, find, source_files
from megarlhf.data.sources.megatron_files import files_of
from megarlhf.data.sources.reasoning_gym import require_disjoint
from megarlhf.data.text.templates import Conversation, chat_template
from megarlhf.data.tokenize.cache import cache_directory, require_cache
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.planning.data.encoders import RecordEncoder, indexed_options, sets_of
from megarlhf.planning.data.enough import RecordsNeeded
from megarlhf.planning.machine.capabilities import AnyConfig

_FIRST_ROWS = 64
"""That are made samples of, of the first files together."""


def check_data(command: str, cfg: AnyConfig) -> tuple[list[str], bool]:
    """Data must be there, unless its name may be one of the Hugging Face hub; of several splits one must be named; the
    first rows must have what is read of them. Returns how they are read and what is taken for a name of the hub, in
    sentences, and whether all records are texts, as far as was seen. Raises: ValueError."""
    notes: list[str] = []
    forms: set[str | None] = set()
    opened: dict[int, Encode[Any]] = {}
    enough = RecordsNeeded.of(command, cfg)
    for key, given, encoder in sets_of(cfg):
        fields, encode = ["text"], None
        if not isinstance(encoder, TextEncoder):
            fields, encode = [], opened.get(id(encoder)) or opened.setdefault(id(encoder), _opened(cfg, encoder))
        counts: list[int | None] = []
        for source in given:
            try:
                if source.kind == "megatron":
                    assert isinstance(cfg, SFTConfig | RLConfig), "refused with the configuration"
                    counts.append(_check_indexed(cfg, key, source, notes))
                    continue
                place = find(source)
                record, unusable = _check_first_rows(place, fields, encode)
                notes += [f"{key} = {source.words}: {unusable}"] * bool(unusable)
                if not isinstance(encoder, TextEncoder):
                    forms.add(None if record is None else form_of_record(encoder, record))
                    notes += _reading(cfg, key, source, encoder, record)
                counts.append(enough.count(place) if enough is not None and key == "data.train" else None)
            except ValueError as error:
                raise ValueError(f"{key}: {error}{_hint(cfg)}; working directory: {Path.cwd()}") from None
            if place.kind == "hub":
                notes.append(_hub_note(key, source))
        if enough is not None and key == "data.train":
            enough.require(counts)
    require_cache(cache_directory(cfg.data.cache, cfg.run.dir))
    return notes, forms <= {"texts", "raw texts"}


def _reading(
    cfg: AnyConfig, key: str, source: SourceConfig, encoder: RecordEncoder, record: Mapping[str, Any] | None
) -> list[str]:
    """How a record is read, in a sentence; nothing without one. Raises: ValueError."""
    if record is None or not (words := reading_in_words(encoder, record)):
        return []
    if isinstance(cfg, RLConfig) and words.startswith("conversations"):
        _require_template_of_scorer(cfg, record)
    return [f"{key} = {source.words}: {words}"]


def _opened(cfg: AnyConfig, encoder: RecordEncoder) -> Encode[Any]:
    """As a run does it, which may cut what is too long."""
    if isinstance(encoder, SFTEncoder) and isinstance(cfg, SFTConfig) and cfg.data.over_long == "cut":
        return CuttingEncoder(encoder).by(encoder.load())
    return encoder.open()


def _require_template_of_scorer(cfg: RLConfig, record: Mapping[str, Any]) -> None:
    """Raises: ValueError where a reward model that is given conversations as text has no template for them, or one that
    leaves out a part of the first record's."""
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
    """What `eval` may have been meant to do, where it was not said."""
    if isinstance(cfg, EvaluateConfig) and cfg.eval.tasks is None and cfg.tasks() == ("perplexity",):
        if cfg.eval.perplexity_of == "text":
            return ""
        return (
            ". With an actor alone eval measures the perplexity of responses; to score what the actor itself says, "
            "name rewards, such as [{kind: rule, rule: exact_match}]"
        )
    return ""


def _check_indexed(cfg: SFTConfig | RLConfig, key: str, source: SourceConfig, notes: list[str]) -> int:
    """How many samples there are. Raises: ValueError for files that are not whole, or have other tokens than the
    model."""
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
    for limit, words in (
        (most, f"{cfg.actor.model.path} takes {most} (max_position_embeddings)"),
        (budget, f"train.max_tokens_per_micro_batch = {budget}"),
    ):
        if limit is not None and tokens > limit:
            raise ValueError(
                f"a sample of Megatron's indexed data has {tokens} tokens, and {words}; lower {name} by "
                f"{tokens - limit} or more"
            )


def _check_first_rows(
    place: FoundSource, fields: Fields, encode: Encode[Any] | None
) -> tuple[Mapping[str, Any] | None, str]:
    """One of the first records, where there is a look at them and one can be used; and where none can, in words, why.
    Raises: ValueError for a source without rows, without a usable one, or whose first rows are not what is read and
    made samples of."""
    source = place.source
    if source.adapter is not None:
        load_adapter(source.adapter)
    if place.kind not in ("files", "saved"):
        return None, ""
    rows = place.first_rows(max(_FIRST_ROWS // max(1, min(3, len(place.files))), 3))
    if not rows and (place.kind == "saved" or len(place.files) <= 3):
        raise ValueError(f"no rows in {source.words}; give data")
    reader, usable, skipped = Reader(source, fields), list[Mapping[str, Any]](), Skipped(len(rows))
    for number, (where, row) in enumerate(rows):
        try:
            record = reader.record(row, where)
            if encode is not None:
                encode(number, record)
            usable.append(record)
        except LeftOut:
            skipped.reasons[f"{LEFT_OUT} {source.adapter}"] += 1
        except Unusable as reason:
            skipped.reasons[str(reason)] += 1
        except ValueError as error:
            raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from None
    if usable or not rows:
        return next(iter(usable), None), ""
    if place.count_rows(0, len(rows) + 1) == len(rows):
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


def same_data(data: PromptDataConfig) -> list[str]:
    """Sets that are the same, on purpose it seems, in sentences.

    Raises: ValueError where two share some files only, which nobody means.
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
    """Whether both are the same. Raises: ValueError where they share something only."""
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
    if not (read and held):  # hub names and what is generated: compared as they are spelt
        return [source.words for source in train] == [source.words for source in held_out]
    if read == held and not has_indexed:
        return True
    shared = {a for a in read for b in held if a.is_relative_to(b)} | {
        b for a in read for b in held if b.is_relative_to(a)
    }
    if shared:
        shown = ", ".join(sorted(map(str, shared))[:5])
        raise ValueError(
            f"{other} = {describe_sources(train)} and {key} = {describe_sources(held_out)} both read {shown}: held-out "
            "data would be trained on. Name other files, or a split of each ({path: ..., split: ...})"
        )
    return False


def _require_other_documents(
    key: str, held_out: Sequence[SourceConfig], other: str, train: Sequence[SourceConfig]
) -> None:
    """Raises: ValueError where both read some documents of one file of Megatron's, whatever splits they name."""
    for ours in train:
        for theirs in held_out:
            if {ours.kind, theirs.kind} != {"megatron"} or _tokens(ours) != _tokens(theirs):
                continue
            number = len(read_index(ours.path).lengths)
            first, second = _documents(ours, other, number), _documents(theirs, key, number)
            start, end = max(first.start, second.start), min(first.stop, second.stop)
            if start < end:
                raise ValueError(
                    f"{other} = {ours.words} reads documents {first.start + 1} to {first.stop} of {number}, and "
                    f"{key} = {theirs.words} documents {second.start + 1} to {second.stop}: both would read "
                    f"{end - start} of them. Give both the same split, such as '969,30,1', of which each reads its own "
                    "part, or other files"
                )


def _tokens(source: SourceConfig) -> Path:
    return files_of(source.path)[0].resolve()


def _documents(source: SourceConfig, key: str, number: int) -> range:
    """Of `number`, those that a set of this key reads."""
    return split_range(source.split, key.removeprefix("data."), number)
