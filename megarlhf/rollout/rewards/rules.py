"""Rule rewards: plain functions of the prompt, the response and the record's other columns."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import inspect
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from megarlhf.config import RewardConfig
from megarlhf.rollout.rewards.answers import ANSWER, answers_of, end_of_solution
from megarlhf.rollout.rewards.calls import load_function
from megarlhf.rollout.rewards.format_rules import FORMAT_RULES
from megarlhf.rollout.rewards.forms import Form, form_of, truth_of
from megarlhf.rollout.rewards.numerals import last_number, number_of, with_plain_minus
from megarlhf.rollout.rewards.verifiers import VERIFIERS

Rule = Callable[[str, str, Mapping[str, Any]], Any]
"""(prompt text, response text without eos, other columns of the record) -> reward."""


def exact_match(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1 if the response is one of the record's answers, white space around both aside; else 0. Signs of Unicode that
    look alike are the same (a minus, letters with combining accents). Where the answer is a list in JSON text, the
    response may also be that text."""
    answers = [*answers_of(fields), *([fields[ANSWER]] if isinstance(fields[ANSWER], str) else [])]
    return float(_alike(response) in map(_alike, answers))


def _alike(text: str) -> str:
    return unicodedata.normalize("NFC", with_plain_minus(text)).strip()


def numeric_match(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1 if the last number of the response equals one of the record's answers as a decimal number; else 0.

    Of a solution that ends with #### 72, as in GSM8K, the answer is what stands there. Thousands may have commas or
    spaces; 85, 85.0 and 8.5e1 are equal. Raises ValueError if an answer is no number.
    """
    return float(last_number(response) in _numeric_answers(fields))


def _numeric_answers(fields: Mapping[str, Any]) -> list[Decimal]:
    """Answers that are numbers, as 4 of ["4", "four"]. Raises: ValueError where none is."""
    answers = [end_of_solution(text) or text for text in answers_of(fields)]
    if not (numbers := [number for text in answers if (number := number_of(text)) is not None]):
        raise ValueError(
            f"the record's answer is {answers[0][:80]!r}, expected a number; clean the data or use exact_match"
        )
    return numbers


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        names = ", ".join(map(repr, fields)) or "none"
        found = "null there" if name in fields else f"found {names}"
        raise ValueError(f"it needs the field {name!r}, {found}; add it to the prompts")
    return fields[name]


RULES: dict[str, Rule] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    **{name: rule for name, (rule, _) in FORMAT_RULES.items()},
    **{name: rule for name, (rule, _, _) in VERIFIERS.items()},
}
_ANSWERS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "exact_match": answers_of,
    "numeric_match": _numeric_answers,
    **{name: read for name, (_, _, read) in VERIFIERS.items()},
}
"""Readers of the fields that a rule needs; they raise ValueError where they cannot."""
ACCURACIES: Mapping[str, Mapping[str, Any]] = {name: {} for name in _ANSWERS} | {"reasoning_gym": {"exact": True}}
"""Rules that say whether a response is right, with the arguments with which they say 0 or 1."""
_CHECKS: dict[str, Callable[..., None]] = {
    **{name: check for name, (_, check) in FORMAT_RULES.items()},
    **{name: check for name, (_, check, _) in VERIFIERS.items()},
}
"""Checks of a rule's arguments."""


def sources_of_rules(rewards: Sequence[RewardConfig]) -> dict[str, str]:
    """Digests of the files in which the user's own rules stand, by the rule in words; one without a file has none."""
    digests = {}
    for name in sorted({reward.rule for reward in rewards if reward.rule is not None} - RULES.keys()):
        with contextlib.suppress(TypeError, OSError):
            file = inspect.getsourcefile(load_rule(name))
            digests[f"reward rule {name}"] = hashlib.sha256(Path(file or "").read_bytes()).hexdigest()
    return digests


def load_rule(name: str) -> Rule:
    """A rule of `RULES`, or a function of the user's as `package.module:function`."""
    if name in RULES:
        return RULES[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, RULES, n=1)
        raise ValueError(
            f"unknown reward rule {name!r}; "
            + (f"did you mean {near[0]!r}? " if near else "")
            + f"the known ones are {', '.join(RULES)}; write your own as package.module:function"
        )
    rule: Rule = load_function(name)
    return rule


def rule_with(name: str, args: Mapping[str, Any]) -> Rule:
    """`load_rule`, with arguments, which a built-in rule may have.

    Raises: ValueError for arguments that it does not have, needs, or cannot work with.
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
    for given in args:
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"reward rule {name!r} has no argument {given!r}; {meant}")
    if name in _CHECKS:
        try:
            _CHECKS[name](**args)
        except (ValueError, TypeError) as error:
            raise ValueError(f"reward rule {name!r}: {error}") from None
    return partial(rule, **args)


def form_of_rule(name: str) -> Form:
    """How a rule wants to be called. Raises: ValueError, naming it, for one that cannot be."""
    rule = load_rule(name)
    if name in RULES:
        return Form()
    try:
        return form_of(rule)
    except ValueError as error:
        raise ValueError(f"reward rule {name!r}: {error}") from error


@dataclass(frozen=True)
class RuleFields:
    """The check of what rules need of a record; a process that tokenizes may be given it."""

    rules: tuple[str, ...]

    def __call__(self, fields: Mapping[str, Any]) -> None:
        """Raises: ValueError for what is missing."""
        for rule in self.rules:
            field_check(rule)(fields)

    def key(self) -> list[str]:
        """The rules, and what each of the user's says that it needs."""
        return [f"{rule} {sorted(_needed(rule))}" for rule in self.rules]


def _needed(name: str) -> tuple[str, ...]:
    """Fields that a rule of the user's names in an attribute, `required_fields`."""
    needed = getattr(load_rule(name), "required_fields", ())
    return (needed,) if isinstance(needed, str) else tuple(needed)


def field_check(name: str) -> Callable[[Mapping[str, Any]], None]:
    """A function that raises ValueError for a record's fields with which the rule cannot work, so that nothing is
    generated first. The user's own rule names what it needs in an attribute, `required_fields`."""
    needed = _needed(name)
    form = form_of_rule(name)
    reads_truth = not {"ground_truth", "ground_truths"}.isdisjoint({*form.names, *form.places})

    def check(fields: Mapping[str, Any]) -> None:
        try:
            for field in needed:
                _field(fields, field)
            _ANSWERS.get(name, lambda fields: None)(fields)
            if reads_truth:
                truth_of(fields)
        except ValueError as error:
            raise ValueError(f"reward rule {name!r}: {error}") from error

    return check
