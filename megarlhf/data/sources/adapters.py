"""Adapters make records from rows in the formats of other frameworks.

An adapter is a function `row -> record`. A record has the columns that the command reads: `prompt` with `response`,
with `chosen` and `rejected`, or alone; or `messages`. An adapter raises ValueError for a row that it cannot read, and
returns None for a row to leave out. An adapter of yours is in a module on PYTHONPATH, named `package.module:function`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarlhf.own_code.digest import digest_of
from megarlhf.own_code.load import is_path, load_function, unknown_name

Adapter = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]


def anthropic_hh(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Anthropic's hh-rlhf: `chosen` and `rejected` are whole dialogues that differ in the last answer.

    The prompt is their common beginning, up to and including "\n\nAssistant:". A response is the rest.
    """
    chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
    common = _common_length(chosen, rejected, "\n\nAssistant:")
    if not common:
        raise ValueError(
            "chosen and rejected have no common beginning that ends in '\\n\\nAssistant:'; expected two dialogues of "
            "'\\n\\nHuman:' and '\\n\\nAssistant:' that differ in the last answer"
        )
    return {
        **_without(row, "chosen", "rejected"),
        "prompt": chosen[:common],
        "chosen": chosen[common:],
        "rejected": rejected[common:],
    }


def _common_length(first: str, second: str, mark: str) -> int:
    """Characters up to and including the last mark in the common beginning. 0 without any."""
    common = 0
    for match in re.finditer(re.escape(mark), first):
        if not second.startswith(first[: match.end()]):
            break
        common = match.end()
    return common


def implicit_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """TRL's preferences with an implicit prompt: `chosen` and `rejected` are whole texts. The prompt is their common
    beginning, up to its last white space."""
    chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
    differs = (
        position for position, letters in enumerate(zip(chosen, rejected, strict=False)) if letters[0] != letters[1]
    )
    same = next(differs, min(len(chosen), len(rejected)))
    common = next((end for end in range(same - 1, 0, -1) if chosen[end].isspace()), 0)
    if not chosen[:common].strip():
        raise ValueError("chosen and rejected begin with different words, so that nothing is their prompt; give one")
    return {
        **_without(row, "chosen", "rejected"),
        "prompt": chosen[:common],
        "chosen": chosen[common:],
        "rejected": rejected[common:],
    }


_ALPACA = {"instruction": ("instruction", "query"), "input": ("input", "context"), "output": ("output", "response")}
"""Column names of Alpaca, Dolly and ms-swift, by those of Alpaca."""
_OF_ALPACA = (*(name for names in _ALPACA.values() for name in names), "history")


