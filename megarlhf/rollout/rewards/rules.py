"""Rule rewards: plain functions of the prompt, the response and the record's other columns."""

from __future__ import annotations

import difflib
import inspect
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from megarlhf.own_code.load import is_path, load_function, unknown_name
from megarlhf.rollout.rewards.answers import ANSWER, answers_of, end_of_solution
from megarlhf.rollout.rewards.batch import Fields
from megarlhf.rollout.rewards.format_rules import FORMAT_RULES
from megarlhf.rollout.rewards.forms import Form, form_of, truth_of
from megarlhf.rollout.rewards.numerals import last_number, number_of, with_plain_minus
from megarlhf.rollout.rewards.verifiers import VERIFIERS

_WHAT = "reward rule"
"""Kind of user code, in messages."""
Rule = Callable[[str, str, Fields], Any]
"""(prompt text, response text without end-of-sequence, other columns of the record) -> reward."""


def exact_match(prompt: str, response: str, fields: Fields) -> float:
    """1 if the response is one of the record's answers, apart from surrounding white space; else 0.

    Characters that look alike are equal (a minus sign, letters with combining accents). If the answer is JSON text of a
    list, the response may also be that text.
    """
    answers = [*answers_of(fields), *([fields[ANSWER]] if isinstance(fields[ANSWER], str) else [])]
    return float(_normalized(response) in map(_normalized, answers))


def _normalized(text: str) -> str:
    return unicodedata.normalize("NFC", with_plain_minus(text)).strip()


def numeric_match(prompt: str, response: str, fields: Fields) -> float:
    """1 if the last number of the response equals one of the record's answers as a decimal number; else 0.

    The answer of a solution that ends with #### 72, as in GSM8K, is 72. Thousands may have commas or spaces; 85, 85.0
    and 8.5e1 are equal. Raises: ValueError if no answer is a number.
    """
    return float(last_number(response) in _numeric_answers(fields))


def _numeric_answers(fields: Fields) -> list[Decimal]:
    """Answers that are numbers, such as 4 for ["4", "four"]. Raises: ValueError if none is."""
    answers = [end_of_solution(text) or text for text in answers_of(fields)]
    if not (numbers := [number for text in answers if (number := number_of(text)) is not None]):
        raise ValueError(
            f"the record's answer is {answers[0][:80]!r}, expected a number; clean the data or use exact_match"
        )
    return numbers


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        names = ", ".join(map(repr, fields)) or "none"
        problem = "null there" if name in fields else f"found {names}"
        raise ValueError(f"it needs the field {name!r}, {problem}; add it to the prompts")
    return fields[name]


RULES: dict[str, Rule] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    **{name: rule for name, (rule, _) in FORMAT_RULES.items()},
    **{name: rule for name, (rule, _, _) in VERIFIERS.items()},
}
_ANSWERS: dict[str, Callable[[Fields], object]] = {
    "exact_match": answers_of,
    "numeric_match": _numeric_answers,
    **{name: read for name, (_, _, read) in VERIFIERS.items()},
}
"""Readers of the fields that a rule needs. They raise ValueError if a field is missing or unusable."""
ACCURACIES: Mapping[str, Mapping[str, Any]] = {name: {} for name in _ANSWERS} | {"reasoning_gym": {"exact": True}}
"""Rules that tell whether a response is right, with the arguments for which they are 0 or 1."""
_CHECKS: dict[str, Callable[..., None]] = {
    **{name: check for name, (_, check) in FORMAT_RULES.items()},
    **{name: check for name, (_, check, _) in VERIFIERS.items()},
}
"""Checks of a rule's arguments."""


def load_rule(name: str) -> Rule:
    """A rule of `RULES`, or a user's function `package.module:function`. Raises: ValueError for an unknown one."""
    if name in RULES:
        return RULES[name]
    if not is_path(name):
        raise ValueError(unknown_name(_WHAT, name, RULES))
    rule: Rule = load_function(name, _WHAT)
    return rule


def bind_rule(name: str, args: Mapping[str, Any]) -> Rule:
    """Load a rule and bind its arguments. Only built-in rules have arguments.

    Raises: ValueError for unknown, missing or wrong arguments.
    """
    rule = load_rule(name)
    if name not in RULES:
        if args:
            raise ValueError(
                f"reward rule {name!r} got args; they are of built-in rules. Give your own function its arguments in "
                "Python: f = functools.partial(g, ...)"
            )
        return rule
    known = [p.name for p in inspect.signature(rule).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for argument in args:
        if argument not in known:
            near = difflib.get_close_matches(argument, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"reward rule {name!r} has no argument {argument!r}; {hint}")
    if name in _CHECKS:
        try:
            _CHECKS[name](**args)
        except (ValueError, TypeError) as error:
            raise ValueError(f"reward rule {name!r}: {error}") from None
    return partial(rule, **args)


def rule_form(name: str) -> Form:
    """Calling form of a rule. Raises: ValueError for a rule that cannot be called."""
    rule = load_rule(name)
    if name in RULES:
        return Form()
    try:
        return form_of(rule)
    except ValueError as error:
        raise ValueError(f"reward rule {name!r}: {error}") from error


@dataclass(frozen=True)
class RuleFields:
    """Check of the fields that rules need in a record. It can be pickled, for processes that tokenize."""

    rules: tuple[str, ...]

    def __call__(self, fields: Fields) -> None:
        """Raises: ValueError for a missing or unusable field."""
        for rule in self.rules:
            field_check(rule)(fields)

    def key(self) -> list[str]:
        """The rules with their `required_fields`, for the key of a cache."""
        return [f"{rule} {sorted(_needed(rule))}" for rule in self.rules]


def _needed(name: str) -> tuple[str, ...]:
    """`required_fields` of a user's rule: an attribute with the names of fields."""
    needed = getattr(load_rule(name), "required_fields", ())
    return (needed,) if isinstance(needed, str) else tuple(needed)


def field_check(name: str) -> Callable[[Fields], None]:
    """Make a function that raises ValueError for fields that the rule cannot work with, before anything is generated.

    A user's rule names the fields that it needs in its attribute `required_fields`.
    """
    needed = _needed(name)
    form = rule_form(name)
    reads_truth = not {"ground_truth", "ground_truths"}.isdisjoint({*form.keywords, *form.positional})

    def check(fields: Fields) -> None:
        try:
            for field in needed:
                _field(fields, field)
            _ANSWERS.get(name, lambda fields: None)(fields)
            if reads_truth:
                truth_of(fields)
        except ValueError as error:
            raise ValueError(f"reward rule {name!r}: {error}") from error

    return check
