"""Built-in rules that ask other packages: answers to maths by math-verify, generated tasks by reasoning-gym.

They run in worker processes, since a computer algebra system may take any time for what a model has written, and
since math-verify keeps time by a signal, which only the main thread of a process gets.
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
from megarlhf.rollout.rewards.numerals import with_plain_signs

Fields = Mapping[str, Any]
_BOX = re.compile(r"\\boxed\s*{")
_BETWEEN = re.compile(r"[\s,;$]*(?:(?:and|or)\b)?[\s,;$]*(?:\w+\s*=\s*)?")
"""Between boxes that are one answer together."""
_SET_APART = re.compile(r"\\boxed|(?<!\\)\$|\\\(|\\\[")


def math_verify(prompt: str, response: str, fields: Fields, *, seconds: int = 5) -> Mapping[str, float]:
    r"""Whether the response's answer equals the record's `answer` as mathematics: 1/2 and 0.5, x=3 and 3.

    The answer is what stands in the last \boxed, else in the last formula, else the last number, as math-verify finds
    it. `seconds` is for reading it, and for each comparison.

    Returns: `score`, 1 or 0; `no_answer`, 1 where none was found; `undecided`, 1 where the comparison took too long or
    failed, which scores 0.
    """
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        said = _parse(from_last_box(with_plain_signs(response)), seconds)
    except (Exception, TimeoutException):  # noqa: BLE001 - sympy may raise anything for what a model has written
        return {"score": 0.0, "no_answer": 0.0, "undecided": 1.0}
    undecided = False
    answers = [formula for answer in maths_answers(fields) for formula in _gold(answer, seconds)]
    for right, given in itertools.product(answers, said):
        try:
            if verify(right, given, timeout_seconds=seconds, raise_on_error=True):
                return {"score": 1.0, "no_answer": 0.0, "undecided": 0.0}
        except (Exception, TimeoutException):  # noqa: BLE001 - as above
            undecided = True
    return {"score": 0.0, "no_answer": float(not said), "undecided": float(undecided)}


def from_last_box(response: str) -> str:
    r"""The last `\boxed{...}` of the response that is whole and has something in it; all of it where there is none.

    math-verify reads several boxes that stand close together as one set: of an answer and its correction that is
    neither. Boxes that nothing but `,`, `$`, `and` or `or` stands between are left together: they are a set.
    """
    boxes = _boxes(response)
    if not boxes:
        return response
    first = len(boxes) - 1
    while first and _BETWEEN.fullmatch(response[boxes[first - 1][1] : boxes[first][0]]):
        first -= 1
    return response[boxes[first][0] : boxes[-1][1]]


def _boxes(response: str) -> list[tuple[int, int]]:
    """Where each whole box begins and ends that has something in it, those inside of another one aside."""
    open_braces: list[int] = []
    closing: dict[int, int] = {}
    for at, letter in enumerate(response):
        if letter == "{":
            open_braces.append(at)
        elif letter == "}" and open_braces:
            closing[open_braces.pop()] = at
    found: list[tuple[int, int]] = []
    for box in _BOX.finditer(response):
        end = closing.get(box.end() - 1)
        if end is not None and response[box.end() : end].strip() and (not found or box.start() >= found[-1][1]):
            found.append((box.start(), end + 1))
    return found


def maths_answers(fields: Fields) -> list[str]:
    """The record's answers, of solutions that end with #### what stands there. Raises: ValueError where there is none,
    or one is true or false."""
    if isinstance(answer := fields.get(ANSWER), bool):
        raise ValueError(f"the record's answer is {answer!r}, expected a formula or a number; use exact_match")
    return [with_plain_signs(end_of_solution(text) or text) for text in answers_of(fields)]


def _parse(text: str, seconds: int) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=seconds, raise_on_error=True)
    return found


@functools.lru_cache(maxsize=1024)
def _gold(answer: str, seconds: int) -> list[Any]:
    r"""An answer as `\frac{1}{2}` is a formula without anything that says so."""
    found = _parse(answer if _SET_APART.search(answer) else rf"\boxed{{{answer}}}", seconds)
    if not found:
        raise ValueError(
            f"the record's answer is {answer[:80]!r}, in which math-verify finds no formula; clean the data"
        )
    return found


def reasoning_gym(prompt: str, response: str, fields: Fields, *, tag: str | None = None, exact: bool = False) -> float:
    """What the task's own verifier says of the response, from 0 to 1. The data is of `reasoning_gym:TASK?...`.

    `tag`: what stands between the last <TAG> and </TAG> is the answer (none: 0); else the whole response without white
    space around it. `exact`: 1 for a score of 1, else 0.
    """
    dataset, item = item_again(generated_item(fields))
    answer: str | None = response.strip()
    if tag is not None:
        found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
        answer = found[-1].strip() if found else None
    if answer is None:
        return 0.0
    try:
        score = float(dataset.score_answer(answer, item))
    except Exception as error:
        source = fields[FIELD]["source"]
        raise ValueError(f"the verifier of {source} raised {type(error).__name__}: {error}") from error
    return float(score >= 1.0) if exact else score


def generated_item(fields: Fields) -> Mapping[str, Any]:
    """Where the item is from. Raises: ValueError for a record that was not generated."""
    found = fields.get(FIELD)
    if not isinstance(found, Mapping) or not {"source", "item", "digest"} <= found.keys():
        raise ValueError("it judges generated tasks: set data.train = reasoning_gym:TASK?size=500&seed=0")
    return found


def check_math_verify(*, seconds: int = 5) -> None:
    """Raises: ValueError for wrong arguments, or without the package."""
    if not isinstance(seconds, int) or isinstance(seconds, bool) or seconds < 1:
        raise ValueError(f"seconds = {seconds!r}, expected a whole number, at least 1")
    if find_spec("math_verify") is None:
        raise ValueError("it needs the package math-verify: pip install 'megarlhf[verifiers]'")


def check_reasoning_gym(*, tag: str | None = None, exact: bool = False) -> None:
    """Raises: ValueError, as above."""
    if not (tag is None or (isinstance(tag, str) and tag)) or not isinstance(exact, bool):
        raise ValueError(f"tag = {tag!r} and exact = {exact!r}, expected a name, and true or false")
    require_reasoning_gym("it")


VERIFIERS: Mapping[str, tuple[Callable[..., Any], Callable[..., None], Callable[[Fields], object]]] = {
    "math_verify": (math_verify, check_math_verify, maths_answers),
    "reasoning_gym": (reasoning_gym, check_reasoning_gym, generated_item),
}
"""By name: the rule, what looks at its arguments, what reads a record's fields."""
