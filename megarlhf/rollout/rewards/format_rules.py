"""Built-in rules for the format of a response: 1 if it has the format, else 0. `args` holds their arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from megarlhf.rollout.rewards.batch import Fields

# Tags at the end of a prompt, by which the template begins the response: <think>, or an empty <think></think>.
_PROMPT_TAGS = re.compile(r"(?:<([\w.:-]+)>\s*(?:</\1>\s*)?)+\Z")


def tags(prompt: str, response: str, fields: Fields, *, names: Sequence[str] = ("think", "answer")) -> float:
    """Whether the response is <NAME>...</NAME> for each name, once and in order, with only white space between them.

    Tags at the end of the prompt count as part of the response. An open one that is not among the names must be closed
    first.
    """
    if _consists_of(response, names):
        return 1.0
    if (match := _PROMPT_TAGS.search(prompt)) is None:
        return 0.0
    begun = match[0]
    tag_names = list(dict.fromkeys(re.findall(r"<([\w.:-]+)>", begun)))
    if names[0] not in tag_names and f"</{tag_names[-1]}>" not in begun:
        names = [tag_names[-1], *names]
    start = begun.find(f"<{names[0]}>")
    return float(start >= 0 and _consists_of(begun[start:] + response, names))


def _consists_of(text: str, names: Sequence[str]) -> bool:
    parts = [rf"<{re.escape(name)}>(.*?)</{re.escape(name)}>" for name in names]
    match = re.fullmatch(r"\s*" + r"\s*".join(parts) + r"\s*", text, re.DOTALL)
    marks = [mark for name in names for mark in (f"<{name}>", f"</{name}>")]
    return match is not None and all(text.count(mark) == 1 for mark in marks)


def regex(prompt: str, response: str, fields: Fields, *, pattern: str, full: bool = False) -> float:
    """Whether the pattern (Python's `re`) occurs in the response, or with `full` matches all of it."""
    return float((re.fullmatch if full else re.search)(pattern, response) is not None)


def length_window(
    prompt: str, response: str, fields: Fields, *, least: int = 0, most: int | None = None, unit: str = "characters"
) -> float:
    """Whether the response has `least` to `most` characters, or words."""
    size = len(response.split()) if unit == "words" else len(response)
    return float(size >= least and (most is None or size <= most))


def json_object(prompt: str, response: str, fields: Fields, *, required: Sequence[str] = ()) -> float:
    """Whether the response is one JSON object that has the required keys."""
    try:
        tree = json.loads(response, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # thousands of brackets raise RecursionError
        return 0.0
    return float(isinstance(tree, dict) and all(key in tree for key in required))


def _refuse_constant(name: str) -> None:  # Python's parser takes NaN and Infinity, which JSON does not have
    raise ValueError(name)


def check_tags(*, names: Sequence[str] = ("think", "answer")) -> None:
    """Raises: ValueError for wrong arguments of `tags`, as the other checks do for those of their rules."""
    if not names or isinstance(names, str) or len(set(names)) != len(names):
        raise ValueError(f"names = {names!r}, expected a list of different names, such as [think, answer]")


def check_regex(*, pattern: str, full: bool = False) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"pattern = {pattern!r} is no regular expression: {error}") from None


def check_length_window(*, least: int = 0, most: int | None = None, unit: str = "characters") -> None:
    if unit not in ("characters", "words"):
        raise ValueError(f"unit = {unit!r}, expected characters or words")
    if not isinstance(least, int) or (most is not None and not (isinstance(most, int) and most >= least)):
        raise ValueError(
            f"least = {least!r} and most = {most!r}, expected whole numbers, the first not above the other"
        )


def check_json_object(*, required: Sequence[str] = ()) -> None:
    if isinstance(required, str) or not all(isinstance(key, str) for key in required):
        raise ValueError(f"required = {required!r}, expected a list of keys")


FORMAT_RULES: Mapping[str, tuple[Callable[..., float], Callable[..., None]]] = {
    "tags": (tags, check_tags),
    "regex": (regex, check_regex),
    "length_window": (length_window, check_length_window),
    "json_object": (json_object, check_json_object),
}
"""Rules with the check of their arguments, by name."""
