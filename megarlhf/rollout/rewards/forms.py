"""How a reward function wants to be called: told from the names of its parameters, which are those of a framework.

The standard library only, as `batch.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megarlhf.rollout.rewards.batch import RewardBatch, Untold, WrongValue

Column = Callable[[RewardBatch], Sequence[Any]]
"""A value for each response of a batch."""
Fields = Mapping[str, Any]

_TRUTHS = ("ground_truth", "reward_model.ground_truth", "answer")
_LABELS = ("answer", "labels", "label", "ground_truth", "reward_model.ground_truth")
NOT_GIVEN = ("trainer_state", "log_extra", "log_metric", "environments")
"""Parameters that TRL gives besides, of its trainer."""
_OF_VERLS_SERVER = ("reward_router_address", "reward_model_tokenizer")
"""Parameters that verl's reward loop gives besides, of the reward model that it serves."""


@dataclass(frozen=True)
class Style:
    """The parameters that the functions of a framework have."""

    words: str
    batched: bool
    """Called once with lists; else for each response."""
    columns: Mapping[str, Column]
    """What each parameter gets."""
    marks: frozenset[str]
    """Names that no other style has: one of them tells the style."""


def label_of(fields: Fields) -> Any:
    """The right answer, as OpenRLHF's servers and functions are given it; None where the record has none."""
    return first_of(fields, _LABELS)


def truth_of(fields: Fields) -> Any:
    """The right answer, as verl's functions are given it. Raises: WrongValue where the record has none."""
    found = first_of(fields, _TRUTHS)
    if found is None:
        names = ", ".join(map(repr, fields)) or "none"
        raise WrongValue(f"reads ground_truth, and the record has none of {', '.join(_TRUTHS)}; its columns: {names}")
    return found


def first_of(fields: Fields, names: Iterable[str]) -> Any:
    """The first column that is there, of names such as `answer` and `reward_model.ground_truth`; None without any."""
    for name in names:
        column, _, within = name.partition(".")
        value = fields.get(column)
        if within and isinstance(value, str):  # JSON text, as files of Parquet may keep it
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if within:
            value = value.get(within) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _of_fields(read: Callable[[Fields], Any]) -> Column:
    return lambda batch: [read(fields) for fields in batch.fields]


def _conversations(batch: RewardBatch) -> Sequence[Any]:
    return [None] * len(batch) if isinstance(batch.messages, Untold) else batch.messages


def _prompts(batch: RewardBatch) -> Sequence[Any]:
    """Messages where the prompt was a conversation, else its text."""
    asked = zip(_conversations(batch), batch.prompts, strict=True)
    return [text if messages is None else [dict(message) for message in messages] for messages, text in asked]


def _completions(batch: RewardBatch) -> Sequence[Any]:
    said = zip(_conversations(batch), batch.responses, strict=True)
    return [text if messages is None else [{"role": "assistant", "content": text}] for messages, text in said]


def _queries(batch: RewardBatch) -> Sequence[str]:
    return [prompt + response for prompt, response in zip(batch.prompts, batch.responses, strict=True)]


OURS: Mapping[str, Column] = {
    "prompt": lambda batch: batch.prompts,
    "response": lambda batch: batch.responses,
    "fields": lambda batch: batch.fields,
}
_VERL: Mapping[str, Column] = {
    "data_source": _of_fields(lambda fields: fields.get("data_source")),
    "solution_str": lambda batch: batch.responses,
    "ground_truth": _of_fields(truth_of),
    "extra_info": _of_fields(lambda fields: fields.get("extra_info") or {}),
}
STYLES: Mapping[str, Style] = {
    "fields": Style("(prompt, response, fields) for one response", False, OURS, frozenset({"response", "fields"})),
    "verl": Style(
        "verl's (data_source, solution_str, ground_truth, extra_info)", False, _VERL, frozenset({"solution_str"})
    ),
    "verl_batch": Style(
        "verl's (data_sources, solution_strs, ground_truths, extra_infos)",
        True,
        {f"{name}s": column for name, column in _VERL.items()},
        frozenset({"solution_strs"}),
    ),
    "trl": Style(
        "TRL's (prompts, completions, completion_ids, COLUMN, **columns)",
        True,
        {"prompts": _prompts, "completions": _completions, "completion_ids": lambda batch: batch.response_tokens},
        frozenset({"completions", "completion_ids"}),
    ),
    "openrlhf": Style(
        "OpenRLHF's (queries, prompts, labels)",
        True,
        {"queries": _queries, "prompts": lambda batch: batch.prompts, "labels": _of_fields(label_of)},
        frozenset({"queries"}),
    ),
}


