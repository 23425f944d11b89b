"""Messages become `{role, content}`, from the forms in which they are published. No template or tokenizer yet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from megarlhf.data.json_rows import object_of
from megarlhf.data.records.record_fields import describe_value, present
from megarlhf.data.text.replaced import THOUGHTS

_SHAREGPT = {
    "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Usual roles by ShareGPT's names."""
_CALL = "function_call"
"""ShareGPT's role of an assistant that calls a tool. The message's value is JSON."""


def messages_of(value: Any, column: str) -> list[dict[str, Any]]:
    """The messages of a list. Raises: ValueError that names the column and the message."""
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"field {column!r} is {describe_value(value)}, expected a list of messages, with one at least: "
            "{role, content}, or {from, value}; convert the data"
        )
    return [_message(message, f"field {column!r}, message {number}") for number, message in enumerate(value, 1)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {describe_value(value)}, expected an object {{role, content}}; convert the data")
    if present(value, "from") and not present(value, "role"):
        value = _from_sharegpt(value, where)
    role = value.get("role")
    if not isinstance(role, str) or not role.strip():
        raise ValueError(
            f"{where} has the role {role!r}, expected a name such as 'user' or 'assistant'; it has the keys "
            f"{', '.join(map(repr, value))}"
        )
    message = {key: part for key, part in value.items() if part is not None}
    if foreign := [key for key in _FOREIGN if message.get(key) not in ([], {}, "", None)]:
        raise ValueError(
            f"{where} ({role!r}) has {foreign[0]!r}: {_FOREIGN[foreign[0]]}; leave the key out, or the record"
        )
    for key in (name for name in THOUGHTS if message.get(name)):
        message[key] = _thought(message[key], f"{where} ({role!r}), {key}")
    if isinstance(message.get("content"), list):
        parts = _of_parts(message.pop("content"), f"{where} ({role!r})")
        if "thinking" in parts and any(message.get(key) for key in THOUGHTS):
            raise ValueError(f"{where} ({role!r}) has a thought in its content and another beside it; leave one out")
        message |= parts
    if legacy := message.pop("function_call", None):
        if message.get("tool_calls"):
            raise ValueError(f"{where} ({role!r}) has both function_call and tool_calls; leave one of them out")
        message["tool_calls"] = [{"type": "function", "function": _parsed(legacy, where)}]
    if calls := _parsed(message.get("tool_calls"), where):
        message["tool_calls"] = [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
        message.setdefault("content", "")
    else:
        message.pop("tool_calls", None)
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError(f"{where} ({role!r}): content is {describe_value(content)}, expected a text; convert the data")
    return _marked(message, where)


_FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(
        ("loss_mask", "loss_weight", "loss_scale", "loss_weights", "train_detail", "training_detail", "mask", "masked"),
        "a part of a message cannot be left out of what is learnt; a whole answer can: weight: 0",
    ),
    **dict.fromkeys(
        ("image", "images", "image_url", "audio", "audios", "video", "videos"), "models of text alone are trained"
    ),
    **dict.fromkeys(("prefix", "partial"), "an answer that goes on where this one ends is not known"),
    **dict.fromkeys(("functions", "documents"), "they are of the record: columns tools and chat_template_kwargs"),
}
"""Refused keys of a message, with the reason. They change its meaning in other programs, and are not read here."""

_PARTS = {
    "text": ("content", "text"),
    "input_text": ("content", "text"),
    "output_text": ("content", "text"),
    "thinking": ("thinking", "thinking"),
    "reasoning": ("thinking", "text"),
}
"""Content parts by type: the message's key that the part belongs to, and the part's key for its text."""


def _of_parts(parts: list[Any], where: str) -> dict[str, str]:
    """Join a content that is a list of parts into the content and, if any, the thought. Raises: ValueError for a part
    that is no text."""
    texts: dict[str, str] = {"content": ""}
    for given in parts:
        part = {"type": "text", "text": given} if isinstance(given, str) else given
        into, key = _PARTS.get(str(part.get("type")), ("", "")) if isinstance(part, Mapping) else ("", "")
        if not isinstance(part, Mapping) or not isinstance(part.get(key), str):
            raise ValueError(
                f"{where}: a part of its content is {describe_value(given)}, expected {{type: text, text: ...}}; "
                "models of text alone are trained: leave such records out"
            )
        if into == "thinking" and texts["content"].strip():
            raise ValueError(f"{where}: a thought follows a text in its content, and would be written before it")
        texts[into] = texts.get(into, "") + part[key]
    return texts


def _thought(value: Any, where: str) -> str:
    """The text of a thought, from a text, a list of parts, or an object with `content` or `text`. Raises:
    ValueError."""
    if isinstance(value, Mapping):
        value = value.get("content", value.get("text"))
    if isinstance(value, list):
        value = "".join(_of_parts([part for part in value if part], where).values())
    if not isinstance(value, str):
        raise ValueError(f"{where} is {describe_value(value)}, expected a text; convert the data")
    return value


def _parsed(value: Any, where: str) -> Any:
    """Tool calls, from objects or their JSON. Raises: ValueError."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return _parse(value)
    except ValueError as error:
        raise ValueError(
            f"{where}: a call of a tool is {describe_value(value)}, expected an object, or its JSON: {error}"
        ) from None


_FLAGS = ("weight", "loss", "train", "training", "trainable")
"""Keys that mark an answer as learnt or not, of OpenAI, ms-swift and axolotl."""


def _marked(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message without `_FLAGS`, but with `weight: 0` where one of them excludes the answer. Raises: ValueError for
    values other than 0 and 1, and for a flag to learn another role's message."""
    flags = {key: message.pop(key) for key in _FLAGS if key in message}
    for key, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise ValueError(
                f"{where} has {key} = {describe_value(flag)}; expected 1 or true, or 0 or false for an answer that is "
                "not to be learnt: leave the key out, or the message"
            )
        if flag and message["role"] != "assistant" and key != "weight":
            raise ValueError(
                f"{where} ({message['role']!r}) has {key} = {describe_value(flag)}, and messages of 'assistant' alone "
                "are learnt; leave the key out"
            )
    if len(set(map(bool, flags.values()))) > 1:
        raise ValueError(f"{where} has {flags}, which contradict each other; leave all but one of them out")
    return {**message, "weight": 0} if message["role"] == "assistant" and not all(flags.values()) else message


def require_order(messages: Sequence[Mapping[str, Any]], column: str) -> None:
    """Raises: ValueError for an order of roles that is wrong in every template."""
    roles = [message["role"] for message in messages]
    for index, role in enumerate(roles):
        before, remedy = roles[:index], "correct the order"
        if role == "assistant" and before[-1:] == ["assistant"]:
            problem = "follows another of 'assistant', with nothing between that it answers"
        elif role == "assistant" and not {"user", "tool"} & set(before) and set(before) <= {"system", "developer"}:
            problem = "answers nothing: no message of the user precedes it"
            remedy = (
                "leave such records out, as the adapter sharegpt does, or drop that message, by an adapter of yours"
            )
        elif role == "tool" and "assistant" not in before:
            problem = "is a tool's answer, and no assistant has called one before"
        else:
            continue
        raise ValueError(
            f"field {column!r}, message {index + 1} of {role!r} {problem} (roles: {', '.join(roles)}); {remedy}"
        )


def without_weights(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: part for key, part in message.items() if key != "weight"} for message in messages]


