"""Inspection of a model's directory and of data by `megarlhf init`, for a configuration that passes a dry run."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf, read_config
from megarlhf.architectures.placements import Head, logical_tensors
from megarlhf.config import ModelConfig, SourceConfig
from megarlhf.data.json_text import with_lists
from megarlhf.data.records.conversations import (
    BESIDE_A_CONVERSATION,
    EmptyText,
    PairOfConversations,
    RawText,
    example_of,
    pair_of,
    prompt_of,
)
from megarlhf.data.sample_types import PairSample, PromptSample, SFTSample, Unusable, sample_of
from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.sources.fields import PAIR_ADAPTERS, LeftOut, Reader, hint, several_answers, suggest_column, value_at
from megarlhf.data.sources.find import FoundSource, find
from megarlhf.data.text.assistant_mask import LossOn, learnt_turns
from megarlhf.data.text.templates import Conversation, Template, has_template
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.model_directory import end_tokens, from_hub, require_hf_directory
from megarlhf.planning.data.formatting import has_special_tokens
from megarlhf.provenance import read_provenance
from megarlhf.weights.checkpoint.dtype import has_weights, resolve_dtype
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint

Command = Literal["sft", "rm", "rl", "dpo"]
LOOKED_AT = 200
"""Records of the data that are read and tokenized."""
_COUNTED_BYTES = 1 << 30
"""Size up to which lines are counted. Parquet and Arrow files state their number of rows."""
_COUNTED_ROWS = 20_000
"""Rows up to which other files are counted."""
_NO_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True)
class ModelLook:
    """A model's directory as a run would use it."""

    path: Path
    arch: Architecture
    head: Head
    parameters: int
    stored: bool
    """True if there are weights."""
    dtype: Literal["auto", "fp32", "bf16"]
    dtype_in_words: str
    tokens: int
    ends: tuple[int, ...]
    chat: bool
    """True if the tokenizer has a chat template."""
    families: tuple[str, ...] = ()
    """The user's modules with families."""
    knows: frozenset[str] = frozenset()
    """Forms that an earlier run has trained it on: `texts`, `conversations`."""


@dataclass(frozen=True, kw_only=True)
class DataLook:
    """A data set as a command reads it, by its first records."""

    command: Command
    source: SourceConfig
    read: str
    """Description of how rows are read."""
    records: int
    """Number of inspected records."""
    total: int | None
    """Number of all records, if known."""
    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    responses: tuple[int, ...]
    """Tokens of each response, or of the longer one of a pair. Empty for data without responses."""
    skipped: Mapping[str, int]
    has_answer: bool
    template: Literal["auto", "chat"] = "auto"
    """`chat`: texts are written with the chat template."""
    template_refuses: str = ""
    """The template's error, if it was tried and refused the texts."""
    loss_on: LossOn = "last"
    several_answers: int = 0
    """Number of records with more than one answer to learn."""


def look_at_model(path: Path, families: tuple[str, ...] = ()) -> ModelLook:
    """Inspect a model. Raises: ValueError for an unknown family, or a model without a tokenizer."""
    path = from_hub(path)
    directory = require_hf_directory(path)
    arch = architecture_from_hf(directory)
    model = ModelConfig(path=path)
    stored = has_weights(model)
    if stored:
        head = open_checkpoint(path).head
    else:
        classes = read_config(directory).get("architectures") or [""]
        head = "scalar" if classes[0].endswith("ForSequenceClassification") else "lm"
    dtype: Literal["auto", "bf16"] = "auto"
    try:
        resolved = resolve_dtype("model", model, head)
        description = f"{resolved.name}, {resolved.why}"
    except ValueError:  # fp16, or several
        dtype, description = "bf16", "bf16, in place of what is stored (fp16, or several), which cannot be trained in"
    tokenizer = load_tokenizer(directory)
    return ModelLook(
        path=path,
        arch=arch,
        head=head,
        parameters=sum(torch.Size(shape).numel() for shape in logical_tensors(arch, head).values()),
        stored=stored,
        dtype=dtype,
        dtype_in_words=description,
        tokens=tokenizer.vocab_size,
        ends=end_tokens(directory, tokenizer.eos_id),
        families=families,
        chat=has_template(tokenizer),
        knows=frozenset(stated.writing or ()) if (stated := read_provenance(path)) is not None else frozenset(),
    )


