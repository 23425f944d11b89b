"""Rule rewards: plain functions of the prompt, the response and the record's other columns."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

Rule = Callable[[str, str, Mapping[str, Any]], float]
"""(prompt text, response text without eos, other columns of the record) -> reward."""

# The sign belongs to the number only where no number or word stands before it: 37-5 ends in 5.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4})?")


def exact_match(prompt_text: str, response_text: str, fields: Mapping[str, Any]) -> float:
    """1 if the response is the record's `answer`, white space around both aside; else 0."""
    return float(response_text.strip() == str(_answer(fields)).strip())


def numeric_match(prompt_text: str, response_text: str, fields: Mapping[str, Any]) -> float:
    """1 if the last number of the response equals the record's `answer` as a decimal number; else 0.

    Thousands may have commas; 85, 85.0 and 8.5e1 are equal. Raises ValueError if the answer is no number.
    """
    answer = str(_answer(fields)).strip()
    if not _NUMBER.fullmatch(answer):
        raise ValueError(
            f"numeric_match: the record's answer is {answer[:80]!r}, expected a number; "
            "clean the data or use exact_match"
        )
    numbers = _NUMBER.findall(response_text)
    return float(bool(numbers) and _number(numbers[-1]) == _number(answer))


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


RULES: dict[str, Rule] = {"exact_match": exact_match, "numeric_match": numeric_match}


def load_rule(name: str) -> Rule:
    """A rule of `RULES`, or a function of the user's as `package.module:function`."""
    if name in RULES:
        return RULES[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise ValueError(
            f"unknown reward rule {name!r}; the known ones are {', '.join(RULES)}; "
            "write your own as package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward rule {name!r}: cannot import {module_name}: {error}; set PYTHONPATH") from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"reward rule {name!r}: {module_name} fails when it is imported: {type(error).__name__}: {error} "
            f"({last.filename}:{last.lineno})"
        ) from error
    rule = getattr(module, function_name, None)
    if not callable(rule):
        raise ValueError(f"reward rule {name!r}: {module.__file__} has no function {function_name!r}")
    return rule


def _answer(fields: Mapping[str, Any]) -> Any:
    if fields.get("answer") is None:
        field_names = ", ".join(map(repr, fields)) or "none"
        raise ValueError(f"this reward rule needs the field 'answer', found {field_names}; add it to the prompts")
    return fields["answer"]
