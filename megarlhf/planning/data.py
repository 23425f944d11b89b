"""What can be said of the data before a run: it is there, its first rows are what is read, and they are enough."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megarlhf.config import (
    DPOConfig,
    EvaluateConfig,
    GenerateConfig,
    PromptDataConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    SourceConfig,
    words_of,
)
from megarlhf.data.adapters import load_adapter
from megarlhf.data.fields import Fields, LeftOut, Reader
from megarlhf.data.formats import count_rows
from megarlhf.data.procedural import require_disjoint
from megarlhf.data.sources import Place, find, source_files
from megarlhf.planning.policies import AnyConfig

_FIRST_ROWS = 3
_COUNTED_BYTES = 256 << 20
"""Of a file whose lines are counted before a run; Parquet says how many rows it has."""


def fields_of(cfg: AnyConfig) -> Fields:
    """What a record of the training data must have."""
    if isinstance(cfg, EvaluateConfig):
        return _fields_of_tasks(cfg)
    if isinstance(cfg, RMConfig | DPOConfig):
        return ("prompt", "chosen", "rejected")
    if cfg.data.template == "chat":
        return ("messages",)
    return ("prompt", "response") if isinstance(cfg, SFTConfig) else ("prompt",)


def _fields_of_tasks(cfg: EvaluateConfig) -> Fields:
    chat, fields = cfg.data.template == "chat", list[str]()
    for task in cfg.tasks():
        if task == "pairs":
            fields += ["prompt", "chosen", "rejected"]
        elif task == "perplexity" and cfg.eval.perplexity_of == "text":
            fields += ["text"]
        else:
            fields += ["messages"] if chat else ["prompt", "response"][: 1 + (task == "perplexity")]
    return tuple(dict.fromkeys(fields))


def check_data(cfg: AnyConfig) -> list[str]:
    """Data must be there, unless its name may be one of the Hugging Face hub; of several splits one must be named; the
    first rows must have what is read of them. Returns what is taken for a name of the hub, in sentences."""
    notes = []
    sources: dict[str, tuple[tuple[SourceConfig, ...], Fields]] = {
        key: (given, fields_of(cfg)) for key, given in cfg.data.sources().items()
    }
    if isinstance(cfg, RLConfig) and cfg.ptx is not None:
        sources["ptx.data"] = (cfg.ptx.data, ("text",))
    counts: dict[str, int | None] = {}
    for key, (given, fields) in sources.items():
        rows: list[int | None] = []
        for source in given:
            try:
                place = find(source)
                _check_first_rows(place, fields)
                rows.append(_most_rows(place))
            except ValueError as error:
                raise ValueError(f"{key}: {error}{_hint(cfg)}; working directory: {Path.cwd()}") from None
            if place.kind == "hub":
                notes.append(_hub_note(key, source))
        counts[key] = None if None in rows else sum(number or 0 for number in rows)
    _require_enough(cfg, counts)
    return notes


def _hint(cfg: AnyConfig) -> str:
    """What `eval` may have been meant to do, where it was not said."""
    if isinstance(cfg, EvaluateConfig) and cfg.eval.tasks is None and cfg.tasks() == ("perplexity",):
        return (
            ". With an actor alone eval measures the perplexity of responses; to score what the actor itself says, "
            "name rewards, such as [{kind: rule, rule: exact_match}]"
        )
    return ""


def _check_first_rows(place: Place, fields: Fields) -> None:
    """Raises: ValueError for a source without rows, or whose first rows are not what is read."""
    source = place.source
    if source.adapter is not None:
        load_adapter(source.adapter)
    if place.kind not in ("files", "saved"):
        return
    rows = place.first_rows(_FIRST_ROWS)
    if not rows and (place.kind == "saved" or len(place.files) <= _FIRST_ROWS):
        raise ValueError(f"no rows in {source.words}; give data")
    reader = Reader(source, fields)
    for where, row in rows:
        try:
            reader.record(row, where)
        except LeftOut:
            continue


def _most_rows(place: Place) -> int | None:
    """How many records a source has at most; None where a look does not tell it."""
    if place.kind != "files":
        return None
    counts = [count_rows(file, _COUNTED_BYTES // len(place.files)) for file in place.files]
    return None if None in counts else sum(count or 0 for count in counts)


def _require_enough(cfg: AnyConfig, counts: Mapping[str, int | None]) -> None:
    """Raises: ValueError where a batch has more samples than there are records."""
    most = counts["data.train"]
    if isinstance(cfg, GenerateConfig | EvaluateConfig) or most is None:
        return
    key = "prompts_per_step" if isinstance(cfg, RLConfig) else "mini_batch_samples"
    size = getattr(cfg.train, key)
    if size > most:
        raise ValueError(
            f"train.{key} = {size}: a batch would hold some of the {most} records of data.train = "
            f"{words_of(cfg.data.train)} twice; set train.{key} to at most {most}, or give more data"
        )


def _hub_note(key: str, source: SourceConfig) -> str:
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ValueError(
                f"{key} = {source.path} does not exist (working directory: {Path.cwd()}), and {variable} = "
                f"{os.environ[variable]} forbids to look for it on the Hugging Face hub; correct the path"
            )
    return f"{key} = {source.path}: no such file here, so it is taken for a name on the Hugging Face hub"


def same_data(data: PromptDataConfig) -> bool:
    """Whether held-out and training data are the same, on purpose it seems.

    Raises: ValueError where they share some files only, which nobody means.
    """
    _require_apart("data.test", data.test, "data.train", data.train)
    if data.validation is None:
        return False
    return _require_apart("data.validation", data.validation, "data.train", data.train)


def _require_apart(
    key: str, held_out: tuple[SourceConfig, ...] | None, other: str, train: tuple[SourceConfig, ...]
) -> bool:
    """Whether both are the same. Raises: ValueError where they share something only."""
    if held_out is None:
        return False
    for ours in train:
        for theirs in held_out:
            require_disjoint(ours.path, theirs.path)
    read, held = source_files(train), source_files(held_out)
    if not (read and held):  # hub names and what is generated: compared as they are spelt
        return [source.words for source in train] == [source.words for source in held_out]
    if read == held:
        return True
    shared = {a for a in read for b in held if a.is_relative_to(b)} | {
        b for a in read for b in held if b.is_relative_to(a)
    }
    if shared:
        shown = ", ".join(sorted(map(str, shared))[:5])
        raise ValueError(
            f"{other} = {words_of(train)} and {key} = {words_of(held_out)} both read {shown}: held-out data would be "
            "trained on. Name other files, or a split of each ({path: ..., split: ...})"
        )
    return False
