"""Forms that write the arguments of a call as literals: Python's, and Gemma's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megarlhf.rollout.tools.call import Call
from megarlhf.rollout.tools.forms.scan import (
    THOUGHTS,
    Broken,
    Found,
    Tool,
    expect,
    has_unopened_end,
    made_call,
    names_of,
    near,
    read_json,
    scan,
    skip_space,
    unreadable,
    without_thoughts,
)

T = TypeVar("T")
_DEEPEST = 100
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d*)?(?:[eE][+-]?\d+)?(?![\w.])")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_CALL = re.compile(r"\s*([^\W\d][\w.\-]*)\s*\(")


class _Reader:
    """Reads Python's literals, and JSON's words, from a position on. Raises: Broken."""

    def __init__(self, text: str, position: int) -> None:
        self.text, self.position = text, position

    def fail(self, expected: str) -> Broken:
        return Broken(f"expected {expected} {near(self.text, self.position)}", self.position)

    def take(self, mark: str) -> bool:
        """Go behind `mark`, and white space before it, if it is next."""
        start = skip_space(self.text, self.position)
        if is_next := self.text.startswith(mark, start):
            self.position = start + len(mark)
        return is_next

    def require(self, mark: str) -> None:
        if not self.take(mark):
            raise self.fail(mark)

    def matched(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = pattern.match(self.text, self.position)
        if match is None:
            raise self.fail(expected)
        self.position = match.end()
        return match

    def several(self, close: str, read: Callable[[], T]) -> list[T]:
        """Items that are separated by commas, up to `close`."""
        items: list[T] = []
        while not self.take(close):
            if items:
                self.require(",")
                if self.take(close):
                    break
            items.append(read())
        return items

    def mapping(self, close: str, key: Callable[[], str], sign: str, depth: int) -> dict[str, Any]:
        def pair() -> tuple[str, Any]:
            name = key()
            self.require(sign)
            return name, self.value(depth)

        pairs = self.several(close, pair)
        names = [name for name, _ in pairs]
        if len(made := dict(pairs)) < len(pairs):
            repeated = next(name for name in names if names.count(name) > 1)
            raise Broken(f"{repeated!r} is repeated", self.position)
        return made

    def value(self, depth: int = 0) -> Any:
        """A literal."""
        if depth > _DEEPEST:
            raise Broken(f"values are nested more than {_DEEPEST} deep", self.position)
        if self.take("["):
            return self.several("]", lambda: self.value(depth + 1))
        if self.take("{"):
            return self.mapping("}", self.key, ":", depth + 1)
        if (found := self.string()) is not None:
            return found
        self.position = skip_space(self.text, self.position)
        if number := _NUMBER.match(self.text, self.position):
            self.position = number.end()
            return _number(number[0], number.start())
        word = _WORD.match(self.text, self.position)
        if word is None or word[0] not in _WORDS:
            raise self.fail("a text in quotes, a number, true, false, null, a list or an object")
        self.position = word.end()
        return _WORDS[word[0]]

    def key(self) -> str:
        if (found := self.string()) is None:
            raise self.fail("a key in quotes")
        return found

    def string(self) -> str | None:
        """A text in quotes; None where there is none. LFM2's template escapes nothing: line breaks, and apostrophes
        between letters, are parts of a text."""
        start = skip_space(self.text, self.position)
        quote = next((q for q in ('"""', "'''", '"', "'") if self.text.startswith(q, start)), None)
        if quote is None:
            return None
        position = start + len(quote)
        search = re.compile(rf"\\.|{quote}", re.DOTALL)
        while match := search.search(self.text, position):
            position = match.end()
            apostrophe = self.text[match.start() - 1 : match.start()], self.text[position : position + 1]
            if match[0] == quote and not (match.start() > start + len(quote) and all(map(str.isalpha, apostrophe))):
                self.position = position
                return _ESCAPE.sub(_unescape, self.text[start + len(quote) : match.start()])
        raise Broken("a text is not closed: its last quote is missing", start)


