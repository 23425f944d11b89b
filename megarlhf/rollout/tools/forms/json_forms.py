"""Forms that write the arguments of a call as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megarlhf.rollout.tools.call import Call
from megarlhf.rollout.tools.forms.scan import (
    THOUGHTS,
    Broken,
    Found,
    Tool,
    call_of,
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


def hermes(text: str, tools: Sequence[Tool]) -> Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""

    def read(text: str, position: int) -> tuple[Found, int]:
        value, end = read_json(text, position)
        return [call_of(value, text[position:end])], expect(text, end, "</tool_call>")

    return scan(text, "<tool_call>", "</tool_call>", read)


def _listed(text: str, position: int) -> tuple[Found, int]:
    """Calls of a JSON list. A single object counts as a list of one."""
    value, end = read_json(text, position)
    values = value if isinstance(value, list) else [value]
    return [call_of(part, text[position:end]) for part in values], end


def granite(text: str, tools: Sequence[Tool]) -> Found:
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]` of Granite 3.0, and `<tool_call>[...]` of 3.1"""
    return scan(text, r"<\|tool_call\|>|<tool_call>", "(?!)", _listed)


def phi4(text: str, tools: Sequence[Tool]) -> Found:
    """`<|tool_call|>[...]<|/tool_call|>` and `functools[...]` of Phi-4-mini"""

    def read(text: str, position: int) -> tuple[Found, int]:
        found, end = _listed(text, position)
        tagged = text.endswith("<|tool_call|>", 0, position)
        return found, expect(text, end, "<|/tool_call|>") if tagged else end

    return scan(text, r"<\|tool_call\|>|functools(?=\[)", r"<\|/tool_call\|>", read)


_MISTRAL = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{|(?<=\[ARGS\]))")


