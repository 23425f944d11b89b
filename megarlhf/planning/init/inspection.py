"""What `megarlhf init` sees of a model's directory and of data: enough for a configuration that passes a check."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from megarlhf.model_directory import end_tokens, require_hf_directory
from megarlhf.planning.data.formatting import has_marks
from megarlhf.provenance import read_provenance
from megarlhf.weights.checkpoint.dtype import has_weights, resolve_dtype
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint

Command = Literal["sft", "rm", "rl", "dpo"]
LOOKED_AT = 200
"""Records that are read and tokenized."""
_COUNTED_BYTES = 1 << 30
"""Of lines; Parquet and Arrow say how many rows they have."""
_COUNTED_ROWS = 20_000
"""Of other files: more are not counted."""
_NO_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True)
class ModelLook:
    """A model's directory."""

    path: Path
    arch: Architecture
    head: Head
    parameters: int
    stored: bool
    """Whether there are weights."""
    dtype: Literal["auto", "fp32", "bf16"]
    dtype_in_words: str
    tokens: int
    ends: tuple[int, ...]
    chat: bool
    """Whether the tokenizer has a chat template."""
    knows: frozenset[str] = frozenset()
    """What an earlier run has trained it on: `texts`, `conversations`."""


@dataclass(frozen=True, kw_only=True)
class DataLook:
    """A data set as a command reads it, by its first records."""

    command: Command
    source: SourceConfig
    read: str
    """How its rows are read, in words."""
    records: int
    """Looked at."""
    total: int | None
    """In all; None where a look does not tell it."""
    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    responses: tuple[int, ...]
    """Tokens of each response, of a pair the longer one; nothing where the data has none."""
    samples: tuple[int, ...]
    """Tokens of all sequences of each sample."""
    skipped: Mapping[str, int]
    has_answer: bool
    template: Literal["auto", "chat"] = "auto"
    """`chat`: texts are written with the chat template."""
    template_refuses: str = ""
    """Why they are not, where they were to be."""
    loss_on: LossOn = "last"
    several_answers: int = 0
    """Records with more than one that could be learnt."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        pairs = itertools.zip_longest(self.prompts, self.responses, fillvalue=0)
        return max(prompt + response for prompt, response in pairs)


def look_at_model(path: Path) -> ModelLook:
    """Raises: ValueError for a model of no known family, or without a tokenizer."""
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
        words = f"{resolved.name}, {resolved.why}"
    except ValueError:  # fp16, or several
        dtype, words = "bf16", "bf16, in place of what is stored (fp16, or several), which cannot be trained in"
    tokenizer = load_tokenizer(directory)
    return ModelLook(
        path=path,
        arch=arch,
        head=head,
        parameters=sum(torch.Size(shape).numel() for shape in logical_tensors(arch, head).values()),
        stored=stored,
        dtype=dtype,
        dtype_in_words=words,
        tokens=tokenizer.vocab_size,
        ends=end_tokens(directory, tokenizer.eos_id),
        chat=has_template(tokenizer),
        knows=frozenset(stated.writing or ()) if (stated := read_provenance(path)) is not None else frozenset(),
    )


def look_at_data(
    path: Path, split: str | None, command: Command | None, model: ModelLook, adapter: str | None = None
) -> DataLook:
    """Raises: ValueError for data that is not there, that no command reads, or that this command does not read."""
    source = SourceConfig(path=path, split=split, adapter=adapter)
    place = find(source)
    rows = _first_rows(place)
    if not rows:
        raise ValueError(f"no rows in {source.words}; give data")
    where, first = rows[0]
    if not isinstance(first, Mapping):
        raise ValueError(f"{where}: expected an object with columns, got {type(first).__name__} {str(first)[:60]}")
    first = with_lists(first, first)
    command = command or _command_for(first)
    source, read = _readable(source, first, command)
    reader = Reader(source, ())
    template, refused = _template(command, reader, rows, model), ""
    looked = _Looked(reader, rows, command, require_hf_directory(model.path), template)
    try:
        looked.encode()
    except ValueError as error:
        if adapter is None and command == "sft" and read == "conversations in 'conversations'":
            with contextlib.suppress(ValueError):  # parts of longer ones begin with an answer
                return look_at_data(path, split, command, model, "sharegpt")
        if template == "auto":
            raise
        template, refused = "auto", str(error)
        looked = _Looked(reader, rows, command, require_hf_directory(model.path), template)
        looked.encode()
    if not looked.samples:
        reasons = ", ".join(f"{count} {why}" for why, count in looked.skipped.most_common())
        raise ValueError(f"none of the first {len(rows)} records of {source.words} can be used: {reasons}; give others")
    prompts, responses, tokens = zip(*map(_lengths, looked.samples), strict=True)
    return DataLook(
        command=command,
        source=source,
        read=read,
        records=len(rows),
        total=place.count_rows(_COUNTED_BYTES, _COUNTED_ROWS),
        prompts=prompts,
        responses=() if command == "rl" else responses,
        samples=tokens,
        skipped=looked.skipped,
        has_answer="answer" in looked.fields,
        template=template,
        template_refuses=refused,
        loss_on=looked.loss_on,
        several_answers=looked.several,
    )


class _Looked:
    """The first records as samples."""

    def __init__(
        self, reader: Reader, rows: Sequence[tuple[str, Any]], command: Command, directory: Path, template: Template
    ) -> None:
        self._reader, self._rows, self._command = reader, rows, command
        self._limits: dict[str, Any] = {"tokenizer": directory, "max_prompt_tokens": _NO_LIMIT, "template": template}
        self.loss_on: LossOn = "last"
        self.several = 0
        self.samples: list[Any] = []
        self.skipped, self.fields = Counter[str](), set[str]()

    def encode(self) -> None:
        """Raises: ValueError for a record that is refused."""
        with contextlib.suppress(LeftOut, ValueError, EmptyText):
            row = self._reader.record(self._rows[0][1], "")
            if self._has_several(row) and isinstance(row.get("response"), list):
                self.loss_on = "all"  # of a response all is learnt
        encode = self._encoder().open()
        for number, (where, row) in enumerate(self._rows):
            try:
                record = self._reader.record(row, where)
                self.samples.append(sample_of(encode(number, record)))
            except LeftOut:
                self.skipped["left out by the adapter"] += 1
            except Unusable as reason:
                self.skipped[str(reason)] += 1
            except ValueError as error:
                raise ValueError(f"{str(error) if where in str(error) else f'{where}: {error}'}") from None
            else:
                self.fields |= {name for name, value in record.items() if value is not None}
                self.several += self._has_several(record)

    def _has_several(self, record: Mapping[str, Any]) -> bool:
        example = example_of(record, self._limits["template"]) if self._command == "sft" else None
        return isinstance(example, Conversation) and len(learnt_turns(example, "all")) > 1

    def _encoder(self) -> Any:
        if self._command == "rl":
            return PromptEncoder(**self._limits)
        if self._command == "sft":
            return SFTEncoder(max_response_tokens=_NO_LIMIT, loss_on=self.loss_on, **self._limits)
        return PairEncoder(max_response_tokens=_NO_LIMIT, **self._limits)


def _template(
    command: Command, reader: Reader, rows: Sequence[tuple[str, Any]], model: ModelLook
) -> Literal["auto", "chat"]:
    """`chat` for texts where the tokenizer has a template, unless an earlier run has trained the model on texts as they
    stand, or they are dialogues or have been written with a template already."""
    if not model.chat or model.knows == {"texts"} or reader.adapter == "anthropic_hh":
        return "auto"
    read = {"sft": example_of, "rl": prompt_of}.get(command, pair_of)
    for where, row in rows:
        with contextlib.suppress(LeftOut, ValueError, EmptyText):
            given = reader.record(row, where)
            record = {name: value for name, value in given.items() if name not in BESIDE_A_CONVERSATION}
            if isinstance(read(record, "auto"), Conversation | PairOfConversations | RawText):
                return "auto"
            written = has_marks(str(record["prompt"]), load_tokenizer(require_hf_directory(model.path)))
            return "auto" if written else "chat"
    return "auto"


def _first_rows(place: FoundSource) -> list[tuple[str, Any]]:
    rows = place.first_rows(LOOKED_AT)
    if not rows and place.kind in ("generated", "hub"):
        for chunk in place.chunks():
            rows += list(chunk.located())
            if len(rows) >= LOOKED_AT:
                break
    return rows[:LOOKED_AT]


_COLUMNS: Mapping[Command, tuple[str, ...]] = {
    "sft": ("prompt", "response"),
    "rm": ("prompt", "chosen", "rejected"),
    "dpo": ("prompt", "chosen", "rejected"),
    "rl": ("prompt",),
}
_LISTS = ("messages", "conversations")


def _has(row: Mapping[str, Any], *names: str) -> bool:
    """Whether each column is there, or one that says the same."""
    return all(row.get(name) is not None or (suggest_column(name, row) or ("",))[0] == "column" for name in names)


def _command_for(row: Mapping[str, Any]) -> Command:
    """Which command such data is for. Raises: ValueError where it is for none."""
    turns = next((row[name] for name in _LISTS if isinstance(row.get(name), list) and row[name]), None)
    if _has(row, "chosen", "rejected") or (suggest_column("chosen", row) or ("", ""))[1] in PAIR_ADAPTERS:
        return "rm"
    if turns is not None:
        last = turns[-1] if isinstance(turns[-1], Mapping) else {}
        spoken = str(last.get("role", last.get("from", "")))
        return "sft" if spoken in ("assistant", "gpt", "chatgpt", "model", "bot") else "rl"
    if isinstance(row.get("reward_model"), Mapping) or "ground_truth" in row:
        return "rl"  # as verl keeps them
    if "answer" not in row and (_has(row, "prompt", "response") or _is_alpaca(row)):
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


def _is_alpaca(row: Mapping[str, Any]) -> bool:
    is_named = (suggest_column("prompt", row) or ("", ""))[1] == "alpaca"
    return is_named and any(row.get(name) is not None for name in ("output", "response"))


def _readable(source: SourceConfig, row: Mapping[str, Any], command: Command) -> tuple[SourceConfig, str]:
    """The source with the adapter or the columns by which its rows are what the command reads, and that in words."""
    if source.adapter is not None:
        return source, f"rows of the adapter {source.adapter}"
    turns = next((name for name in _LISTS if row.get(name) is not None), None)
    if turns is not None and command in ("sft", "rl"):
        beside = _beside(row, command) if command == "rl" else {}
        return source.model_copy(update={"columns": beside}), f"conversations in {turns!r}"
    pair = [row.get(name) for name in ("chosen", "rejected")]
    if command in ("rm", "dpo") and all(isinstance(each, list | Mapping) for each in pair):
        return source, "pairs of conversations"
    if command == "sft" and _is_raw_text(row):
        return source, "raw texts"
    columns: dict[str, str] = {}
    for name in _COLUMNS[command]:
        found = None if row.get(name) is not None else suggest_column(name, row)
        if found is None and name == "response" and row.get(name) is None and isinstance(row.get("answer"), str):
            found = ("column", "answer")
        if found is not None and found[0] == "adapter":
            return source.model_copy(update={"adapter": found[1]}), f"rows of the adapter {found[1]}"
        if found is not None and found[1] not in columns.values():
            columns[name] = found[1]
    columns |= _beside(row, command)
    words = {"sft": "prompts with responses", "rl": "prompts"}.get(command, "preference pairs")
    if not columns:
        return source, words
    renamed = ", ".join(f"{theirs!r} is read as {ours!r}" for ours, theirs in columns.items())
    return source.model_copy(update={"columns": columns}), f"{words}: {renamed}"


def _beside(row: Mapping[str, Any], command: Command) -> dict[str, str]:
    """Columns that are read with the others where they are there: the answer of a prompt, a system message."""
    columns = {}
    if (
        command == "rl"
        and row.get("answer") is None
        and (found := suggest_column("answer", row))
        and found[0] == "column"
    ):
        answer = value_at(row, found[1])
        columns = {"answer": found[1]} if isinstance(answer, str | int | float | list) else {}
    if command != "rl" and isinstance(row.get("system_prompt"), str) and row.get("system") is None:
        columns["system"] = "system_prompt"
    return columns


def _is_raw_text(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("text"), str) and not _has(row, "prompt") and "instruction" not in row


def _lengths(sample: SFTSample | PairSample | PromptSample) -> tuple[int, int, int]:
    """Tokens of prompt, response and all sequences."""
    if isinstance(sample, PromptSample):
        return len(sample.tokens), 0, len(sample.tokens)
    if isinstance(sample, SFTSample):
        return sample.prompt_length, len(sample.tokens) - sample.prompt_length, len(sample.tokens)
    answers = (len(sample.chosen_tokens), len(sample.rejected_tokens))
    return len(sample.prompt_tokens), max(answers), 2 * len(sample.prompt_tokens) + sum(answers)


def quantile(values: Sequence[int], share: float) -> int:
    """The value that so many do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
