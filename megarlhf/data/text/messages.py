"""Messages as `{role, content}`, from the forms in which they are published. No template and no tokenizer yet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megarlhf.data.record_fields import present, shown

_SHAREGPT = {
    "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""ShareGPT's names of roles, and what they are called elsewhere."""
_CALL = "function_call"
"""ShareGPT's role of an assistant that calls a tool; its value is JSON."""


def messages_of(value: Any, column: str) -> list[dict[str, Any]]:
    """Raises: ValueError that names the column and the message."""
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"field {column!r} is {shown(value)}, expected a list of messages, with one at least: "
            "{role, content}, or {from, value}; convert the data"
        )
    return [_message(each, f"field {column!r}, message {number}") for number, each in enumerate(value, 1)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {shown(value)}, expected an object {{role, content}}; convert the data")
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
    if isinstance(message.get("content"), list):
        message |= _of_parts(message.pop("content"), f"{where} ({role!r})")
    if isinstance(legacy := message.pop("function_call", None), Mapping):
        message["tool_calls"] = [{"type": "function", "function": legacy}]
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(each, where) for each in message["tool_calls"]]
        message.setdefault("content", "")
    else:
        message.pop("tool_calls", None)
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError(f"{where} ({role!r}): content is {shown(content)}, expected a text; convert the data")
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
}
"""Keys of a message that change what it means to others, and that nothing here reads; and why."""

_PARTS = {
    "text": ("content", "text"),
    "input_text": ("content", "text"),
    "output_text": ("content", "text"),
    "thinking": ("thinking", "thinking"),
    "reasoning": ("thinking", "text"),
}
"""By the type of a part of a content: the key of the message that it belongs to, and its own key for the text."""


def _of_parts(parts: list[Any], where: str) -> dict[str, str]:
    """The content, and the thought where there is one, of a content that is a list of parts. Raises: ValueError for a
    part that is no text."""
    texts: dict[str, str] = {"content": ""}
    for given in parts:
        part = {"type": "text", "text": given} if isinstance(given, str) else given
        into, key = _PARTS.get(str(part.get("type")), ("", "")) if isinstance(part, Mapping) else ("", "")
        if not isinstance(part, Mapping) or not isinstance(part.get(key), str):
            raise ValueError(
                f"{where}: a part of its content is {shown(given)}, expected {{type: text, text: ...}}; models of text "
                "alone are trained: leave such records out"
            )
        texts[into] = texts.get(into, "") + part[key]
    return texts


_FLAGS = ("weight", "loss", "train", "training", "trainable")
"""Keys by which an answer is marked as one that is to be learnt or not: OpenAI's, ms-swift's, axolotl's."""


def _marked(message: dict[str, Any], where: str) -> dict[str, Any]:
    """With `weight` 0, and no other of `_FLAGS`, where one of them says that the answer is not to be learnt. Raises:
    ValueError for another share, and for a message that nobody can learn."""
    flags = {key: message.pop(key) for key in _FLAGS if key in message}
    for key, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise ValueError(
                f"{where} has {key} = {shown(flag)}; expected 1 or true, or 0 or false for an answer that is not to be "
                "learnt: leave the key out, or the message"
            )
        if flag and message["role"] != "assistant" and key != "weight":
            raise ValueError(
                f"{where} ({message['role']!r}) has {key} = {shown(flag)}, and messages of 'assistant' alone are "
                "learnt; leave the key out"
            )
    if len(set(map(bool, flags.values()))) > 1:
        raise ValueError(f"{where} has {flags}, which contradict each other; leave all but one of them out")
    return {**message, "weight": 0} if message["role"] == "assistant" and not all(flags.values()) else message


def without_weights(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: part for key, part in message.items() if key != "weight"} for message in messages]


def _call(value: Any, where: str) -> Any:
    """A call of a tool, whose arguments are an object or the JSON of one."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: a call of a tool is {shown(value)}, expected an object")
    call = without_nulls(value)
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    try:
        known = not isinstance(arguments, str) or isinstance(json.loads(arguments), dict)
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{where}: the arguments of a call are {shown(arguments)}, expected an object, or its JSON")
    return call


def _from_sharegpt(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """As `{role, content}`, its other keys as they are."""
    name, text = value["from"], value.get("value")
    others = {key: part for key, part in value.items() if key not in ("from", "value")}
    role = str(name).lower()
    if role == _CALL:
        try:
            call = json.loads(text) if isinstance(text, str) else text
        except ValueError as error:
            raise ValueError(f"{where} (from {name!r}) is {shown(text)}, expected JSON: {error}") from None
        calls = call if isinstance(call, list) else [call]
        return {**others, "role": "assistant", "tool_calls": [{"type": "function", "function": c} for c in calls]}
    if role not in _SHAREGPT:
        raise ValueError(f"{where} is from {name!r}; the known ones are {', '.join(_SHAREGPT)}, {_CALL}; rename it")
    if not isinstance(text, str | list):
        raise ValueError(f"{where} ({name!r}): value is {shown(text)}, expected a text; convert the data")
    return {**others, "role": _SHAREGPT[role], "content": text}


def without_nulls(value: Any) -> Any:
    """A key that is null is a key that is not there: Parquet and Arrow give every row the keys of all."""
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
