"""Right answers of a record as texts, for every built-in rule that compares with the field `answer`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megarlhf.own_code.failures import short
from megarlhf.rollout.rewards.batch import Fields

ANSWER = "answer"
_ANSWER_KEYS = ("ground_truth", "target", "answer", "answers", "text", "value")
"""Keys for the answer in a mapping, as in verl, SQuAD, TriviaQA and others. The mapping must have exactly one."""
_ALIASES = "aliases"
"""Key of TriviaQA's further right answers in such a mapping."""
_SIMILAR_COLUMNS = ("ground_truth", "answers", "solution", "label", "target", "reward_model")
"""Columns that may hold the answer if there is no `answer`."""
_SOLUTION_END = re.compile(r"####[ \t]*([^\s#][^\n#]*?)\s*\Z")
"""End of a solution in GSM8K."""


def answers_of(fields: Fields) -> list[str]:
    """All right answers, without surrounding white space.

    A list gives each of its entries, and so does a list of texts as JSON text: `["7", "seven"]`, but not `[7]`, which
    is an answer. A mapping gives the value of its answer key. A whole number gives 42 and 42.0, because pandas turns
    whole numbers into floats in a column with gaps.

    Raises: ValueError if there is no answer.
    """
    if ANSWER not in fields:
        names = ", ".join(map(repr, fields)) or "none"
        near = next((name for name in _SIMILAR_COLUMNS if name in fields), None)
        hint = "add it to the prompts"
        if near is not None:
            column = fields[near]
            path = f"{near}.ground_truth" if isinstance(column, Mapping) and "ground_truth" in column else near
            hint = f"if {path!r} is meant, name it under data: columns: {{answer: {path}}}"
        raise ValueError(f"it needs the field 'answer', found {names}; {hint}")
    answers = list(dict.fromkeys(texts_of_answer(fields[ANSWER])))
    if not answers:
        raise ValueError(
            f"the record's answer is {short(fields[ANSWER])}, in which there is no text and no number; clean the data, "
            "or leave such records out"
        )
    return answers


def texts_of_answer(value: Any) -> Iterator[str]:
    """Answers in a value, as texts. Raises: ValueError for a mapping with no answer key, or with several."""
    if value is None:
        return
    if isinstance(value, Mapping):
        yield from texts_of_answer(value[_answer_key(value)])
        yield from texts_of_answer(value.get(_ALIASES))
    elif isinstance(value, bool):
        yield from (str(value), str(value).lower())
    elif isinstance(value, float):
        if math.isfinite(value):
            yield from ([f"{value:.0f}"] if value == int(value) else [])
            yield repr(value)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from texts_of_answer(item)
    elif callable(getattr(value, "tolist", None)):  # numpy
        yield from texts_of_answer(value.tolist())
    elif texts := listed_in(value):
        for text in texts:
            yield from texts_of_answer(text)
    elif text := str(value).strip():
        yield text


def listed_in(value: Any) -> list[str]:
    """Entries of a list of texts in JSON text. Numbers in brackets are a mathematical answer, no list."""
    if not (isinstance(value, str) and value.strip().startswith("[")):
        return []
    try:
        listed = json.loads(value)
    except (ValueError, RecursionError):  # thousands of brackets raise RecursionError
        return []
    return listed if isinstance(listed, list) and all(isinstance(item, str) for item in listed) else []


def end_of_solution(answer: str) -> str | None:
    """Text after #### at the end of a solution, as in GSM8K; None: the text is no such solution."""
    match = _SOLUTION_END.search(answer)
    return match and match[1]


def _answer_key(answer: Mapping[str, Any]) -> str:
    keys = [key for key in _ANSWER_KEYS if answer.get(key) is not None]
    if len(keys) == 1:
        return keys[0]
    problem = (
        f"of which {' and '.join(map(repr, keys))} may be it" if keys else f"of which none is {', '.join(_ANSWER_KEYS)}"
    )
    raise ValueError(
        f"the record's answer is a mapping of {', '.join(map(repr, answer)) or 'nothing'}, {problem}; name the one "
        "that is right under data: columns: {answer: answer.KEY}"
    )
