"""What `megarlhf init` sees of a model's directory and of data: enough for a configuration that passes a check."""

from __future__ import annotations

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
from megarlhf.data.fields import LeftOut, Reader, meant
from megarlhf.data.sample_kinds import PairSample, PromptSample, SFTSample, Unusable
from megarlhf.data.samples import Form, PairEncoder, PromptEncoder, SFTEncoder, form_of_record
from megarlhf.data.sources import Place, find
from megarlhf.data.templates import has_template
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.model_directory import end_tokens, require_hf_directory
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
    texts: bool
    """No conversations: they are written as they stand."""

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
    )


def look_at_data(path: Path, split: str | None, command: Command | None, model: ModelLook) -> DataLook:
    """Raises: ValueError for data that is not there, that no command reads, or that this command does not read."""
    source = SourceConfig(path=path, split=split)
    place = find(source)
    rows = _first_rows(place)
    if not rows:
        raise ValueError(f"no rows in {source.words}; give data")
    where, first = rows[0]
    if not isinstance(first, Mapping):
        raise ValueError(f"{where}: expected an object with columns, got {type(first).__name__} {str(first)[:60]}")
    command = command or _command_for(first)
    source, read = _readable(source, first, command)
    encoder = _encoder(command, require_hf_directory(model.path))
    reader, encode = Reader(source, ()), encoder.open()
    samples, skipped, fields, forms = [], Counter[str](), set[str](), set[Form | None]()
    for number, (where, row) in enumerate(rows):
        try:
            record = reader.record(row, where)
            samples.append(encode(number, record))
            fields |= record.keys()
            forms.add(form_of_record(encoder, record))
        except LeftOut:
            skipped["left out by the adapter"] += 1
        except Unusable as reason:
            skipped[str(reason)] += 1
        except ValueError as error:
            raise ValueError(f"{str(error) if where in str(error) else f'{where}: {error}'}") from None
    if not samples:
        reasons = ", ".join(f"{count} {why}" for why, count in skipped.most_common())
        raise ValueError(f"none of the first {len(rows)} records of {source.words} can be used: {reasons}; give others")
    prompts, responses, tokens = zip(*map(_lengths, samples), strict=True)
    return DataLook(
        command=command,
        source=source,
        read=read,
        records=len(rows),
        total=place.count_rows(_COUNTED_BYTES, _COUNTED_ROWS),
        prompts=prompts,
        responses=() if command == "rl" else responses,
        samples=tokens,
        skipped=skipped,
        has_answer="answer" in fields,
        texts="conversations" not in forms,
    )


def _first_rows(place: Place) -> list[tuple[str, Any]]:
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
    return all(row.get(name) is not None or (meant(name, row) or ("",))[0] == "column" for name in names)


def _command_for(row: Mapping[str, Any]) -> Command:
    """Which command such data is for. Raises: ValueError where it is for none."""
    turns = next((row[name] for name in _LISTS if isinstance(row.get(name), list) and row[name]), None)
    if _has(row, "chosen", "rejected") or "preferred_output" in row:
        return "rm"
    if turns is not None:
        last = turns[-1] if isinstance(turns[-1], Mapping) else {}
        spoken = str(last.get("role", last.get("from", "")))
        return "sft" if spoken in ("assistant", "gpt", "chatgpt", "model", "bot") else "rl"
    if "answer" not in row and (_has(row, "prompt", "response") or {"instruction", "output"} <= row.keys()):
        return "sft"
    if _has(row, "prompt"):
        return "rl"
    raise ValueError(
        f"the rows have {', '.join(map(repr, row)) or 'no columns'}, of which no command is known to read any; rename "
        "columns (prompt, response; prompt, chosen, rejected; messages), or write an adapter (docs/data.md)"
    )


def _readable(source: SourceConfig, row: Mapping[str, Any], command: Command) -> tuple[SourceConfig, str]:
    """The source with the adapter or the columns by which its rows are what the command reads, and that in words."""
    turns = next((name for name in _LISTS if row.get(name) is not None), None)
    if turns is not None and command in ("sft", "rl"):
        return source, f"conversations in {turns!r}"
    pair = [row.get(name) for name in ("chosen", "rejected")]
    if command in ("rm", "dpo"):
        if all(isinstance(each, list) for each in pair):
            return source, "pairs of conversations"
        dialogues = all(isinstance(each, str) and "\n\nAssistant:" in each for each in pair)
        if row.get("prompt") is None and dialogues:
            return source.model_copy(
                update={"adapter": "anthropic_hh"}
            ), "pairs of dialogues, by the adapter anthropic_hh"
    columns: dict[str, str] = {}
    for name in _COLUMNS[command]:
        found = None if row.get(name) is not None else meant(name, row)
        if found is None and name == "response" and row.get(name) is None and isinstance(row.get("answer"), str):
            found = ("column", "answer")
        if found is not None and found[0] == "adapter":
            return source.model_copy(update={"adapter": found[1]}), f"rows of the adapter {found[1]}"
        if found is not None and found[1] not in columns.values():
            columns[name] = found[1]
    words = {"sft": "prompts with responses", "rl": "prompts"}.get(command, "preference pairs")
    if not columns:
        return source, words
    renamed = ", ".join(f"{theirs!r} is read as {ours!r}" for ours, theirs in columns.items())
    return source.model_copy(update={"columns": columns}), f"{words}: {renamed}"


def _encoder(command: Command, directory: Path) -> Any:
    limits: dict[str, Any] = {"tokenizer": directory, "max_prompt_tokens": _NO_LIMIT}
    if command == "rl":
        return PromptEncoder(**limits)
    return (SFTEncoder if command == "sft" else PairEncoder)(max_response_tokens=_NO_LIMIT, **limits)


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