def look_at_data(
    path: Path, split: str | None, command: Command | None, model: ModelLook, adapter: str | None = None
) -> DataLook:
    """Inspect data. Raises: ValueError for missing data, data for no command, or data that this command refuses."""
    source = SourceConfig(path=path, split=split, adapter=adapter)
    found_source = find(source)
    rows = _first_rows(found_source)
    if not rows:
        raise ValueError(f"no rows in {source.words}; give data")
    where, first = rows[0]
    if not isinstance(first, Mapping):
        raise ValueError(f"{where}: expected an object with columns, got {type(first).__name__} {str(first)[:60]}")
    first = with_lists(first, first)
    command = command or _command_for(first)
    source, read = _readable(source, first, command)
    reader = Reader(source)
    template, refused = _template(command, reader, rows, model), ""
    directory = require_hf_directory(model.path)
    try:
        encoded = _encode_rows(reader, rows, command, directory, template)
    except ValueError as error:
        if adapter is None and command == "sft" and read == "conversations in 'conversations'":
            with contextlib.suppress(ValueError):  # parts of longer conversations begin with an answer
                return look_at_data(path, split, command, model, "sharegpt")
        if template == "auto":
            raise
        template, refused = "auto", str(error)
        encoded = _encode_rows(reader, rows, command, directory, template)
    if not encoded.lengths:
        reasons = ", ".join(f"{count} {reason}" for reason, count in encoded.skipped.most_common())
        raise ValueError(f"none of the first {len(rows)} records of {source.words} can be used: {reasons}; give others")
    prompts, responses = zip(*encoded.lengths, strict=True)
    return DataLook(
        command=command,
        source=source,
        read=read,
        records=len(rows),
        total=found_source.count_rows(_COUNTED_BYTES, _COUNTED_ROWS),
        prompts=prompts,
        responses=() if command == "rl" else responses,
        skipped=encoded.skipped,
        has_answer="answer" in encoded.columns,
        template=template,
        template_refuses=refused,
        loss_on=encoded.loss_on,
        several_answers=encoded.several_answers,
    )