def _number(digits: str, position: int) -> int | float:
    if not set(digits) & set(".eE"):
        value, _ = read_json(digits, 0)
        return int(value)
    if not math.isfinite(number := float(digits)):
        raise Broken(f"the number {digits[:20]} is too large", position)
    return number


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is None:
        return _ESCAPED.get(match[4], match[0])
    if int(code, 16) > 0x10FFFF:
        raise Broken(f"{match[0]} is no character", match.start())
    return chr(int(code, 16))


def _python_call(reader: _Reader) -> Call:
    head = reader.matched(_CALL, "NAME(KEY=VALUE, ...)")

    def key() -> str:
        return reader.matched(_ARGUMENT_KEY, "KEY=VALUE, since arguments need names,")[1]

    return made_call(head[1], reader.mapping(")", key, "=", 0))


_ARGUMENT_KEY = re.compile(r"\s*([^\W\d]\w*)\s*(?==)")


def _python_calls(text: str, position: int) -> tuple[Found, int]:
    reader = _Reader(text, position)
    reader.require("[")
    return list(reader.several("]", lambda: _python_call(reader))), reader.position


_ENDS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
_LIKE_CALLS = re.compile(r"\[\s*([^\W\d][\w.\-]*)\s*\(\s*([^\W\d]\w*\s*=|\)\s*[\],])?")


def pythonic(text: str, tools: Sequence[Tool]) -> Found:
    """`[f(a=1), g(b="x")]`: as the whole turn, between `<|python_start|>` and `<|python_end|>`, or between
    `<|tool_call_start|>` and `<|tool_call_end|>`"""

    def read(text: str, position: int) -> tuple[Found, int]:
        found, end = _python_calls(text, position)
        mark = next(mark for mark in _ENDS if text.endswith(mark, 0, position))
        return found, expect(text, end, _ENDS[mark])

    opens, closes = ("|".join(map(re.escape, marks)) for marks in (_ENDS, _ENDS.values()))
    if found := scan(text, opens, closes, read):
        return found
    names = names_of(tools)
    found = _whole_turn(text, names)
    if not found and (has_unopened_end(text) or text.lstrip().startswith(tuple(THOUGHTS))):
        found = _whole_turn(without_thoughts(text), names)
    return found


def _whole_turn(text: str, names: set[str]) -> Found:
    text = text.strip()
    like_calls = _LIKE_CALLS.match(text)
    if like_calls is None:
        return []
    try:
        found, end = _python_calls(text, 0)
    except Broken as broken:
        return [unreadable(text, broken.why)] if like_calls[2] or like_calls[1] in names else []
    return found if end == len(text) else []


class _GemmaReader(_Reader):
    """Reads Gemma's values: texts between `<|"|>`, without escapes, and keys that need no quotes."""

    def string(self) -> str | None:
        mark = '<|"|>'
        if not self.take(mark):
            return None
        end = self.text.find(mark, self.position)
        if end < 0:
            raise Broken(f"a text is not closed: its last {mark} is missing", self.position)
        found, self.position = self.text[self.position : end], end + len(mark)
        return found

    def key(self) -> str:
        found = self.string()
        return self.matched(_GEMMA_KEY, "a key")[1] if found is None else found


_GEMMA_KEY = re.compile(r"\s*([^\s:,{}\[\]<>](?:[^:,{}\[\]<>]*[^\s:,{}\[\]<>])?)")
_GEMMA_CALL = re.compile(r"\s*call:\s*([^\s{}<>]+)\s*\{")


def gemma4(text: str, tools: Sequence[Tool]) -> Found:
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:3}<tool_call|>`"""

    def read(text: str, position: int) -> tuple[Found, int]:
        reader = _GemmaReader(text, position)
        head = reader.matched(_GEMMA_CALL, "call:NAME{...}")
        call = made_call(head[1], reader.mapping("}", reader.key, ":", 0))
        return [call], expect(text, reader.position, "<tool_call|>")

    return scan(text, r"<\|tool_call>", r"<tool_call\|>", read)
