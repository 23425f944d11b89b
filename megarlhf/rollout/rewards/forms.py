"""How a reward function wants to be called: told from the names of its parameters, which are those of a framework.

The standard library only, as `batch.py`.
"""

from __future__ import annotations

import inspect
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
_OF_RECORDS = frozenset(
    {"answer", "answers", "label", "solution", "solutions", "reference", "references"}
    | {"target", "targets", "gold", "gt", "expected", "truth"}
)
"""Names that say a column of the record: a third parameter of such a name does not want all columns."""
_TRUTH_WORDS = ("answer", "truth", "label", "solution", "target", "expected")
"""In a name that says a column of the record."""
NOT_GIVEN = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL gives besides, of its trainer."""


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
    return _first(fields, _LABELS)


def truth_of(fields: Fields) -> Any:
    """The right answer, as verl's functions are given it. Raises: WrongValue where the record has none."""
    found = _first(fields, _TRUTHS)
    if found is None:
        names = ", ".join(map(repr, fields)) or "none"
        raise WrongValue(f"reads ground_truth, and the record has none of {', '.join(_TRUTHS)}; its columns: {names}")
    return found


def _first(fields: Fields, names: Iterable[str]) -> Any:
    for name in names:
        column, _, within = name.partition(".")
        value = fields.get(column)
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
_NAMES = frozenset(name for style in STYLES.values() for name in style.columns) | _OF_RECORDS
"""Names that have a meaning: a parameter that has one gets what it says, or the function is refused."""


class Form(NamedTuple):
    """How a function wants to be called."""

    style: str = "fields"
    """A key of `STYLES`; or `batch`, with a `RewardBatch`."""
    waits: bool = False
    """It is async."""
    places: tuple[str, ...] = tuple(OURS)
    """What is given by place."""
    names: tuple[str, ...] = ()
    """What is given by name."""
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
        """For response `n`; None: for all, where it is `batched`. Raises: what the function raises, and WrongValue."""
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
    """From its signature. A name that only one style has tells that; parameters beside those of the style are columns
    of the records. One parameter of another name gets a `RewardBatch`; three get prompt, response and fields.

    Raises: ValueError for parameters that are none of these or of several, or for a generator.
    """
    target = without_partials(function)
    if not inspect.isroutine(target) and not inspect.isclass(target):
        target = without_partials(type(target).__call__)
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise ValueError("it is a generator; return the values instead of yielding them")
    waits = inspect.iscoroutinefunction(target)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a builtin without a signature
        return Form(waits=waits)
    others = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    marked = [name for name, style in STYLES.items() if style.marks & {p.name for p in named}]
    if len(marked) > 1:
        raise _refusal(parameters, f"they are of {' and of '.join(STYLES[name].words for name in marked)}")
    if not marked or (marked == ["fields"] and not {p.name for p in named if _is_needed(p)} <= OURS.keys()):
        return _by_place(parameters)._replace(waits=waits)
    (name,) = marked
    return _by_name(name, named, parameters)._replace(waits=waits, others=others and name != "fields")


def _by_name(style: str, named: Sequence[inspect.Parameter], every: Sequence[inspect.Parameter]) -> Form:
    """Of a style that its names tell. Raises: ValueError."""
    given = STYLES[style].columns
    foreign = [p.name for p in named if _is_needed(p) and p.name not in given]
    if absent := [name for name in foreign if name in NOT_GIVEN]:
        raise _refusal(every, f"{absent[0]} is of TRL's trainer and not given here; give it a default")
    if wrong := [name for name in foreign if name in OURS]:
        raise _refusal(every, f"{wrong[0]} is of {STYLES['fields'].words}, the others of {STYLES[style].words}")
    places = tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY and (p.name in given or _is_needed(p)))
    names = tuple(p.name for p in named if (p.name in given or _is_needed(p)) and p.name not in places)
    if style == "fields" and names == tuple(OURS):
        return Form()
    rest = frozenset(p.name for p in named) - {*names, *places}
    # TRL gives a parameter with a default the column of its name; verl and OpenRLHF do not.
    kept, may = (frozenset(NOT_GIVEN), rest) if style == "trl" else (rest, frozenset())
    return Form(style, places=places, names=names, keeps=kept, may=may)


def _by_place(parameters: Sequence[inspect.Parameter]) -> Form:
    """Where names tell nothing: one parameter that has to be given, or three. Raises: ValueError."""
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in positional if _is_needed(p)]
    if only := [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and _is_needed(p)]:
        raise _refusal(parameters, f"{only[0]} can be given by name only, and the name says nothing")
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    given = [p.name for p in positional][:3]
    if len(needed) == 1:
        if needed[0] in _NAMES:
            raise _refusal(parameters, f"{needed[0]} alone is of none of the forms")
        return Form("batch", places=())
    if len(needed) > 3 or (len(positional) < 3 and not open_ended):
        raise _refusal(parameters, f"{len(needed)} have to be given")
    ours = list(OURS)
    known = [name for name in given if name in _NAMES or any(word in name.lower() for word in _TRUTH_WORDS)]
    if wrong := [name for name in known if name != ours[given.index(name)]]:
        raise _refusal(parameters, f"{wrong[0]} stands in the place of {ours[given.index(wrong[0])]}")
    return Form()


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _refusal(parameters: Sequence[inspect.Parameter], why: str) -> ValueError:
    known = "; ".join(style.words for style in STYLES.values())
    return ValueError(
        f"its parameters are ({', '.join(map(str, parameters))}): {why}. A function is called by the names of its "
        f"parameters, which may be: {known}; or one, a RewardBatch, for several responses"
    )


def without_partials(function: Any) -> Any:
    """What stands below functools.partial."""
    while isinstance(function, partial):
        function = function.func
    return function
