"""The form in which a chat template writes calls of tools."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megarlhf.data.text.templates import ChatTemplate, Conversation
from megarlhf.rollout.tools.call import Call
from megarlhf.rollout.tools.forms import FORMS, parse

_OPENED = re.compile(r"(?:</?[\w:]+>\s*)+$")
"""A beginning of an answer, such as `<think>`, at the end of a text that asks for one."""
_ASKED = {"role": "user", "content": "a"}
_VALUES: dict[str, Any] = {
    "text": 'It\'s "{done}": [1]\n</tool> naïve 你好',
    "whole": 3,
    "part": -2.5,
    "truth": True,
    "nothing": None,
    "list": [1, "b", False],
    "object": {"c": {"d": "e"}},
}
_TYPES = {"text": "string", "whole": "integer", "part": "number", "truth": "boolean", "nothing": "null",
          "list": "array", "object": "object"}  # fmt: skip
_CALLS = (Call("first_tool", _VALUES), Call("second_tool", {"text": "7"}))


def form_of(template: ChatTemplate) -> str | None:
    """The first form that reads two calls as the template writes them; None where none does.

    Templates that write one call in a turn (Llama's, gpt-oss's) are asked for one.
    """
    for calls in (_CALLS, _CALLS[:1]):
        text = written_calls(template, calls)
        for form in FORMS if text is not None else ():
            found = parse(form, text or "", descriptions())
            if [(call.name, call.arguments) for call in found if isinstance(call, Call)] == [
                (call.name, call.arguments) for call in calls
            ] and len(found) == len(calls):
                return form
    return None


def descriptions() -> list[dict[str, Any]]:
    """Descriptions of the tools that are called."""
    properties = {name: {"type": kind, "description": "-"} for name, kind in _TYPES.items()}
    parameters = {"type": "object", "properties": properties, "required": []}
    return [
        {"type": "function", "function": {"name": call.name, "description": "-", "parameters": parameters}}
        for call in _CALLS
    ]


def written_calls(template: ChatTemplate, calls: Sequence[Call], content: str = "") -> str | None:
    """The assistant's turn with calls as the template writes it, without the token that ends it. None for a template
    that refuses it."""
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": call.id or f"{number:09}",
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for number, call in enumerate(calls)
        ],
    }
    try:
        whole = template.text(Conversation([_ASKED, message], descriptions()))
        prompt = template.text(Conversation([_ASKED], descriptions()), reply=True)
        asked = template.text(Conversation([_ASKED], descriptions()))
    except ValueError:
        return None
    end = template.tokenizer.decode([template.end_of_calls], continuation=True, special=True)
    for before in (prompt, _OPENED.sub("", prompt), asked):
        if whole.startswith(before):
            turn = whole[len(before) :]
            return turn.rstrip().removesuffix(end) if turn.rstrip().endswith(end) else turn
    return whole
