"""A conversation with other texts in place of its own: runs of one character, each for one text alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarlhf.data.text.omissions import Kind, Omission

THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought", "thoughts", "think", "rationale", "cot")
"""Keys of a message by which others keep what was thought before its content."""

Message = Mapping[str, Any]
Tools = list[dict[str, Any]]

_FIRST, _COUNT = 0x20000, 14_000
"""Letters of rare Chinese words: neither JSON nor Python escapes them, and no template looks for them."""
_SPACES, _WIDTH = [chr(code) for code in range(0x2000, 0x200B)], 4
"""White space of typesetters; so many of them stand for the white space at an end of a text."""
RUN = re.compile(r"([\U00020000-\U000236AF])\1*|7[0-9]{15}|[\u2000-\u200A]{4}")
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
_PUNCTUATION = re.compile(r"[^\w\s]")
_COMMAND = re.compile(r"/\w+")
"""A string of a template by which a system message commands it: `/no_think`."""
_INSTRUCTING = ("system", "developer")
_QUOTES = re.compile("""(['"]+)""")


@dataclass
class RequiredText:
    """A text that has to be written."""

    kind: Kind
    message: int | None
    key: str
    text: str
    replaced: Any = ""
    """Text in place of `text` in the second rendering."""
    runs: list[str] = field(default_factory=list)
    """Keys of the runs in it."""
    answer_from: int | None = None
    """Where in `replaced` stands what follows a mark that ends thoughts; None where there is no such mark."""
    role: str = ""
    """Role of the message, where the part is a content or a thought."""
    commands: frozenset[str] = frozenset()
    """Strings in a system message by which the template may be commanded."""

    def without_commands(self, text: str) -> str:
        """`text`, or `replaced`, without them."""
        return functools.reduce(lambda left, command: left.replace(command, ""), self.commands, text)

    def omission(self, kind: Kind | None = None) -> Omission:
        """Make an omission of its own kind, or of another."""
        return Omission(kind or self.kind, self.message, self.key, self.text)


@dataclass(frozen=True)
class CharacterRun:
    """Stands for a text, a stretch of a text, the white space at one of its ends, or a value."""

    part: RequiredText
    value: Any
    """Text or value in place of the run in the first rendering."""
    size: int
    """Characters of the run."""


def kept_strings(constants: Collection[str]) -> re.Pattern[str] | None:
    """Finds strings of a template that it may look for in a message; None where it has none. `constants`: all strings
    in its code."""
    marks = {text for text in constants if len(text.strip()) > 2 and _PUNCTUATION.search(text)}
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if marks else None


class Replaced:
    """A conversation with other texts in place of its own."""

    def __init__(self, kept: re.Pattern[str] | None, *, literal: bool = False) -> None:
        """literal: names of tools and values that are no texts stay as they are, and are searched for"""
        self.parts: list[RequiredText] = []
        self.runs: dict[str, CharacterRun] = {}
        """By their character, or as a number."""
        self._kept, self._literal = kept, literal

    def message(self, number: int, message: Message) -> dict[str, Any]:
        """The message with runs in place of its texts."""
        replaced = dict(message)
        for key in ("content", *THOUGHTS):
            if isinstance(value := message.get(key), str) and value:
                kind: Kind = "messages" if key == "content" else "thoughts"
                replaced[key] = self._text(RequiredText(kind, number, key, value, role=message.get("role", "")))
        if message.get("tool_calls"):
            replaced["tool_calls"] = [self._call(call, number) for call in message["tool_calls"]]
        return replaced

    def tools(self, tools: Tools | None) -> Tools | None:
        """Descriptions of tools with runs in place of names, of descriptions and of names of parameters; of one without
        any, in place of all texts."""
        if tools is None:
            return None
        replaced = []
        for tool in tools:
            before = len(self.parts)
            described = self._described(tool)
            replaced.append(described if len(self.parts) > before else self._argument(tool, None))
        return replaced

    def _described(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._described(part) for part in value]
        if not isinstance(value, Mapping):
            return value
        parameters = value.get("properties")
        names = self._keys(parameters, None) if isinstance(parameters, Mapping) else {}
        replaced: dict[str, Any] = {}
        for key, part in value.items():
            if key in ("name", "description") and isinstance(part, str) and part:
                replaced[key] = self._name(RequiredText("tools", None, key, part))
            elif key == "properties" and names:
                replaced[key] = {names[name]: self._described(each) for name, each in part.items()}
            elif key == "required" and isinstance(part, list):
                replaced[key] = [names.get(each, each) for each in part]
            else:
                replaced[key] = self._described(part)
        return replaced

    def _keys(self, value: Mapping[str, Any], number: int | None) -> dict[str, str]:
        """Runs in place of keys, which sort as these do."""
        kind: Kind = "tools" if number is None else "tool_calls"
        return {key: self._name(RequiredText(kind, number, "arguments", key)) for key in sorted(value) if key}

    def _name(self, part: RequiredText) -> str:
        if self._literal and part.key != "description":
            return self._searched(part, part.text)
        return self._whole(part)

    def _searched(self, part: RequiredText, value: Any) -> Any:
        part.replaced = value
        self.parts.append(part)
        return value

    def _call(self, call: Any, number: int) -> Any:
        if not isinstance(call, Mapping):
            return call
        replaced = dict(call)
        function = replaced["function"] = dict(call["function"]) if isinstance(call.get("function"), Mapping) else None
        if function is None:
            function = replaced
            del replaced["function"]
        if isinstance(name := function.get("name"), str) and name:
            function["name"] = self._name(RequiredText("tool_calls", number, "name", name))
            if isinstance(call.get("id"), str):  # Kimi's has the name in it
                replaced["id"] = call["id"].replace(name, function["name"])
        if "arguments" in function:
            function["arguments"] = self._argument(function["arguments"], number)
        return replaced

    def _argument(self, value: Any, number: int | None) -> Any:
        if isinstance(value, Mapping):
            names = self._keys(value, number)
            return {names.get(key, key): self._argument(part, number) for key, part in value.items()}
        if isinstance(value, list):
            return [self._argument(part, number) for part in value]
        part = RequiredText("tools" if number is None else "tool_calls", number, "arguments", str(value))
        if isinstance(value, str):
            return self._whole(part) if value else value
        if self._literal:
            return self._searched(part, value)
        other = 7 * 10**15 + 7919 * len(self.runs)
        part.replaced = self._add(part, str(other), value, len(str(other)))
        return other

    def _add(self, part: RequiredText, key: str, value: Any, size: int) -> str:
        if len(self.runs) >= _COUNT:
            raise ValueError(f"the conversation has more than {_COUNT} texts; leave it out, or cut it")
        if not part.runs:
            self.parts.append(part)
        part.runs.append(key)
        self.runs[key] = CharacterRun(part, value, size)
        return key

    def _run(self, part: RequiredText, text: str) -> str:
        return self._add(part, chr(_FIRST + len(self.runs)), text, len(text)) * len(text)

    def _whole(self, part: RequiredText) -> str:
        """A run. Quotes in a name or an argument stay, as Python chooses by them what it writes around a text."""
        pieces = _QUOTES.split(part.text) if part.kind in ("tool_calls", "tools") else [part.text]
        replaced = "".join(
            piece if place % 2 else self._run(part, piece) for place, piece in enumerate(pieces) if piece
        )
        part.replaced = replaced if part.runs else self._run(part, part.text)
        return str(part.replaced)

    def _text(self, part: RequiredText) -> str:
        """Runs for a text, but not for white space around it and for strings that the template may look for."""
        text = part.text.strip()
        if text == part.text and (self._kept is None or self._kept.search(text) is None):
            return self._whole(part)
        start = part.text.index(text) if text else 0
        pieces, commands = [self._edge(part, part.text[:start])], set[str]()
        for place, stretch in enumerate(self._kept.split(text) if self._kept is not None else [text]):
            core = stretch.strip()
            if place % 2 or not core:
                if part.role in _INSTRUCTING and _COMMAND.fullmatch(stretch):
                    commands.add(stretch)
                pieces.append(stretch)
                if _THOUGHT.search(stretch):
                    part.answer_from = len("".join(pieces))
            else:
                before = stretch.index(core)
                pieces += [stretch[:before], self._run(part, core), stretch[before + len(core) :]]
        part.commands = frozenset(commands)
        if commands and not part.runs:
            return str(self._searched(part, part.text))
        if not part.runs:  # white space alone, or a string of the template's alone
            return self._whole(part)
        part.replaced = "".join(pieces) + self._edge(part, part.text[start + len(text) :])
        return str(part.replaced)

    def _edge(self, part: RequiredText, space: str) -> str:
        """White space at an end of a text, as other white space."""
        number, key = len(self.runs), ""
        for _ in range(_WIDTH):
            number, place = divmod(number, len(_SPACES))
            key += _SPACES[place]
        return self._add(part, key, space, _WIDTH) if space else ""