def alpaca(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Stanford Alpaca's `instruction`, `input` (may be empty) and `output`. The prompt is instruction and input with a
    blank line between them. Dolly's `instruction`, `context`, `response` and ms-swift's `query`, `response` mean the
    same. A row without `output` is a prompt alone, or that of a pair. LLaMA-Factory's `history` is a list of earlier
    instructions with their outputs; with it, the prompt is a list of messages."""
    names = {ours: _only(row, alternatives) for ours, alternatives in _ALPACA.items()}
    context = str(given) if isinstance(given := row.get(names["input"]), int | float) else given
    instruction = _text(row, names["instruction"])
    if context is not None and not isinstance(context, str):
        raise ValueError(f"expected a text in {names['input']!r}, it is {type(context).__name__}")
    prompt: Any = f"{instruction}\n\n{context}" if isinstance(context, str) and context.strip() else instruction
    if history := row.get("history"):
        turns = [list(turn) for turn in history] if isinstance(history, list) else [[]]
        if not all(len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in turns):
            raise ValueError("expected 'history' as a list of pairs of texts, [instruction, output]")
        roles = ("user", "assistant")
        messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
        prompt = [*messages, {"role": "user", "content": prompt}]
    answer = {"response": _text(row, names["output"])} if names["output"] in row else {}
    return {**_without(row, *_OF_ALPACA), "prompt": prompt, **answer}


def _only(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The name of the column that the row has, or the first name if it has none. Raises: ValueError for two."""
    present = [name for name in names if row.get(name)] or [name for name in names if name in row]
    if len(present) > 1 and row.get(present[0]):
        raise ValueError(
            f"the row has both {present[0]!r} and {present[1]!r}; name the one that is meant by an adapter of yours"
        )
    return (present or names)[0]


_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


def sharegpt(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """ShareGPT's `conversations`, a list of `{from, value}`, as messages. Conversations that begin with an answer are
    left out: they are parts of longer ones."""
    name = "conversations" if "conversations" in row else "conversation"
    turns = row.get(name)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError(f"expected 'conversations', a list of {{from, value}}, found {', '.join(map(repr, row))}")
    messages = []
    for turn in turns:
        speaker = str(turn.get("from", turn.get("role", "")))
        if speaker.lower() not in _ROLES:
            raise ValueError(f"a turn is from {speaker!r}; known are {', '.join(_ROLES)}")
        content = turn.get("value", turn.get("content"))
        if not isinstance(content, str):
            raise ValueError(f"a turn from {speaker!r} has no text in 'value'")
        others = _without(turn, "from", "value", "role", "content")
        messages.append({"role": _ROLES[speaker.lower()], "content": content, **others})
    if next((message["role"] for message in messages if message["role"] != "system"), None) == "assistant":
        return None
    system = row.get("system")
    if system and not isinstance(system, str):
        raise ValueError(f"expected a text in 'system', it is {type(system).__name__}")
    if system and system.strip() and messages and messages[0]["role"] == "system":
        raise ValueError("the row has a column 'system', and its turns begin with one of the system; leave one out")
    if system and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return {**_without(row, name, "system"), "messages": messages}


_OF_PREFERENCES = ("input", "preferred_output", "non_preferred_output")


def openai_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's chat files: `messages`, or (preferences) `input.messages` with `preferred_output` and
    `non_preferred_output`, all lists of messages. Other keys of `input`, such as `tools`, become columns."""
    if "preferred_output" in row:
        asked = row.get("input")
        before = asked.get("messages") if isinstance(asked, Mapping) else None
        sides = [row.get("preferred_output"), row.get("non_preferred_output")]
        if not all(isinstance(messages, list) and messages for messages in (before, *sides)):
            raise ValueError("expected input.messages, preferred_output and non_preferred_output, lists of messages")
        assert isinstance(before, list)
        chosen, rejected = (before + side for side in sides if isinstance(side, list))
        assert isinstance(asked, Mapping)
        beside = {key: value for key, value in asked.items() if key != "messages" and value is not None}
        others = {key: value for key, value in row.items() if key not in _OF_PREFERENCES and value is not None}
        if twice := [key for key in beside if key in others and others[key] != beside[key]]:
            raise ValueError(f"expected {twice[0]!r} once, found it in input and as a column, with other values")
        return {**others, **beside, "chosen": chosen, "rejected": rejected}
    if not isinstance(row.get("messages"), list):
        raise ValueError(f"expected 'messages', a list of {{role, content}}, found {', '.join(map(repr, row))}")
    return row


def ms_swift(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """ms-swift's preferences: `messages`, whose last one is the chosen answer, and the rejected text in
    `rejected_response`, or a whole conversation in `rejected_messages`."""
    chosen = row.get("messages")
    if not isinstance(chosen, list) or not chosen or not isinstance(chosen[-1], Mapping):
        raise ValueError(f"expected 'messages', a list of {{role, content}}, found {', '.join(map(repr, row))}")
    if chosen[-1].get("role") != "assistant":
        raise ValueError(
            f"expected the last of 'messages' to be the assistant's answer, it is of {chosen[-1].get('role')!r}"
        )
    rejected = row.get("rejected_messages")
    if rejected is None:
        rejected = [*chosen[:-1], {"role": "assistant", "content": _text(row, "rejected_response")}]
    return {**_without(row, "messages", *_OF_MS_SWIFT), "chosen": chosen, "rejected": rejected}


_OF_MS_SWIFT = ("rejected_messages", "rejected_response")


def nemo_rl(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """NeMo-RL's preferences: `context`, a text or messages, and two `completions`, each with a `rank`. The lower rank
    is the better one. A pair of equal ranks is left out."""
    completions = row.get("completions")
    pair = (
        completions
        if isinstance(completions, list) and all(isinstance(completion, Mapping) for completion in completions)
        else []
    )
    if len(pair) != 2 or not all(
        isinstance(completion.get("rank"), int | float) and "completion" in completion for completion in pair
    ):
        raise ValueError(
            f"expected 'context' and 'completions', two of {{rank, completion}}, found {', '.join(map(repr, row))}"
        )
    if any(math.isnan(completion["rank"]) for completion in pair):
        raise ValueError("a rank is NaN; expected numbers")
    better, worse = sorted(pair, key=lambda completion: float(completion["rank"]))
    if better["rank"] == worse["rank"]:
        return None
    answers = {"chosen": better["completion"], "rejected": worse["completion"]}
    return {**_without(row, "context", "completions"), "prompt": row.get("context"), **answers}


ADAPTERS: dict[str, Adapter] = {
    adapter.__name__: adapter
    for adapter in (anthropic_hh, implicit_prompt, alpaca, sharegpt, openai_messages, ms_swift, nemo_rl)
}


_READ: Mapping[str, Sequence[str]] = {
    "anthropic_hh": ("chosen", "rejected"),
    "implicit_prompt": ("chosen", "rejected"),
    "alpaca": _OF_ALPACA,
    "sharegpt": ("conversations", "conversation", "system"),
    "openai_messages": _OF_PREFERENCES,
    "ms_swift": ("messages", *_OF_MS_SWIFT),
    "nemo_rl": ("context", "completions"),
}
"""Columns that an adapter replaces. All others stay."""


def require_kept(name: str, row: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Raises: ValueError for a column of the row that one of `ADAPTERS` has overwritten."""
    for column, value in row.items():
        kept = column in _READ[name] or value in (None, "", [], {}) or record.get(column) is value
        if not kept and record.get(column) != value:
            raise ValueError(
                f"the row has a column {column!r}, which the adapter would overwrite with what it makes of "
                f"{', '.join(read for read in _READ[name] if read in row)}; leave one of them out"
            )


def load_adapter(name: str) -> Adapter:
    """One of `ADAPTERS`, or a user's function named `package.module:function`. Raises: ValueError for another name."""
    if name in ADAPTERS:
        return ADAPTERS[name]
    if not is_path(name):
        raise ValueError(unknown_name("adapter", name, ADAPTERS))
    return load_function(name, "adapter")


def digest_of_adapter(name: str | None) -> str | None:
    """Digest of the source of a user's adapter; the name of a built-in one."""
    return name if name is None or name in ADAPTERS else digest_of(name, "adapter")


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        got = f"it is {type(value).__name__}" if key in row else f"found {', '.join(map(repr, row))}"
        raise ValueError(f"expected a text in {key!r}, {got}")
    return value
