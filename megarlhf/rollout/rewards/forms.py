"""Calling form of a reward function, recognised by its parameters: each framework has names of its own.

Only the standard library is imported, as in `batch.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarlhf.own_code.failures import without_partials
from megarlhf.rollout.rewards.batch import Fields, MissingColumn, RewardBatch, WrongValue

Column = Callable[[RewardBatch], Sequence[Any]]
"""Function that reads one value for each response from a batch."""

_TRUTHS = ("ground_truth", "reward_model.ground_truth", "answer")
_LABELS = ("answer", "labels", "label", "ground_truth", "reward_model.ground_truth")
NOT_GIVEN = ("trainer_state", "log_extra", "log_metric", "environments")
"""Parameters from TRL's trainer that we do not give."""
_VERL_SERVER = ("reward_router_address", "reward_model_tokenizer")
"""Parameters about a served reward model that verl gives and we do not."""


@dataclass(frozen=True)
class Style:
    """Parameters of a framework's reward functions."""

    signature: str
    """Description for messages."""
    batched: bool
    """Whether a function is called once with lists, not for each response."""
    columns: Mapping[str, Column]
    """Column for each parameter."""
    unique_names: frozenset[str]
    """Parameter names that no other style has. Any of them identifies the style."""


def label_of(fields: Fields) -> Any:
    """The right answer as OpenRLHF passes it; None if the record has none."""
    return first_of(fields, _LABELS)


def truth_of(fields: Fields) -> Any:
    """The right answer as verl passes it. Raises: WrongValue if the record has none."""
    truth = first_of(fields, _TRUTHS)
    if truth is None:
        names = ", ".join(map(repr, fields)) or "none"
        raise WrongValue(f"reads ground_truth, and the record has none of {', '.join(_TRUTHS)}; its columns: {names}")
    return truth


def first_of(fields: Fields, names: Iterable[str]) -> Any:
    """Value of the first column that exists, of names such as `answer` or `reward_model.ground_truth`; else None."""
    for name in names:
        column, _, key = name.partition(".")
        value = fields.get(column)
        if key:
            value = _mapping(value).get(key)
        if value is not None:
            return value
    return None


def _of_fields(read: Callable[[Fields], Any]) -> Column:
    return lambda batch: [read(fields) for fields in batch.fields]


def _conversations(batch: RewardBatch) -> Sequence[Any]:
    return [None] * len(batch) if isinstance(batch.messages, MissingColumn) else batch.messages


def _prompts(batch: RewardBatch) -> Sequence[Any]:
    """Messages if the prompt was a conversation, else its text."""
    pairs = zip(_conversations(batch), batch.prompts, strict=True)
    return [text if messages is None else [dict(message) for message in messages] for messages, text in pairs]


def _completions(batch: RewardBatch) -> Sequence[Any]:
    pairs = zip(_conversations(batch), batch.responses, strict=True)
    return [text if messages is None else [{"role": "assistant", "content": text}] for messages, text in pairs]


def _turns(batch: RewardBatch) -> Sequence[Any]:
    """Texts of the model's turns. Without an environment a column of the records may have this name."""
    if batch.turns is not None:
        return batch.turns
    return [fields.get("turns", [text]) for fields, text in zip(batch.fields, batch.responses, strict=True)]


def _extra_info(batch: RewardBatch) -> Sequence[Any]:
    """The column of the records; of a conversation with an environment its messages and turns, too."""
    given = [fields.get("extra_info") or {} for fields in batch.fields]
    if batch.turns is None:
        return given
    columns = zip(given, _conversations(batch), batch.turns, strict=True)
    return [{**_mapping(info), "messages": messages, "turns": turns} for info, messages, turns in columns]


def _mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, or the text of one as Parquet files may hold it; empty for anything else."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, Mapping) else {}


def _queries(batch: RewardBatch) -> Sequence[str]:
    return [prompt + response for prompt, response in zip(batch.prompts, batch.responses, strict=True)]