_WITHOUT_ARGUMENTS = frozenset(("name", "id", "type", "index"))
"""Keys of a call without arguments. Another key may hold what belongs under `arguments`."""


def _call(value: Any, where: str) -> Any:
    """Check a tool call. Its arguments are an object or its JSON. Raises: ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: a call of a tool is {describe_value(value)}, expected an object")
    call = {key: part for key, part in value.items() if part is not None}
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], where)}
    arguments = call.get("arguments")
    if not isinstance(call.get("name"), str) or (arguments is None and call.keys() - _WITHOUT_ARGUMENTS):
        raise ValueError(
            f"{where}: a call of a tool has the keys {', '.join(map(repr, call)) or 'none'}, expected name and "
            "arguments, or a function with these; convert the data"
        )
    if arguments is None:
        return {**call, "arguments": {}}
    if isinstance(arguments, str):
        if not arguments.strip():
            return {**call, "arguments": {}}
        is_object, reason = False, ""
        try:
            is_object = isinstance(_parse(arguments), dict)
        except ValueError as error:
            reason = f": {error}"
        if not is_object:
            got = describe_value(arguments)
            raise ValueError(f"{where}: the arguments of a call are {got}, expected an object, or its JSON{reason}")
    return call


def _parse(text: str) -> Any:
    """Parse a JSON text. Raises: ValueError, also for a number that would be written differently."""
    return json.loads(text, parse_float=_exact, object_pairs_hook=object_of)


def _exact(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value) or Decimal(repr(value)) != Decimal(digits):
        raise ValueError(f"{digits} cannot be kept exactly; write it as a text")
    return value


def _from_sharegpt(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert `{from, value}` to `{role, content}`. Other keys stay. Raises: ValueError."""
    name, text = value["from"], value.get("value")
    others = {key: part for key, part in value.items() if key not in ("from", "value")}
    role = str(name).lower()
    if role == _CALL:
        try:
            call = _parse(text) if isinstance(text, str) else text
        except ValueError as error:
            raise ValueError(f"{where} (from {name!r}) is {describe_value(text)}, expected JSON: {error}") from None
        calls = call if isinstance(call, list) else [call]
        return {**others, "role": "assistant", "tool_calls": [{"type": "function", "function": c} for c in calls]}
    if role not in _SHAREGPT:
        raise ValueError(f"{where} is from {name!r}; the known ones are {', '.join(_SHAREGPT)}, {_CALL}; rename it")
    if not isinstance(text, str | list):
        raise ValueError(f"{where} ({name!r}): value is {describe_value(text)}, expected a text; convert the data")
    return {**others, "role": _SHAREGPT[role], "content": text}
