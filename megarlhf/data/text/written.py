"""What a chat template leaves out of a conversation, or changes in it.

The conversation is rendered once more with every text of it (a message, a thought, an argument of a call) replaced by
another one of the same length: a run of one character that stands for this text alone. Both renderings have to be the
same up to those runs, and each run has to be there whole. So a text counts as written only if it decides what stands
in its place, which a search for it would not show where two texts are equal or one is "4".

White space around a text becomes other white space. Strings of the template's own in it, such as `</think>`, stay as
they are, for the template may look for them. So it takes the same way through both.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal["white_space", "thoughts", "messages", "tool_calls", "tools"]
KINDS: tuple[Kind, ...] = get_args(Kind)
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought", "thoughts", "think", "rationale", "cot")
"""Keys of a message by which others keep what was thought before its content."""

Message = Mapping[str, Any]
Tools = list[dict[str, Any]]
Render = Callable[[list[dict[str, Any]], Tools | None], str]
"""The text of messages and tools, as the template writes them."""
Places = dict[int, tuple[int, int]]
"""Of each message of which something is written: its first character in the rendered text, and the one behind its
last."""

_FIRST, _COUNT = 0x20000, 14_000
"""Letters of rare Chinese words: neither JSON nor Python escapes them, and no template looks for them."""
_SPACES, _WIDTH = [chr(code) for code in range(0x2000, 0x200B)], 4
"""White space of typesetters; so many of them stand for the white space at an end of a text."""
_RUN = re.compile(r"([\U00020000-\U000236AF])\1*|7[0-9]{15}|[\u2000-\u200A]{4}")
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
_PUNCTUATION = re.compile(r"[^\w\s]")


@dataclass(frozen=True)
class Omission:
    """Something of a conversation that is not written as it is given."""

    kind: Kind
    message: int | None
    """Number of the message, from 0; None for the descriptions of tools."""
    key: str
    """Of the message, or of a description."""
    text: str
    """What stands under the key; a part of it may be written."""


@dataclass(frozen=True)
class Written:
    """What a rendered text has of a conversation."""

    omissions: list[Omission]
    places: Places


@dataclass
class _Part:
    """A text that has to be written."""

    kind: Kind
    message: int | None
    key: str
    text: str
    replaced: Any = ""
    """What stands in its place in the second rendering."""
    runs: list[str] = field(default_factory=list)
    """Keys of the runs in it."""
    answer: str | None = None
    """The end of `replaced` behind a mark that ends thoughts; None where there is no such mark."""
    thinks: bool = False
    """Whether it is of the assistant, who may have thoughts in a content."""

    def omission(self, kind: Kind | None = None) -> Omission:
        """As one of its own kind, or of another."""
        return Omission(kind or self.kind, self.message, self.key, self.text)


@dataclass(frozen=True)
class _Run:
    """Stands for a text, a stretch of a text, the white space at one of its ends, or a value."""

    part: _Part
    value: Any
    """What the first rendering has in its place."""
    size: int
    """Characters of the run."""


def kept_strings(constants: Collection[str]) -> re.Pattern[str] | None:
    """Finds strings of a template that it may look for in a message; None where it has none. `constants`: all strings
    in its code."""
    marks = {text for text in constants if len(text.strip()) > 2 and _PUNCTUATION.search(text)}
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if marks else None


def compare(
    text: str,
    render: Render,
    messages: Sequence[Message],
    tools: Tools | None,
    kept: re.Pattern[str] | None,
) -> Written:
    """What `text`, as `render` has written the messages, has of them. `kept`: see `kept_strings`. Raises: what the
    template raises."""
    first: Written | ValueError
    try:
        first = _compared(text, render, messages, tools, _Replaced(kept))
        if not any(omission.kind in ("tool_calls", "tools") for omission in first.omissions):
            return first
    except ValueError as error:  # a template that looks up the name of a tool
        first = error
    bare = [{key: part for key, part in each.items() if key != "tool_calls"} for each in messages]
    with contextlib.suppress(ValueError):
        again = _compared(text, render, messages, tools, _Replaced(kept, literal=True))
        if not again.omissions and (bare == list(messages) or render(bare, tools) != text):
            return again
    if isinstance(first, ValueError):
        raise first
    return first


def _compared(
    text: str, render: Render, messages: Sequence[Message], tools: Tools | None, replaced: _Replaced
) -> Written:
    second = render([replaced.message(n, each) for n, each in enumerate(messages)], replaced.tools(tools))
    aligned, _ = _aligned(text, second, replaced.runs)
    if aligned is None:
        return _compare_without_white_space(text, second, replaced)
    incomplete = [part for part in replaced.parts if not _is_whole(part, second, aligned)]
    squeezed = _squeezed(second) if incomplete else ""
    return Written([_omission(part, squeezed) for part in incomplete], _places(aligned, replaced.runs))


def _compare_without_white_space(text: str, second: str, replaced: _Replaced) -> Written:
    """Of renderings that differ elsewhere than in the runs."""
    squeezed = _squeezed(second)
    aligned, wrong = _aligned(_squeezed(text), squeezed, replaced.runs, spell=_squeezed_spellings)
    if aligned is None:
        part = replaced.runs[wrong].part if wrong else replaced.parts[0]
        return Written([part.omission()], {})
    numbers = [number for number, character in enumerate(text) if not character.isspace()]
    moved = {key: [(numbers[first], numbers[end - 1] + 1) for first, end in found] for key, found in aligned.items()}
    incomplete = [part for part in replaced.parts if not _is_whole(part, second, aligned)]
    omissions = [_omission(part, squeezed) for part in incomplete]
    if not omissions:  # white space within a text
        wrong = _aligned(text, second, replaced.runs)[1]
        omissions = [(replaced.runs[wrong].part if wrong else replaced.parts[0]).omission("white_space")]
    return Written(omissions, _places(moved, replaced.runs))


class _Replaced:
    """A conversation with other texts in place of its own."""

    def __init__(self, kept: re.Pattern[str] | None, *, literal: bool = False) -> None:
        """literal: names of tools and values that are no texts stay as they are, and are searched for"""
        self.parts: list[_Part] = []
        self.runs: dict[str, _Run] = {}
        """By their character, or as a number."""
        self._kept, self._literal = kept, literal

    def message(self, number: int, message: Message) -> dict[str, Any]:
        """The message with runs in place of its texts."""
        replaced = dict(message)
        for key in ("content", *THOUGHTS):
            if isinstance(value := message.get(key), str) and value:
                kind: Kind = "messages" if key == "content" else "thoughts"
                part = _Part(kind, number, key, value, thinks=message.get("role") == "assistant")
                replaced[key] = self._text(part)
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
                replaced[key] = self._name(_Part("tools", None, key, part))
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
        return {key: self._name(_Part(kind, number, "arguments", key)) for key in sorted(value) if key}

    def _name(self, part: _Part) -> str:
        if self._literal and part.key != "description":
            return self._searched(part, part.text)
        return self._whole(part)

    def _searched(self, part: _Part, value: Any) -> Any:
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
            function["name"] = self._name(_Part("tool_calls", number, "name", name))
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
        part = _Part("tools" if number is None else "tool_calls", number, "arguments", str(value))
        if isinstance(value, str):
            return self._whole(part) if value else value
        if self._literal:
            return self._searched(part, value)
        other = 7 * 10**15 + 7919 * len(self.runs)
        part.replaced = self._add(part, str(other), value, len(str(other)))
        return other

    def _add(self, part: _Part, key: str, value: Any, size: int) -> str:
        if len(self.runs) >= _COUNT:
            raise ValueError(f"the conversation has more than {_COUNT} texts; leave it out, or cut it")
        if not part.runs:
            self.parts.append(part)
        part.runs.append(key)
        self.runs[key] = _Run(part, value, size)
        return key

    def _run(self, part: _Part, text: str) -> str:
        return self._add(part, chr(_FIRST + len(self.runs)), text, len(text)) * len(text)

    def _whole(self, part: _Part) -> str:
        part.replaced = self._run(part, part.text)
        return part.replaced

    def _text(self, part: _Part) -> str:
        """All but white space around it, and what the template may look for."""
        text = part.text.strip()
        if text == part.text and (self._kept is None or self._kept.search(text) is None):
            return self._whole(part)
        start = part.text.index(text) if text else 0
        replaced, answer = self._edge(part, part.text[:start]), None
        for place, stretch in enumerate(self._kept.split(text) if self._kept is not None else [text]):
            core = stretch.strip()
            if place % 2 or not core:
                replaced += stretch
                if _THOUGHT.search(stretch):
                    answer = len(replaced)
            else:
                before = stretch.index(core)
                replaced += stretch[:before] + self._run(part, core) + stretch[before + len(core) :]
        if not replaced or not part.runs:  # white space alone, or a string of the template's alone
            return self._whole(part)
        replaced += self._edge(part, part.text[start + len(text) :])
        part.replaced, part.answer = replaced, None if answer is None else replaced[answer:]
        return replaced

    def _edge(self, part: _Part, space: str) -> str:
        """White space at an end of a text, as other white space."""
        number, key = len(self.runs), ""
        for _ in range(_WIDTH):
            number, place = divmod(number, len(_SPACES))
            key += _SPACES[place]
        return self._add(part, key, space, _WIDTH) if space else ""


_Aligned = dict[str, list[tuple[int, int]]]
"""Where the first rendering has what each run stands for."""


def _aligned(
    text: str, second: str, runs: Mapping[str, _Run], spell: Callable[[Any], Iterator[str]] | None = None
) -> tuple[_Aligned | None, str]:
    """None where the renderings differ elsewhere than in whole runs, with the key of the run before that place, or
    where it is the first, of that one."""
    places, spell = _Aligned(), spell or _spellings
    found = [(key, match) for match in _RUN.finditer(second) if (key := match.group(1) or match.group()) in runs]
    if not found:
        return ({} if text == second else None), ""
    last, start = found[0][0], found[0][1].start()
    if not text.startswith(second[:start]):
        return None, last
    ends = [*(match.start() for _, match in found[1:]), len(second)]
    for (key, match), end in zip(found, ends, strict=True):
        run, last = runs[key], key
        times, rest = divmod(len(match.group()), run.size)
        for number in range(times):
            behind = second[match.end() : end] if number + 1 == times else ""
            spelled = next((each for each in spell(run.value) if text.startswith(each + behind, start)), None)
            if spelled is None:
                return None, last
            places.setdefault(key, []).append((start, start + len(spelled)))
            start += len(spelled) + len(behind)
        if rest:
            return None, last
    return (places if start == len(text) else None), last


def _spellings(value: Any) -> Iterator[str]:
    """How a template may write a value: as it is, as JSON, as Python writes it, as JSON within JSON."""
    if not isinstance(value, str):
        yield from (json.dumps(value), str(value))
        return
    yield value
    if value.isascii() and value.isprintable() and not any(mark in value for mark in "\"'\\"):
        return
    quoted = json.dumps(value, ensure_ascii=False)[1:-1]
    yield from (quoted, json.dumps(value)[1:-1], repr(value)[1:-1], json.dumps(quoted, ensure_ascii=False)[1:-1])


def _squeezed_spellings(value: Any) -> Iterator[str]:
    return map(_squeezed, _spellings(value))


def _is_whole(part: _Part, second: str, aligned: _Aligned) -> bool:
    if any(run not in aligned for run in part.runs):
        return False
    is_one_run = len(part.runs) == 1 and part.replaced.strip(part.runs[0]) == ""
    return is_one_run or any(spelled in second for spelled in _spellings(part.replaced))


def _omission(part: _Part, squeezed: str) -> Omission:
    """Of a part that is not whole; `squeezed`: the second rendering without white space."""
    if any(_squeezed(spelled) in squeezed for spelled in _spellings(part.replaced)):
        return part.omission("white_space")
    if part.kind == "messages" and part.answer is not None and part.thinks and _squeezed(part.answer) in squeezed:
        return part.omission("thoughts")
    return part.omission()


def _squeezed(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


def _places(aligned: _Aligned, runs: Mapping[str, _Run]) -> Places:
    places: Places = {}
    for key, found in aligned.items():
        if (number := runs[key].part.message) is not None:
            first, end = places.get(number, found[0])
            places[number] = (min(first, found[0][0]), max(end, found[-1][1]))
    return places


class NotWritten(ValueError):
    """The template leaves something out, and nobody has allowed it."""


_WHAT: Mapping[Kind, str] = {
    "white_space": "white space",
    "thoughts": "a thought",
    "messages": "a message, or a part of one",
    "tool_calls": "a call of a tool, or a part of one",
    "tools": "a description of a tool, or a part of one",
}


def require_written(
    written: Written, roles: Sequence[str], may_drop: Collection[Kind], learnt: Collection[int] = ()
) -> tuple[str, ...]:
    """What was left out, in words for a count; nothing where all is written.

    learnt: numbers of the messages that are learnt, of which no more than white space may be missing

    Raises: NotWritten for what may not be left out.
    """
    for omission in written.omissions:
        is_learnt = omission.message in learnt and omission.kind != "white_space"
        if omission.kind not in may_drop or is_learnt:
            kinds = {each.kind for each in written.omissions}
            raise NotWritten(_refusal(omission, roles, None if is_learnt else sorted({*may_drop, *kinds})))
    left_out = sorted({omission.kind for omission in written.omissions})
    return tuple(f"without {_WHAT[kind]} that the chat template leaves out or changes" for kind in left_out)


def _refusal(omission: Omission, roles: Sequence[str], would_do: Sequence[Kind] | None) -> str:
    """would_do: `template_may_drop` with which the record is used; None for an answer that is learnt."""
    where = "tools" if omission.message is None else f"message {omission.message + 1} ({roles[omission.message]!r})"
    shown = repr(omission.text if len(omission.text) <= 80 else omission.text[:77] + "...")
    what = "leaves out or changes white space of" if omission.kind == "white_space" else "does not write all of"
    changed = f"{where}: the chat template {what} its {omission.key} {shown}"
    if would_do is None:
        return (
            f"{changed}, so that the answer would not be learnt as it is given. Give a template that writes it "
            "(data.chat_template), or change the data, or leave such records out (data.inexact: skip)"
        )
    return (
        f"{changed}. Give a template that writes it (data.chat_template), or change the data; or leave it out, "
        f"counted: data.template_may_drop: [{', '.join(would_do)}]; or leave such records out: data.inexact: skip"
    )