OURS: Mapping[str, Column] = {
    "prompt": lambda batch: batch.prompts,
    "response": lambda batch: batch.responses,
    "fields": lambda batch: batch.fields,
}
_IF_NAMED: Mapping[str, Column] = {
    "messages": _conversations,
    "turns": _turns,
}
"""Columns that only a function gets that names them. With an environment turns are among all that `**kwargs` takes."""
_VERL: Mapping[str, Column] = {
    "data_source": _of_fields(lambda fields: fields.get("data_source")),
    "solution_str": lambda batch: batch.responses,
    "ground_truth": _of_fields(truth_of),
    "extra_info": _extra_info,
}
STYLES: Mapping[str, Style] = {
    "fields": Style(
        "(prompt, response, fields) for one response", False, {**OURS, **_IF_NAMED}, frozenset({"response", "fields"})
    ),
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
        {
            "prompts": _prompts,
            "completions": _completions,
            "completion_ids": lambda batch: batch.response_tokens,
            "turns": _turns,
        },
        frozenset({"completions", "completion_ids"}),
    ),
    "openrlhf": Style(
        "OpenRLHF's (queries, prompts, labels)",
        True,
        {
            "queries": _queries,
            "prompts": lambda batch: batch.prompts,
            "labels": _of_fields(label_of),
            "turns": _turns,
        },
        frozenset({"queries"}),
    ),
}


class Form(NamedTuple):
    """Way in which a function is called.

    Example: `def f(completions, answer, level=1, **kwargs)` is `Form("trl", positional=(), keywords=("completions",
    "answer"), takes_all_columns=True, optional={"level"}, kept_defaults=NOT_GIVEN)`.
    """

    style: str = "fields"
    """A key of `STYLES`; or `batch`, for one argument that is a `RewardBatch`."""
    is_async: bool = False
    positional: tuple[str, ...] = tuple(OURS)
    """Parameters that are passed by position."""
    keywords: tuple[str, ...] = ()
    """Parameters that are passed by name."""
    takes_all_columns: bool = False
    """Whether the function takes all further columns of the records (`**kwargs`)."""
    kept_defaults: frozenset[str] = frozenset()
    """Parameters that keep their default even if the records have a column of that name."""
    optional: frozenset[str] = frozenset()
    """Parameters that get the column of their name if the records have it."""

    @property
    def batched(self) -> bool:
        """Whether one call is for several responses."""
        return self.style == "batch" or STYLES[self.style].batched

    @property
    def needed_columns(self) -> list[str]:
        """Columns that the records must have."""
        return [] if self.style == "batch" else [n for n in self.keywords if n not in STYLES[self.style].columns]

    def call(self, function: Callable[..., Any], batch: RewardBatch, n: int | None = None) -> Any:
        """Call the function for response `n`, or for all (None) if it is `batched`.

        Raises: WrongValue for a missing column, and errors of the function.
        """
        if self.style == "batch":
            return function(batch)
        given = dict(STYLES[self.style].columns)
        names = list(self.keywords)
        only_if_named = {*_IF_NAMED, "ground_truth", "ground_truths"}
        if batch.turns is not None:
            only_if_named -= {"turns"}
        elif "turns" not in {*names, *self.positional}:
            given.pop("turns", None)  # a column of the records may have this name
        if self.takes_all_columns:
            names += [name for name in given if name not in {*names, *self.positional, *only_if_named}]
        if self.takes_all_columns or self.optional:
            taken = {*names, *self.positional, *given, *self.kept_defaults, "prompt", "completion"}
            available = dict.fromkeys(name for fields in batch.fields for name in fields)
            wanted = available if self.takes_all_columns else self.optional
            names += [name for name in available if name not in taken and name in wanted]

        def value(name: str) -> Any:
            column = given[name] if name in given else _of_fields(lambda fields: fields.get(name))
            return column(batch) if n is None else column(batch)[n]

        if n is not None:
            batch, n = batch.part([n]), 0
        return function(*map(value, self.positional), **{name: value(name) for name in names})


