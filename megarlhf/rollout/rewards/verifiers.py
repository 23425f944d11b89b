"""Built-in rules that use other packages: math-verify for mathematical answers, reasoning-gym for generated tasks.

They run in worker processes, for two reasons. A computer algebra system may take any time for what a model has written.
And math-verify limits its time by a signal, which only the main thread of a process receives.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from megarlhf.data.sources.reasoning_gym import FIELD, item_again, require_reasoning_gym
from megarlhf.rollout.rewards.answers import ANSWER, answers_of, end_of_solution
from megarlhf.rollout.rewards.batch import Fields
from megarlhf.rollout.rewards.numerals import with_plain_signs

_BOX = re.compile(r"\\boxed\s*{")
_BETWEEN = re.compile(r"[\s,;$]*(?:(?:and|or)\b)?[\s,;$]*(?:\w+\s*=\s*)?")
"""Text between boxes that are one answer together."""
_DELIMITED = re.compile(r"\\boxed|(?<!\\)\$|\\\(|\\\[")


def math_verify(prompt: str, response: str, fields: Fields, *, seconds: int = 5) -> Mapping[str, float]:
    r"""Whether the response's answer equals the record's `answer` as mathematics: 1/2 and 0.5, x=3 and 3.

    The response's answer is in the last \boxed, else the last formula, else the last number, as math-verify finds it.
    `seconds` limits the parsing, and each comparison.

    Returns: `score`, 1 or 0; `no_answer`, 1 if the response has none; `undecided`, 1 if the comparison took too long or
    failed, which scores 0.
    """
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        response_formulas = _parse(from_last_box(with_plain_signs(response)), seconds)
    except (Exception, TimeoutException):  # noqa: BLE001 - sympy may raise anything for what a model has written
        return {"score": 0.0, "no_answer": 0.0, "undecided": 1.0}
    undecided = False
    right_formulas = [formula for answer in maths_answers(fields) for formula in _parse_answer(answer, seconds)]
    for right, given in itertools.product(right_formulas, response_formulas):
        try:
            if verify(right, given, timeout_seconds=seconds, raise_on_error=True):
                return {"score": 1.0, "no_answer": 0.0, "undecided": 0.0}
        except (Exception, TimeoutException):  # noqa: BLE001 - as above
            undecided = True
    return {"score": 0.0, "no_answer": float(not response_formulas), "undecided": float(undecided)}


def from_last_box(response: str) -> str:
    r"""The last complete, non-empty `\boxed{...}` of the response; the whole response if it has none.

    math-verify reads several boxes that are close together as one set, which is wrong for an answer and its correction.
    Boxes with only `,`, `$`, `and` or `or` between them are kept together: they are a set.
    """
    boxes = _boxes(response)
    if not boxes:
        return response
    first = len(boxes) - 1
    while first and _BETWEEN.fullmatch(response[boxes[first - 1][1] : boxes[first][0]]):
        first -= 1
    return response[boxes[first][0] : boxes[-1][1]]


def _boxes(response: str) -> list[tuple[int, int]]:
    """Start and end of each complete, non-empty box that is not inside another one."""
    open_braces: list[int] = []
    closing: dict[int, int] = {}
    for index, letter in enumerate(response):
        if letter == "{":
            open_braces.append(index)
        elif letter == "}" and open_braces:
            closing[open_braces.pop()] = index
    spans: list[tuple[int, int]] = []
    for box in _BOX.finditer(response):
        end = closing.get(box.end() - 1)
        if end is not None and response[box.end() : end].strip() and (not spans or box.start() >= spans[-1][1]):
            spans.append((box.start(), end + 1))
    return spans


def maths_answers(fields: Fields) -> list[str]:
    """The record's answers; of a solution that ends with #### only the text after that.

    Raises: ValueError if there is no answer, or it is true or false.
    """
    if isinstance(answer := fields.get(ANSWER), bool):
        raise ValueError(f"the record's answer is {answer!r}, expected a formula or a number; use exact_match")
    return [with_plain_signs(end_of_solution(text) or text) for text in answers_of(fields)]


def _parse(text: str, seconds: int) -> list[Any]:
    from math_verify import parse

    formulas: list[Any] = parse(text, parsing_timeout=seconds, raise_on_error=True)
    return formulas


@functools.lru_cache(maxsize=1024)
def _parse_answer(answer: str, seconds: int) -> list[Any]:
    r"""Formulas of a record's answer. Without delimiters, as in `\frac{1}{2}`, the whole text is a formula."""
    formulas = _parse(answer if _DELIMITED.search(answer) else rf"\boxed{{{answer}}}", seconds)
    if not formulas:
        raise ValueError(
            f"the record's answer is {answer[:80]!r}, in which math-verify finds no formula; clean the data"
        )
    return formulas


def reasoning_gym(prompt: str, response: str, fields: Fields, *, tag: str | None = None, exact: bool = False) -> float:
    """Score of the task's own verifier, from 0 to 1, for data from `reasoning_gym:TASK?...`.

    tag: take the text between the last <TAG> and </TAG> as the answer (none: 0), not the whole stripped response
    exact: 1 for a score of 1, else 0
    """
    dataset, item = item_again(generated_item(fields))
    answer: str | None = response.strip()
    if tag is not None:
        tagged = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
        answer = tagged[-1].strip() if tagged else None
    if answer is None:
        return 0.0
    try:
        score = float(dataset.score_answer(answer, item))
    except Exception as error:
        source = fields[FIELD]["source"]
        raise ValueError(f"the verifier of {source} raised {type(error).__name__}: {error}") from error
    return float(score >= 1.0) if exact else score


def generated_item(fields: Fields) -> Mapping[str, Any]:
    """Origin of a generated record. Raises: ValueError for a record that was not generated."""
    origin = fields.get(FIELD)
    if not isinstance(origin, Mapping) or not {"source", "item", "digest"} <= origin.keys():
        raise ValueError("it judges generated tasks: set data.train = reasoning_gym:TASK?size=500&seed=0")
    return origin


def check_math_verify(*, seconds: int = 5) -> None:
    """Raises: ValueError for wrong arguments, or if the package is missing."""
    if not isinstance(seconds, int) or isinstance(seconds, bool) or seconds < 1:
        raise ValueError(f"seconds = {seconds!r}, expected a whole number, at least 1")
    if find_spec("math_verify") is None:
        raise ValueError("it needs the package math-verify: pip install 'megarlhf[verifiers]'")


def check_reasoning_gym(*, tag: str | None = None, exact: bool = False) -> None:
    """Raises: ValueError for wrong arguments, or if the package is missing."""
    if not (tag is None or (isinstance(tag, str) and tag)) or not isinstance(exact, bool):
        raise ValueError(f"tag = {tag!r} and exact = {exact!r}, expected a name, and true or false")
    require_reasoning_gym("it")


VERIFIERS: Mapping[str, tuple[Callable[..., Any], Callable[..., None], Callable[[Fields], object]]] = {
    "math_verify": (math_verify, check_math_verify, maths_answers),
    "reasoning_gym": (reasoning_gym, check_reasoning_gym, generated_item),
}
"""Rules with the check of their arguments and the reader of the fields that they need, by name."""
