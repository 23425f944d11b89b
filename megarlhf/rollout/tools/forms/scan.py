"""Search for calls in a turn, and strict JSON: what the forms of calls have in common."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from megarlhf.rollout.tools.call import Call, Unreadable

Found: TypeAlias = list[Call | Unreadable]
Tool: TypeAlias = Mapping[str, Any]
Read: TypeAlias = Callable[[str, int], tuple[Found, int]]
"""Reader of what follows the mark that opens calls: text and position -> calls, and the position behind them. Raises:
Broken."""

THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|channel>": "<channel|>"}
"""Marks that open a thought, and those that close it."""
_CLOSES = frozenset(THOUGHTS.values())
_THOUGHT_MARK = "|".join(map(re.escape, (*THOUGHTS, *_CLOSES)))
_DEEPEST = 100
_SPACE = re.compile(r"\s*")
_KEYS = ("arguments", "parameters")
_WITHOUT_ARGUMENTS = frozenset(("name", "id", "type"))


class Broken(Exception):
    """A call that cannot be read: the reason, and where."""

    def __init__(self, why: str, position: int = 0) -> None:
        super().__init__(why)
        self.why, self.position = why, position


def scan(text: str, opens: str, closes: str, read: Read) -> Found:
    """Calls outside thoughts. Behind one that cannot be read the search goes on at the next mark.

    opens, closes: patterns for the marks that open and close calls
    """
    mark = re.compile(f"(?P<call>{opens})|{_THOUGHT_MARK}")
    resume = re.compile(f"(?P<closes>{closes})|{opens}|{_THOUGHT_MARK}")
    found: Found = []
    position = 0
    while match := mark.search(text, position):
        if match["call"] is not None:
            try:
                calls, position = read(text, match.end())
                found += calls
            except Broken as broken:
                after = resume.search(text, max(match.end(), broken.position))
                position = len(text) if after is None else after.end() if after["closes"] else after.start()
                found.append(unreadable(text[match.start() : position], broken.why))
        elif match[0] in _CLOSES:  # the prompt has opened this thought: all before belongs to it
            found.clear()
            position = match.end()
        else:
            end = text.find(THOUGHTS[match[0]], match.end())
            if end < 0:
                break
            position = end + len(THOUGHTS[match[0]])
    return found


def without_thoughts(text: str) -> str:
    """The text outside thoughts. All before a mark that closes a thought without an opening one is a thought."""
    kept, position = "", 0
    while match := re.compile(_THOUGHT_MARK).search(text, position):
        if match[0] in _CLOSES:
            kept, position = "", match.end()
            continue
        end = text.find(THOUGHTS[match[0]], match.end())
        kept += text[position : match.start()]
        if end < 0:
            return kept
        position = end + len(THOUGHTS[match[0]])
    return kept + text[position:]


def has_unopened_end(text: str) -> bool:
    """Tell whether the text closes a thought that it has not opened."""
    first = re.search(_THOUGHT_MARK, text)
    return first is not None and first[0] in _CLOSES


def skip_space(text: str, position: int) -> int:
    """The position of the next character that is no white space."""
    match = _SPACE.match(text, position)
    assert match is not None, "nothing is white space too"
    return match.end()


def expect(text: str, position: int, mark: str) -> int:
    """The position behind `mark`, which follows after white space. Raises: Broken."""
    position = skip_space(text, position)
    if text.startswith(mark, position):
        return position + len(mark)
    raise Broken(f"{mark} is missing: expected it {near(text, position)}", position)


def near(text: str, position: int) -> str:
    """A place in a text, in words."""
    return f"before {text[position : position + 20]!r}" if position < len(text) else "at the end"


def unreadable(text: str, why: str) -> Unreadable:
    """An unreadable call without half characters, which no message could hold."""
    return Unreadable(*(part.encode("utf-8", "replace").decode() for part in (text, why)))


def read_json(text: str, position: int) -> tuple[Any, int]:
    """The JSON value that begins at `position` (or behind white space), and the position behind it. Raises: Broken for
    anything that is no JSON, and for repeated keys, infinite numbers and half characters."""
    start = skip_space(text, position)
    if start == len(text):
        raise Broken("JSON expected, but the text ends", start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise Broken(_why_not_json(error, text, start), error.pos) from None
    except RecursionError:
        raise Broken("not readable: the JSON is nested too deeply", start) from None
    except ValueError as error:
        raise Broken(f"not JSON: {error}", start) from None
    check_value(value)
    return value, end


def whole_json(text: str) -> Any:
    """The value of a text that is JSON as a whole. Raises: Broken as `read_json`, and for text behind the value."""
    value, end = read_json(text, 0)
    if (end := skip_space(text, end)) < len(text):
        raise Broken(f"not JSON: there is more behind the value, {near(text, end)}", end)
    return value


def _why_not_json(error: json.JSONDecodeError, text: str, start: int) -> str:
    rest = text[error.pos : error.pos + 20]
    words = ("True", "False", "None", "'")
    if re.match(r"True\b|False\b|None\b|'", rest):
        hint = "; JSON has true, false, null and double quotes, not " + next(w for w in words if rest.startswith(w))
    else:
        hint = "; write a line break in a text as \\n" if "control character" in error.msg else ""
    return f"not JSON: {error.msg} (character {error.pos - start + 1}, {near(text, error.pos)}); JSON expected{hint}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is repeated")
    return made


def _float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


def check_value(value: Any) -> None:
    """Raises: Broken for half characters (lone surrogates) and for values that are nested too deeply."""
    for text, depth in _texts(value):
        if depth > _DEEPEST:
            raise Broken(f"not readable: values are nested more than {_DEEPEST} deep")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Broken("not readable: a text has half a character (a lone surrogate)") from None


def _texts(value: Any) -> Iterator[tuple[str, int]]:
    """All texts in a value, with their depth; "" for each list and object."""
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, str):
            yield part, depth
        elif isinstance(part, list | dict):
            yield "", depth
            if depth <= _DEEPEST:
                parts = [*part, *part.values()] if isinstance(part, dict) else part
                waiting += [(inner, depth + 1) for inner in parts]


def call_of(value: Any, text: str) -> Call | Unreadable:
    """The call that a JSON value `{"name": ..., "arguments": {...}}` describes. `text` is what the model wrote."""
    try:
        if not isinstance(value, dict) or "name" not in value:
            got = (
                f"an object with {', '.join(map(repr, value)) or 'no keys'}" if isinstance(value, dict) else kind(value)
            )
            raise Broken(f'expected {{"name": ..., "arguments": {{...}}}}, got {got}')
        key = next((key for key in _KEYS if key in value), None)
        if key is None and (others := value.keys() - _WITHOUT_ARGUMENTS):
            raise Broken(f"arguments are missing: put {', '.join(map(repr, sorted(others)))} into `arguments`")
        given = value.get("id")
        return made_call(value["name"], value[key] if key else {}, given if isinstance(given, str) else None)
    except Broken as broken:
        return unreadable(text, broken.why)


def made_call(name: Any, arguments: Any, id: str | None = None) -> Call:
    """A call, of checked values. Raises: Broken."""
    if not isinstance(name, str) or not name:
        raise Broken(f"the name of a call is {kind(name) if name != '' else 'empty'}, expected a text")
    if isinstance(arguments, str):
        try:
            arguments = whole_json(arguments)
        except Broken as broken:
            raise Broken(f"the arguments are a text that is no JSON object: {broken.why}") from None
    if not isinstance(arguments, dict):
        raise Broken(f"the arguments are {kind(arguments)}, expected an object")
    check_value([name, arguments, id])
    return Call(name, arguments, id)


def kind(value: Any) -> str:
    """The kind of a JSON value, in words."""
    if value is None:
        return "null"
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list"}
    return kinds.get(type(value), "an object")


def names_of(tools: Sequence[Tool]) -> set[str]:
    """Names of described tools."""
    functions = [tool.get("function") for tool in tools]
    return {str(function.get("name")) for function in functions if isinstance(function, Mapping)}