def form_of(function: Callable[..., Any]) -> Form:
    """Recognise the form of a function from its signature.

    A name that only one style has identifies the style. Other parameters are columns of the records. A single parameter
    that is named `batch`, or annotated as one, gets a `RewardBatch`.

    Raises: ValueError for parameters of no style or of several, for a generator, and for a class.
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
    is_async = inspect.iscoroutinefunction(target)
    takes_all_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [p for p in named if _is_needed(p)]
    styles = [name for name, style in STYLES.items() if style.unique_names & {p.name for p in named}]
    if len(styles) > 1:
        raise _refusal(parameters, f"they are of {' and of '.join(STYLES[name].signature for name in styles)}")
    if styles:
        form = _form_of_style(styles[0], named, parameters)._replace(is_async=is_async)
        if form.style == "fields" and form.keywords == tuple(OURS) and not (takes_all_columns or form.optional):
            return form if any(p.kind is p.KEYWORD_ONLY for p in named) else Form(is_async=is_async)
        return form._replace(takes_all_columns=takes_all_columns)
    if [p.kind is p.KEYWORD_ONLY or not _is_batch(p) for p in needed] == [False]:
        return Form("batch", is_async=is_async, positional=())
    raise _refusal(parameters, _why_unknown([p.name for p in needed]))


def _why_unknown(needed: Sequence[str]) -> str:
    if not needed:
        return (
            "no name says what it reads; name what it takes, such as (completions, **kwargs), and let a decorator keep "
            "the names of the function that it decorates (functools.wraps)"
        )
    if unknown := [name for name in needed if not any(name in style.columns for style in STYLES.values())]:
        have, are = "has" if len(needed) == 1 else "have", "is" if len(unknown) == 1 else "are"
        return f"{len(needed)} {have} to be given, of which {', '.join(unknown)} {are} not known"
    return f"{', '.join(needed)} alone does not say which of these it is"


def _is_batch(parameter: inspect.Parameter) -> bool:
    return parameter.name == "batch" or "RewardBatch" in str(parameter.annotation)


def _form_of_style(style: str, named: Sequence[inspect.Parameter], every: Sequence[inspect.Parameter]) -> Form:
    """Form of a function of a known style. Raises: ValueError for parameters that cannot be given."""
    given = STYLES[style].columns
    foreign = [p.name for p in named if _is_needed(p) and p.name not in given]
    if absent := [name for name in foreign if name in NOT_GIVEN]:
        raise _refusal(every, f"{absent[0]} comes from TRL's trainer and is not given here; give it a default")
    if served := [name for name in foreign if name in _VERL_SERVER]:
        raise _refusal(
            every,
            f"verl gives {' and '.join(served)}, of the reward model that it serves, which is not done here; serve the "
            "model yourself and give the function its address (functools.partial), or use a reward of kind http",
        )
    if wrong := [name for name in foreign if name in OURS]:
        raise _refusal(every, f"{wrong[0]} is of {STYLES['fields'].signature}, the others of {STYLES[style].signature}")
    if style == "fields" and foreign:
        raise _refusal(every, f"{foreign[0]} is none of these; the record's columns are in `fields`")
    positional = tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY and (p.name in given or _is_needed(p)))
    names = tuple(p.name for p in named if (p.name in given or _is_needed(p)) and p.name not in positional)
    rest = frozenset(p.name for p in named) - {*names, *positional}
    # TRL gives a parameter with a default the column of its name, and so do we; verl and OpenRLHF do not.
    kept, optional = (frozenset(NOT_GIVEN), rest) if style in ("trl", "fields") else (rest, frozenset())
    return Form(style, positional=positional, keywords=names, kept_defaults=kept, optional=optional)


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _refusal(parameters: Sequence[inspect.Parameter], why: str) -> ValueError:
    known = "; ".join(style.signature for style in STYLES.values())
    return ValueError(
        f"its parameters are ({', '.join(map(str, parameters))}): {why}. A function is called by the names of its "
        f"parameters, which may be: {known}; or (batch), a RewardBatch, for several responses"
    )
