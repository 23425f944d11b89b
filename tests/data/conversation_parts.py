"""Random conversations with parts of all kinds, and which of the parts stand in a text, found by search alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

WORDS = ("amber", "stone", "willow", "drums", "glide", "under", "north", "lamp", "seven", "quiet", "gate", "moss")
EDGES = ("", "", "", "", " ", "\n", "\n\n", "  ")
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")


def text(draw: random.Random, numbers: Iterator[int], *, plain: bool = False) -> str:
    """A text that no other part has; now and then, if not `plain`, with white space around it or within, or quotes."""
    words = " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))
    if plain:
        return f"{words}{next(numbers):04d}"
    inner = draw.choice(["", "", "", "\n", ' "quoted" ', " {x: 1}", " a/b "])
    return f"{draw.choice(EDGES)}{words}{inner}{next(numbers):04d}{draw.choice(EDGES)}"


def value(draw: random.Random, numbers: Iterator[int]) -> Any:
    kind = draw.randrange(5)
    if kind == 0:
        return 10_000 + next(numbers)
    if kind == 1:
        return [text(draw, numbers).strip(), next(numbers) + 0.5]
    if kind == 2:
        return {"deep": text(draw, numbers).strip(), "flag": draw.random() < 0.5}
    return text(draw, numbers).strip()


def answer(draw: random.Random, numbers: Iterator[int], *, calls: bool) -> dict[str, Any]:
    """Of the assistant: with a thought under a key or in the content, and calls of tools beside a content or none."""
    message: dict[str, Any] = {"role": "assistant", "content": text(draw, numbers)}
    thoughts = draw.randrange(5)
    if thoughts == 0:
        message[draw.choice(THOUGHT_KEYS)] = text(draw, numbers)
    elif thoughts == 1:
        line = draw.choice(["", "\n"])
        message["content"] = f"<think>{line}{text(draw, numbers)}{line}</think>{line * 2}{message['content']}"
    if calls:
        message["content"] = draw.choice([None, "", message["content"]])
        arguments = {name: value(draw, numbers) for name in draw.sample(WORDS, draw.randint(1, 3))}
        message["tool_calls"] = [
            {"id": "abcdefghi", "type": "function", "function": {
                "name": f"{draw.choice(WORDS)}_{next(numbers)}",
                "arguments": draw.choice([arguments, json.dumps(arguments)])}}
            for _ in range(draw.randint(1, 2))
        ]  # fmt: skip
    return message


def conversation(draw: random.Random, *, plain: bool = False) -> dict[str, Any]:
    """A record of `sft`; `plain`: one that every template writes."""
    numbers = iter(range(1000, 10_000))
    if plain:
        roles = ["user", "assistant"] * draw.randint(1, 3)
        return {"messages": [{"role": role, "content": text(draw, numbers, plain=True)} for role in roles]}
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": draw.choice(["system", "system", "developer"]), "content": text(draw, numbers)})
    for _ in range(draw.randint(1, 3)):
        asked = text(draw, numbers)
        messages.append(
            {"role": "user", "content": asked if draw.random() < 0.8 else [{"type": "text", "text": asked}]}
        )
        if draw.random() < 0.3:
            messages.append(answer(draw, numbers, calls=True))
            messages.append({"role": "tool", "content": text(draw, numbers), "tool_call_id": "abcdefghi"})
        messages.append(answer(draw, numbers, calls=False))
    return {"messages": messages}


def parts(message: Mapping[str, Any]) -> list[str]:
    """Every text of a message that has to be written."""
    content = message.get("content")
    texts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
    texts += [message[key] for key in THOUGHT_KEYS if key in message]
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        texts += [call["function"]["name"], *leaves(json.loads(arguments) if isinstance(arguments, str) else arguments)]
    return [each for each in texts if each]


def leaves(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [] if isinstance(value, bool) else [str(value)]


def stands_in(part: str, text: str) -> bool:
    return any(each in text for each in (part, json.dumps(part, ensure_ascii=False)[1:-1]))