class Form(NamedTuple):
    """How a function wants to be called."""

    style: str = "fields"
    """A key of `STYLES`; or `batch`, with a `RewardBatch`."""
    waits: bool = False
    """It is async."""
    places: tuple[str, ...] = tuple(OURS)
    """Parameters that are given by place."""
    names: tuple[str, ...] = ()
    """Parameters that are given by name."""
    others: bool = False
    """It takes whatever further columns the records have."""
    keeps: frozenset[str] = frozenset()
    """Parameters that keep their default, whatever columns there are."""
    may: frozenset[str] = frozenset()
    """Parameters that get the column of their name where the records have it."""

    @property
    def batched(self) -> bool:
        """One call is for several responses."""
        return self.style == "batch" or STYLES[self.style].batched

    @property
    def needed_columns(self) -> list[str]:
        """Columns of the records that it cannot do without."""
        return [] if self.style == "batch" else [n for n in self.names if n not in STYLES[self.style].columns]

    def call(self, function: Callable[..., Any], batch: RewardBatch, n: int | None = None) -> Any:
        """Call it for response `n`; None: for all, where it is `batched`. Raises: what it raises, and WrongValue."""
        if self.style == "batch":
            return function(batch)
        given = STYLES[self.style].columns
        names = list(self.names)
        if self.others:
            names += [name for name in given if name not in {*names, *self.places, "ground_truth", "ground_truths"}]
        if self.others or self.may:
            taken = {*names, *self.places, *given, *self.keeps, "prompt", "completion"}
            found = dict.fromkeys(name for fields in batch.fields for name in fields)
            names += [name for name in found if name not in taken and (self.others or name in self.may)]

        def value(name: str) -> Any:
            column = given[name] if name in given else _of_fields(lambda fields: fields.get(name))
            return column(batch) if n is None else column(batch)[n]

        if n is not None:
            batch, n = batch.part([n]), 0
        return function(*map(value, self.places), **{name: value(name) for name in names})


def form_of(function: Callable[..., Any]) -> Form:
    """Read the form from the signature. A name that only one style has tells that; parameters beside those of the
    style are columns of the records. `batch`, or one that is annotated so, gets a `RewardBatch`.

    Raises: ValueError for parameters that are none of these or of several, for a generator, or a class.
    """
    target = without_partials(function)
    if inspect.isclass(target):
        raise ValueError(
            f"it is the class {target.__name__}, of which an object is called; make one in your module "
            f"(reward = {target.__name__}()), and name that"
        )
    if not inspect.isroutine(target):
        target = without_partials(type(target).__call__)
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise ValueError("it is a generator; return the values instead of yielding them")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ValueError(
            "it has no signature, as some functions written in C; call it in a function of yours"
        ) from None
    waits = inspect.iscoroutinefunction(target)
    others = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [p for p in named if _is_needed(p)]
    marked = [name for name, style in STYLES.items() if style.marks & {p.name for p in named}]
    if len(marked) > 1:
        raise _refusal(parameters, f"they are of {' and of '.join(STYLES[name].words for name in marked)}")
    if marked:
        (name,) = marked
        form = _by_name(name, named, parameters)
        if name == "fields" and form.names == tuple(OURS) and not (others or form.may):
            by_place = all(p.kind is not p.KEYWORD_ONLY for p in named)
            return Form(waits=waits) if by_place else form._replace(waits=waits)
        return form._replace(waits=waits, others=others)
    if [p.kind is p.KEYWORD_ONLY or not _is_batch(p) for p in needed] == [False]:
        return Form("batch", waits=waits, places=())
    raise _refusal(parameters, _why_unknown([p.name for p in needed]))


def _why_unknown(needed: Sequence[str]) -> str:
    if not needed:
        return (
            "no name says what it reads; name what it takes, such as (completions, **kwargs), and let a decorator keep "
            "the names of what it decorates (functools.wraps)"
        )
    if unknown := [name for name in needed if not any(name in style.columns for style in STYLES.values())]:
        have, are = "has" if len(needed) == 1 else "have", "is" if len(unknown) == 1 else "are"
        return f"{len(needed)} {have} to be given, of which {', '.join(unknown)} {are} not known"
    return f"{', '.join(needed)} alone does not say which of these it is"


def _is_batch(parameter: inspect.Parameter) -> bool:
    return parameter.name == "batch" or "RewardBatch" in str(parameter.annotation)


def _by_name(style: str, named: Sequence[inspect.Parameter], every: Sequence[inspect.Parameter]) -> Form:
    """Form of a style that its names tell. Raises: ValueError."""
    given = STYLES[style].columns
    foreign = [p.name for p in named if _is_needed(p) and p.name not in given]
    if absent := [name for name in foreign if name in NOT_GIVEN]:
        raise _refusal(every, f"{absent[0]} is of TRL's trainer and not given here; give it a default")
    if served := [name for name in foreign if name in _OF_VERLS_SERVER]:
        raise _refusal(
            every,
            f"verl gives {' and '.join(served)}, of the reward model that it serves, which is not done here; serve the "
            "model yourself and give the function its address (functools.partial), or use a reward of kind http",
        )
    if wrong := [name for name in foreign if name in OURS]:
        raise _refusal(every, f"{wrong[0]} is of {STYLES['fields'].words}, the others of {STYLES[style].words}")
    if style == "fields" and foreign:
        raise _refusal(every, f"{foreign[0]} is none of these; the record's columns stand in `fields`")
    places = tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY and (p.name in given or _is_needed(p)))
    names = tuple(p.name for p in named if (p.name in given or _is_needed(p)) and p.name not in places)
    rest = frozenset(p.name for p in named) - {*names, *places}
    # TRL gives a parameter with a default the column of its name, and so do we; verl and OpenRLHF do not.
    kept, may = (frozenset(NOT_GIVEN), rest) if style in ("trl", "fields") else (rest, frozenset())
    return Form(style, places=places, names=names, keeps=kept, may=may)


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _refusal(parameters: Sequence[inspect.Parameter], why: str) -> ValueError:
    known = "; ".join(style.words for style in STYLES.values())
    return ValueError(
        f"its parameters are ({', '.join(map(str, parameters))}): {why}. A function is called by the names of its "
        f"parameters, which may be: {known}; or (batch), a RewardBatch, for several responses"
    )


def without_partials(function: Any) -> Any:
    """Take functools.partial away."""
    while isinstance(function, partial):
        function = function.func
    return function
