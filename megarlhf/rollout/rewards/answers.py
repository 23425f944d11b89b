"""The record's right answers, as texts: what every built-in rule that compares with `answer` reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megarlhf.rollout.rewards.batch import short

ANSWER = "answer"
_WITHIN = ("ground_truth", "target", "answer", "answers", "text", "value")
"""Keys of a mapping that is an answer, as verl, SQuAD, TriviaQA and others write it; one of them has to be there."""
_BESIDE = "aliases"
"""TriviaQA's further right answers, beside one of these keys."""
_ELSEWHERE = ("ground_truth", "answers", "solution", "label", "target", "reward_model")
"""Columns that may hold what is missing."""
_BEHIND_MARK = re.compile(r"####[ \t]*([^\s#][^\n#]*?)\s*\Z")
"""The end of GSM8K's solutions."""


def answers_of(fields: Mapping[str, Any]) -> list[str]:
    """Texts of which any is right, without white space around them: of a list each entry, also where texts are listed
    in JSON text (["7", "seven"], but not [7], which is an answer itself), of a mapping what it calls the answer; of a
    number that is whole both 42 and 42.0, which is what pandas makes of whole numbers beside a gap.

    Raises: ValueError where there is none.
    """
    if ANSWER not in fields:
        names = ", ".join(map(repr, fields)) or "none"
        near = next((name for name in _ELSEWHERE if name in fields), None)
        meant = "add it to the prompts"
        if near is not None:
            within = (
                f"{near}.ground_truth" if isinstance(fields[near], Mapping) and "ground_truth" in fields[near] else near
            )
            meant = f"if {within!r} is meant, name it under data: columns: {{answer: {within}}}"
        raise ValueError(f"it needs the field 'answer', found {names}; {meant}")
    found = list(dict.fromkeys(texts_of_answer(fields[ANSWER])))
    if not found:
        raise ValueError(
            f"the record's answer is {short(fields[ANSWER])}, in which there is no text and no number; clean the data, "
            "or leave such records out"
        )
    return found


def texts_of_answer(value: Any) -> Iterator[str]:
    """Answers in a value, as texts. Raises: ValueError for a mapping of which it is not clear what is the answer."""
    if value is None:
        return
    if isinstance(value, Mapping):
        yield from texts_of_answer(value[_key_of(value)])
        yield from texts_of_answer(value.get(_BESIDE))
    elif isinstance(value, bool):
        yield from (str(value), str(value).lower())
    elif isinstance(value, float):
        if math.isfinite(value):
            yield from ([f"{value:.0f}"] if value == int(value) else [])
            yield repr(value)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from texts_of_answer(each)
    elif callable(getattr(value, "tolist", None)):  # of numpy
        yield from texts_of_answer(value.tolist())
    elif listed := listed_in(value):
        for each in listed:
            yield from texts_of_answer(each)
    elif text := str(value).strip():
        yield text


def listed_in(value: Any) -> list[str]:
    """Texts of a list that is written as JSON text; numbers in brackets are an answer to a question of mathematics."""
    if not (isinstance(value, str) and value.strip().startswith("[")):
        return []
    try:
        listed = json.loads(value)
    except (ValueError, RecursionError):  # the latter for thousands of brackets
        return []
    return listed if isinstance(listed, list) and all(isinstance(each, str) for each in listed) else []


def end_of_solution(answer: str) -> str | None:
    """Text behind #### at the end of a solution, as in GSM8K; None: the text is no such solution."""
    found = _BEHIND_MARK.search(answer)
    return found and found[1]


def _key_of(answer: Mapping[str, Any]) -> str:
    there = [name for name in _WITHIN if answer.get(name) is not None]
    if len(there) == 1:
        return there[0]
    which = (
        f"of which {' and '.join(map(repr, there))} may be it" if there else f"of which none is {', '.join(_WITHIN)}"
    )
    raise ValueError(
        f"the record's answer is a mapping of {', '.join(map(repr, answer)) or 'nothing'}, {which}; name the one that "
        "is right under data: columns: {answer: answer.KEY}"
    )