def mistral(text: str, tools: Sequence[Tool]) -> Found:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]` and `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}`"""

    def read(text: str, position: int) -> tuple[Found, int]:
        start = skip_space(text, position)
        if text.startswith(("{", "["), start) and not text.startswith(("[ARGS]", "[CALL_ID]"), start):
            return _listed(text, start)
        if not (match := _MISTRAL.match(text, position)):
            raise Broken(f"expected [TOOL_CALLS]NAME[ARGS]{{...}}, got it broken {near(text, position)}", position)
        value, end = read_json(text, match.end())
        return [made_call(match[1], value, match[2])], end

    return scan(text, r"\[TOOL_CALLS\]", "(?!)", read)


_DEEPSEEK = re.compile(r"\s*([^\s<>{}`]+)\s*<｜tool▁sep｜>\s*(?:([^\s<>{}`]+)\s*```(?:json)?(?=\s))?")


def deepseek_v3(text: str, tools: Sequence[Tool]) -> Found:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, JSON, `<｜tool▁call▁end｜>`; V3.1 writes no type"""

    def read(text: str, position: int) -> tuple[Found, int]:
        if not (match := _DEEPSEEK.match(text, position)):
            raise Broken(
                "the head of the call is broken: expected <｜tool▁call▁begin｜>, a name, <｜tool▁sep｜>", position
            )
        value, end = read_json(text, match.end())
        if match[2] is not None:
            end = expect(text, end, "```")
        call = made_call(match[2] or match[1], value)
        return [call], expect(text, end, "<｜tool▁call▁end｜>")

    begin = "<｜tool▁call▁begin｜>"
    return scan(text, rf"{begin}|<｜tool▁calls▁begin｜>(?!\s*{begin})", "<｜tool▁call▁end｜>", read)


_KIMI = re.compile(r"\s*((?:functions\.)?([^\s<>{}:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")


def kimi_k2(text: str, tools: Sequence[Tool]) -> Found:
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`; the head is the id"""

    def read(text: str, position: int) -> tuple[Found, int]:
        if not (match := _KIMI.match(text, position)):
            raise Broken("the head of the call is broken: expected functions.NAME:NUMBER<|tool_call_argument_begin|>")
        value, end = read_json(text, match.end())
        return [made_call(match[2], value, match[1])], expect(text, end, "<|tool_call_end|>")

    begin = r"<\|tool_call_begin\|>"
    return scan(text, rf"{begin}|<\|tool_calls_section_begin\|>(?!\s*{begin})", r"<\|tool_call_end\|>", read)


_LIKE_A_CALL = re.compile(r"""\{\s*["'](?:name|type|function)["'][^{}]*["'](?:parameters|arguments)["']\s*:""")
_NAMED = re.compile(r"""\{\s*(?:["']type["']\s*:\s*["']function["']\s*,\s*)?["']name["']\s*:\s*["']([^"']+)["']""")
_BETWEEN = re.compile(r"\s*;?\s*")


def llama3_json(text: str, tools: Sequence[Tool]) -> Found:
    """`{"name": ..., "parameters": {...}}` as the whole turn or behind `<|python_tag|>`; `;` separates several"""

    def read(text: str, position: int) -> tuple[Found, int]:
        value, end = read_json(text, position)
        found: Found = [call_of(value, text[position:end])]
        while (match := _BETWEEN.match(text, end)) and text.startswith("{", match.end()):
            value, end = read_json(text, match.end())
            found.append(call_of(value, text[match.end() : end]))
        return found, end

    names = names_of(tools)
    found = _whole_turn(text, names)
    if found and all(isinstance(call, Call) for call in found):  # first, since an argument may hold any mark
        return found
    if marked := scan(text, r"<\|python_tag\|>", "(?!)", read):
        return marked
    has_thoughts = has_unopened_end(text) or text.lstrip().startswith(tuple(THOUGHTS))
    return _whole_turn(without_thoughts(text), names) if has_thoughts else found


def _whole_turn(text: str, names: set[str]) -> Found:
    """Calls that the text consists of; a call that is begun and broken ends them."""
    found: Found = []
    position = skip_space(text, 0)
    while True:
        try:
            value, end = read_json(text, position)
        except Broken as broken:
            named = _NAMED.match(text, position)
            is_like_a_call = _LIKE_A_CALL.match(text, position) or (named and named[1] in names)
            return [*found, unreadable(text[position:], broken.why)] if is_like_a_call else []
        if not _is_a_call(value):
            return []
        found.append(call_of(value, text[position:end]))
        match = _BETWEEN.match(text, end)
        position = match.end() if match else end
        if position == len(text):
            return found


def _is_a_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)


_HEADER_ENDS = re.compile(r"<\|message\|>|<\|start\|>|<\|end\|>|<\|call\|>|<\|return\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")


def gptoss(text: str, tools: Sequence[Tool]) -> Found:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, or `to=` before the channel.
    Messages of `analysis` that are addressed to nothing are thoughts. `<|call|>` ends the turn and may be left out."""
    found: Found = []
    position = 0
    while position < len(text):
        end = _HEADER_ENDS.search(text, position)
        header = text[position : end.start() if end else len(text)]
        has_message = end is not None and end[0] == "<|message|>"
        start, position = position, end.end() if end else len(text)
        if recipient := _RECIPIENT.search(header):
            try:
                if not has_message:
                    raise Broken("<|message|> is missing behind the name of the call")
                call, position = _harmony_call(text, position, recipient[1])
                found.append(call)
                continue
            except Broken as broken:
                position = max(position, broken.position)
                found.append(unreadable(text[start : _next_message(text, position)], broken.why))
        if has_message:
            position = _next_message(text, position)
    return found


def _next_message(text: str, position: int) -> int:
    start = text.find("<|start|>", position)
    return len(text) if start < 0 else start + len("<|start|>")


def _harmony_call(text: str, position: int, recipient: str) -> tuple[Any, int]:
    value, end = read_json(text, position)
    end = skip_space(text, end)
    if end < len(text):
        mark = "<|end|>" if text.startswith("<|end|>", end) else "<|call|>"
        end = expect(text, end, mark)
    return made_call(recipient.removeprefix("functions."), value), end