@dataclass
class _EncodedRows:
    """The first rows as samples."""

    loss_on: LossOn = "last"
    lengths: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of prompt and (longer) response of each sample."""
    skipped: Counter[str] = field(default_factory=Counter)
    columns: set[str] = field(default_factory=set)
    several_answers: int = 0


def _encode_rows(
    reader: Reader, rows: Sequence[tuple[str, Any]], command: Command, directory: Path, template: Template
) -> _EncodedRows:
    """Raises: ValueError for a refused record."""

    def has_several(record: Mapping[str, Any]) -> bool:
        example = example_of(record, template) if command == "sft" else None
        return isinstance(example, Conversation) and len(learnt_turns(example, "all")) > 1

    encoded = _EncodedRows()
    limits: dict[str, Any] = {"max_prompt_tokens": _NO_LIMIT, "max_response_tokens": _NO_LIMIT}
    with contextlib.suppress(LeftOut, ValueError, EmptyText):
        record = reader.record(rows[0][1], "")
        if has_several(record) and isinstance(record.get("response"), list):
            encoded.loss_on = "all"  # every answer of a response is learnt
    encoder: SFTEncoder | PromptEncoder | PairEncoder
    if command == "rl":
        encoder = PromptEncoder(tokenizer=directory, template=template, max_prompt_tokens=_NO_LIMIT)
    elif command == "sft":
        encoder = SFTEncoder(tokenizer=directory, template=template, loss_on=encoded.loss_on, **limits)
    else:
        encoder = PairEncoder(tokenizer=directory, template=template, **limits)
    encode = encoder.open()
    for index, (where, row) in enumerate(rows):
        try:
            record = reader.record(row, where)
            encoded.lengths.append(_lengths(sample_of(encode(index, record))))
        except LeftOut:
            encoded.skipped["left out by the adapter"] += 1
        except Unusable as reason:
            encoded.skipped[str(reason)] += 1
        except ValueError as error:
            raise ValueError(f"{str(error) if where in str(error) else f'{where}: {error}'}") from None
        else:
            encoded.columns |= {name for name, value in record.items() if value is not None}
            encoded.several_answers += has_several(record)
    return encoded


def _template(
    command: Command, reader: Reader, rows: Sequence[tuple[str, Any]], model: ModelLook
) -> Literal["auto", "chat"]:
    """`chat` for texts if the tokenizer has a template. `auto` if an earlier run has trained the model on plain texts,
    or the texts are dialogues or were written with a template already."""
    if not model.chat or model.knows == {"texts"} or reader.adapter == "anthropic_hh":
        return "auto"
    read = {"sft": example_of, "rl": prompt_of}.get(command, pair_of)
    for where, row in rows:
        with contextlib.suppress(LeftOut, ValueError, EmptyText):
            given = reader.record(row, where)
            record = {name: value for name, value in given.items() if name not in BESIDE_A_CONVERSATION}
            if isinstance(read(record, "auto"), Conversation | PairOfConversations | RawText):
                return "auto"
            is_written = has_special_tokens(str(record["prompt"]), load_tokenizer(require_hf_directory(model.path)))
            return "auto" if is_written else "chat"
    return "auto"


def _first_rows(found_source: FoundSource) -> list[tuple[str, Any]]:
    rows = found_source.first_rows(LOOKED_AT)
    if not rows and found_source.kind in ("generated", "hub"):
        located = (row for chunk in found_source.chunks() for row in chunk.located())
        rows = list(itertools.islice(located, LOOKED_AT))
    return rows[:LOOKED_AT]


_COLUMNS: Mapping[Command, tuple[str, ...]] = {
    "sft": ("prompt", "response"),
    "rm": ("prompt", "chosen", "rejected"),
    "dpo": ("prompt", "chosen", "rejected"),
    "rl": ("prompt",),
}
_LISTS = ("messages", "conversations")
_ALPACA_OUTPUTS = ("output", "response")


def _has(row: Mapping[str, Any], *names: str) -> bool:
    """Tell whether the row has each column, or one with the same meaning."""
    return all(row.get(name) is not None or (suggest_column(name, row) or ("",))[0] == "column" for name in names)


def _command_for(row: Mapping[str, Any]) -> Command:
    """The command for such data. Raises: ValueError where there is none."""
    turns = next((row[name] for name in _LISTS if isinstance(row.get(name), list) and row[name]), None)
    if _has(row, "chosen", "rejected") or _adapter_for("chosen", row) in PAIR_ADAPTERS:
        return "rm"
    if turns is not None:
        last = turns[-1] if isinstance(turns[-1], Mapping) else {}
        spoken = str(last.get("role", last.get("from", "")))
        return "sft" if spoken in ("assistant", "gpt", "chatgpt", "model", "bot") else "rl"
    if isinstance(row.get("reward_model"), Mapping) or "ground_truth" in row:
        return "rl"  # as verl keeps them
    is_alpaca = _adapter_for("prompt", row) == "alpaca" and any(row.get(name) is not None for name in _ALPACA_OUTPUTS)
    if "answer" not in row and (_has(row, "prompt", "response") or is_alpaca):
        return "sft"
    if _has(row, "prompt") and not {"completions", "labels"} <= row.keys() and not several_answers(row):
        return "rl"
    if _is_raw_text(row):
        return "sft"
    raise ValueError(
        f"the rows have {', '.join(map(repr, row)) or 'no columns'}, of which no command is known to read any; rename "
        "columns (prompt, response; prompt, chosen, rejected; messages), or write an adapter (docs/data.md)"
        f"{hint('response', row)}"
    )


def _adapter_for(missing: str, row: Mapping[str, Any]) -> str | None:
    """The adapter that is suggested for a row without a field, if any."""
    kind, name = suggest_column(missing, row) or ("", None)
    return name if kind == "adapter" else None


def _readable(source: SourceConfig, row: Mapping[str, Any], command: Command) -> tuple[SourceConfig, str]:
    """The source with the adapter or the columns that the command needs, and a description of them."""
    if source.adapter is not None:
        return source, f"rows of the adapter {source.adapter}"
    turns = next((name for name in _LISTS if row.get(name) is not None), None)
    if turns is not None and command in ("sft", "rl"):
        beside = _beside(row, command) if command == "rl" else {}
        return source.model_copy(update={"columns": beside}), f"conversations in {turns!r}"
    pair = [row.get(name) for name in ("chosen", "rejected")]
    if command in ("rm", "dpo") and all(isinstance(answer, list | Mapping) for answer in pair):
        return source, "pairs of conversations"
    if command == "sft" and _is_raw_text(row):
        return source, "raw texts"
    columns: dict[str, str] = {}
    for name in _COLUMNS[command]:
        suggestion = None if row.get(name) is not None else suggest_column(name, row)
        if suggestion is None and name == "response" and row.get(name) is None and isinstance(row.get("answer"), str):
            suggestion = ("column", "answer")
        if suggestion is not None and suggestion[0] == "adapter":
            return source.model_copy(update={"adapter": suggestion[1]}), f"rows of the adapter {suggestion[1]}"
        if suggestion is not None and suggestion[1] not in columns.values():
            columns[name] = suggestion[1]
    columns |= _beside(row, command)
    description = {"sft": "prompts with responses", "rl": "prompts"}.get(command, "preference pairs")
    if not columns:
        return source, description
    renamed = ", ".join(f"{theirs!r} is read as {ours!r}" for ours, theirs in columns.items())
    return source.model_copy(update={"columns": columns}), f"{description}: {renamed}"


def _beside(row: Mapping[str, Any], command: Command) -> dict[str, str]:
    """Optional columns: the answer of a prompt, a system message."""
    columns = {}
    if (
        command == "rl"
        and row.get("answer") is None
        and (suggestion := suggest_column("answer", row))
        and suggestion[0] == "column"
    ):
        answer = value_at(row, suggestion[1])
        columns = {"answer": suggestion[1]} if isinstance(answer, str | int | float | list) else {}
    if command != "rl" and isinstance(row.get("system_prompt"), str) and row.get("system") is None:
        columns["system"] = "system_prompt"
    return columns


def _is_raw_text(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("text"), str) and not _has(row, "prompt") and "instruction" not in row


def _lengths(sample: SFTSample | PairSample | PromptSample) -> tuple[int, int]:
    """Tokens of the prompt and of the (longer) response."""
    if isinstance(sample, PromptSample):
        return len(sample.tokens), 0
    if isinstance(sample, SFTSample):
        return sample.prompt_length, len(sample.tokens) - sample.prompt_length
    return len(sample.prompt_tokens), max(len(sample.chosen_tokens), len(sample.rejected_tokens))


def quantile(values: Sequence[int], share: float) -> int:
    """The value that a share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
