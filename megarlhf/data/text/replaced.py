"""A conversation whose texts are replaced by runs of one character, each of which stands for one text."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarlhf.data.text.omissions import Kind, Omission

THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought", "thoughts", "think", "rationale", "cot")
"""Keys of a message for the thought before its content, in different formats."""

Message = Mapping[str, Any]
Tools = list[dict[str, Any]]

_FIRST, _COUNT = 0x20000, 14_000
"""Range of rare Chinese characters. JSON and Python do not escape them, and no template looks for them."""
_SPACES, _WIDTH = [chr(code) for code in range(0x2000, 0x200B)], 4
"""Typographic spaces. Four of them stand for the white space at an end of a text."""
RUN = re.compile(r"([\U00020000-\U000236AF])\1*|7[0-9]{15}|[\u2000-\u200A]{4}")
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
_PUNCTUATION = re.compile(r"[^\w\s]")
_COMMAND = re.compile(r"/\w+")
"""A command to the template in a system message: `/no_think`."""
_INSTRUCTING = ("system", "developer")
_QUOTES = re.compile("""(['"]+)""")


@dataclass
class RequiredText:
    """A text of the conversation that the template has to write."""

    kind: Kind
    message: int | None
    key: str
    text: str
    replaced: Any = ""
    """Replacement of `text` in the second rendering."""
    runs: list[str] = field(default_factory=list)
    """Keys of the runs in `replaced`."""
    answer_from: int | None = None
    """Position in `replaced` after a mark that ends thoughts. None without such a mark."""
    role: str = ""
    """Role of the message, for a content or a thought."""
    commands: frozenset[str] = frozenset()
    """Strings in a system message that may be commands to the template."""

    def without_commands(self, text: str) -> str:
        """Remove the commands from `text` or `replaced`."""
        return functools.reduce(lambda left, command: left.replace(command, ""), self.commands, text)

    def omission(self, kind: Kind | None = None) -> Omission:
        """The omission of this text, of its own or another kind."""
        return Omission(kind or self.kind, self.message, self.key, self.text)


@dataclass(frozen=True)
class CharacterRun:
    """A run that replaces a text, a part of it, white space at its end, or a value.

    Example: "What is 4?" becomes ten times one rare character. A template that writes the text must write all ten.
    """

    part: RequiredText
    value: Any
    """Replaced text or value, as in the first rendering."""
    size: int
    """Number of characters of the run."""


def kept_strings(constants: Collection[str]) -> re.Pattern[str] | None:
    """A pattern for strings that a template may look for in a message. None where it has none. `constants`: all strings
    in the template's code."""
    marks = {text for text in constants if len(text.strip()) > 2 and _PUNCTUATION.search(text)}
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if marks else None


class Replaced:
    """Replaces the texts of a conversation by runs, and keeps a list of both."""

    def __init__(self, kept: re.Pattern[str] | None, *, literal: bool = False) -> None:
        """kept: finds strings that stay (`kept_strings`)
        literal: names of tools, and values other than texts, stay as they are and are searched for"""
        self.parts: list[RequiredText] = []
        self.runs: dict[str, CharacterRun] = {}
        """Runs by their character, or by the number that replaces a value."""
        self._kept, self._literal = kept, literal

    def message(self, index: int, message: Message) -> dict[str, Any]:
        """The message with its texts replaced."""
        replaced = dict(message)
        for key in ("content", *THOUGHTS):
            if isinstance(value := message.get(key), str) and value:
                kind: Kind = "messages" if key == "content" else "thoughts"
                replaced[key] = self._text(RequiredText(kind, index, key, value, role=message.get("role", "")))
        if message.get("tool_calls"):
            replaced["tool_calls"] = [self._call(call, index) for call in message["tool_calls"]]
        return replaced

    def tools(self, tools: Tools | None) -> Tools | None:
        """Descriptions of tools with names, descriptions and names of parameters replaced. In a description without any
        of these, all texts are replaced."""
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
                replaced[key] = {names[name]: self._described(schema) for name, schema in part.items()}
            elif key == "required" and isinstance(part, list):
                replaced[key] = [names.get(schema, schema) for schema in part]
            else:
                replaced[key] = self._described(part)
        return replaced

    def _keys(self, value: Mapping[str, Any], message: int | None) -> dict[str, str]:
        """Runs for keys. They sort as the keys do."""
        kind: Kind = "tools" if message is None else "tool_calls"
        return {key: self._name(RequiredText(kind, message, "arguments", key)) for key in sorted(value) if key}

    def _name(self, part: RequiredText) -> str:
        if self._literal and part.key != "description":
            return self._searched(part, part.text)
        return self._whole(part)

    def _searched(self, part: RequiredText, value: Any) -> Any:
        part.replaced = value
        self.parts.append(part)
        return value

    def _call(self, call: Any, message: int) -> Any:
        if not isinstance(call, Mapping):
            return call
        replaced = dict(call)
        function = replaced["function"] = dict(call["function"]) if isinstance(call.get("function"), Mapping) else None
        if function is None:
            function = replaced
            del replaced["function"]
        if isinstance(name := function.get("name"), str) and name:
            function["name"] = self._name(RequiredText("tool_calls", message, "name", name))
            if isinstance(call.get("id"), str):  # Kimi's has the name in it
                replaced["id"] = call["id"].replace(name, function["name"])
        if "arguments" in function:
            function["arguments"] = self._argument(function["arguments"], message)
        return replaced

    def _argument(self, value: Any, message: int | None) -> Any:
        if isinstance(value, Mapping):
            names = self._keys(value, message)
            return {names.get(key, key): self._argument(part, message) for key, part in value.items()}
        if isinstance(value, list):
            return [self._argument(part, message) for part in value]
        part = RequiredText("tools" if message is None else "tool_calls", message, "arguments", str(value))
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
        """Replace a text by a run. Quotes in a name or an argument stay: Python chooses by them the quotes around."""
        pieces = _QUOTES.split(part.text) if part.kind in ("tool_calls", "tools") else [part.text]
        replaced = "".join(
            piece if position % 2 else self._run(part, piece) for position, piece in enumerate(pieces) if piece
        )
        part.replaced = replaced if part.runs else self._run(part, part.text)
        return str(part.replaced)

    def _text(self, part: RequiredText) -> str:
        """Replace a text by runs, except white space around it and strings that the template may look for."""
        text = part.text.strip()
        if text == part.text and (self._kept is None or self._kept.search(text) is None):
            return self._whole(part)
        start = part.text.index(text) if text else 0
        pieces, commands = [self._edge(part, part.text[:start])], set[str]()
        for position, stretch in enumerate(self._kept.split(text) if self._kept is not None else [text]):
            core = stretch.strip()
            if position % 2 or not core:
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
        """Replace white space at an end of a text by typographic spaces."""
        rest, key = len(self.runs), ""
        for _ in range(_WIDTH):
            rest, digit = divmod(rest, len(_SPACES))
            key += _SPACES[digit]
        return self._add(part, key, space, _WIDTH) if space else ""
