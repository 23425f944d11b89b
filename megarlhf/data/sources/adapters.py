"""Adapters: functions that make records of the rows of data that others have written.

An adapter is a function `row -> record`. A record has what the command reads: `prompt` with `response`, with `chosen`
and `rejected`, or alone; or `messages`. It raises ValueError for a row that it cannot read, and returns None for one
that is to be left out. Your own stands in a module on PYTHONPATH and is named `package.module:function`.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

Adapter = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]


def anthropic_hh(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Anthropic's hh-rlhf: `chosen` and `rejected` are whole dialogues, which part after the last common answer.

    The prompt is the common beginning as it stands, up to and with "\n\nAssistant:"; a response is the rest.
    """
    chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
    common = _common_length(chosen, rejected, "\n\nAssistant:")
    if not common:
        raise ValueError(
            "chosen and rejected have no common beginning that ends in '\\n\\nAssistant:'; expected two dialogues of "
            "'\\n\\nHuman:' and '\\n\\nAssistant:' that differ in the last answer"
        )
    others = {key: value for key, value in row.items() if key not in ("chosen", "rejected")}
    return {**others, "prompt": chosen[:common], "chosen": chosen[common:], "rejected": rejected[common:]}


def _common_length(first: str, second: str, mark: str) -> int:
    """Characters up to and with the last mark before which both texts are the same; 0 without any."""
    common = 0
    for match in re.finditer(re.escape(mark), first):
        if not second.startswith(first[: match.end()]):
            break
        common = match.end()
    return common


def implicit_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """TRL's preferences with an implicit prompt: `chosen` and `rejected` are whole texts. The prompt is their common
    beginning, up to the last white space in it."""
    chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
    differs = (at for at, letters in enumerate(zip(chosen, rejected, strict=False)) if letters[0] != letters[1])
    same = next(differs, min(len(chosen), len(rejected)))
    common = next((end for end in range(same - 1, 0, -1) if chosen[end].isspace()), 0)
    if not chosen[:common].strip():
        raise ValueError("chosen and rejected begin with different words, so that nothing is their prompt; give one")
    others = {key: value for key, value in row.items() if key not in ("chosen", "rejected")}
    return {**others, "prompt": chosen[:common], "chosen": chosen[common:], "rejected": rejected[common:]}


_ALPACA = {"instruction": ("instruction", "query"), "input": ("input", "context"), "output": ("output", "response")}
"""By Alpaca's names of its columns: these, and those of Dolly and ms-swift."""
_OF_ALPACA = (*(name for names in _ALPACA.values() for name in names), "history")


def alpaca(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Stanford Alpaca's `instruction`, `input` (may be empty) and `output`; the prompt is the two with a blank line
    between them. Dolly's `instruction`, `context` and `response`, and ms-swift's `query` and `response`, are the same.
    A row without `output` is a prompt alone, or that of a pair. `history`, of LLaMA-Factory, is a list of earlier
    instructions with their outputs, with which the prompt is a list of messages."""
    names = {ours: _only(row, alternatives) for ours, alternatives in _ALPACA.items()}
    context = str(given) if isinstance(given := row.get(names["input"]), int | float) else given
    instruction = _text(row, names["instruction"])
    if context is not None and not isinstance(context, str):
        raise ValueError(f"expected a text in {names['input']!r}, it is {type(context).__name__}")
    prompt: Any = f"{instruction}\n\n{context}" if isinstance(context, str) and context.strip() else instruction
    if history := row.get("history"):
        turns = [list(turn) for turn in history] if isinstance(history, list) else [[]]
        if not all(len(turn) == 2 and all(isinstance(each, str) for each in turn) for turn in turns):
            raise ValueError("expected 'history' as a list of pairs of texts, [instruction, output]")
        roles = ("user", "assistant")
        messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
        prompt = [*messages, {"role": "user", "content": prompt}]
    others = {key: value for key, value in row.items() if key not in _OF_ALPACA}
    output = names["output"]
    return {**others, "prompt": prompt, **({"response": _text(row, output)} if output in row else {})}


def _only(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The name of which the row has a column, the first of them without any. Raises: ValueError for two."""
    there = [name for name in names if row.get(name)] or [name for name in names if name in row]
    if len(there) > 1 and row.get(there[0]):
        raise ValueError(
            f"the row has both {there[0]!r} and {there[1]!r}; name the one that is meant by an adapter of yours"
        )
    return (there or names)[0]


_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


def sharegpt(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """ShareGPT's `conversations`, a list of `{from, value}`, as messages. Those that begin with an answer, as parts of
    longer ones do, are left out."""
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
        others = {key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")}
        messages.append({"role": _ROLES[speaker.lower()], "content": content, **others})
    if next((each["role"] for each in messages if each["role"] != "system"), None) == "assistant":
        return None
    system = row.get("system")
    if system and not isinstance(system, str):
        raise ValueError(f"expected a text in 'system', it is {type(system).__name__}")
    if system and system.strip() and messages and messages[0]["role"] == "system":
        raise ValueError("the row has a column 'system', and its turns begin with one of the system; leave one out")
    if system and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    others = {key: value for key, value in row.items() if key not in (name, "system")}
    return {**others, "messages": messages}


_OF_PREFERENCES = ("input", "preferred_output", "non_preferred_output")


def openai_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's chat files: `messages`, or (preferences) `input.messages` with `preferred_output` and
    `non_preferred_output`, each of which is a list of messages. What else stands in `input`, such as `tools`, becomes
    a column."""
    if "preferred_output" in row:
        given = row.get("input")
        before = given.get("messages") if isinstance(given, Mapping) else None
        sides = [row.get("preferred_output"), row.get("non_preferred_output")]
        if not all(isinstance(each, list) and each for each in (before, *sides)):
            raise ValueError("expected input.messages, preferred_output and non_preferred_output, lists of messages")
        assert isinstance(before, list)
        chosen, rejected = (before + side for side in sides if isinstance(side, list))
        assert isinstance(given, Mapping)
        beside = {key: value for key, value in given.items() if key != "messages" and value is not None}
        others = {key: value for key, value in row.items() if key not in _OF_PREFERENCES and value is not None}
        if twice := [key for key in beside if key in others and others[key] != beside[key]]:
            raise ValueError(f"expected {twice[0]!r} once, found it in input and as a column, with other values")
        return {**others, **beside, "chosen": chosen, "rejected": rejected}
    if not isinstance(row.get("messages"), list):
        raise ValueError(f"expected 'messages', a list of {{role, content}}, found {', '.join(map(repr, row))}")
    return row


def ms_swift(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """ms-swift's preferences: `messages`, whose last one is the answer, beside `rejected_response`, a text that stands
    in its place, or `rejected_messages`, a whole conversation."""
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
    others = {key: value for key, value in row.items() if key not in ("messages", *_OF_MS_SWIFT)}
    return {**others, "chosen": chosen, "rejected": rejected}


_OF_MS_SWIFT = ("rejected_messages", "rejected_response")


def nemo_rl(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """NeMo-RL's preferences: `context`, a text or messages, and two `completions`, each with a `rank`, of which the
    lower one is the better. Two of the same rank are left out."""
    given = row.get("completions")
    pair = given if isinstance(given, list) and all(isinstance(each, Mapping) for each in given) else []
    if len(pair) != 2 or not all(isinstance(each.get("rank"), int | float) and "completion" in each for each in pair):
        raise ValueError(
            f"expected 'context' and 'completions', two of {{rank, completion}}, found {', '.join(map(repr, row))}"
        )
    if any(math.isnan(each["rank"]) for each in pair):
        raise ValueError("a rank is NaN; expected numbers")
    better, worse = sorted(pair, key=lambda each: float(each["rank"]))
    if better["rank"] == worse["rank"]:
        return None
    others = {key: value for key, value in row.items() if key not in ("context", "completions")}
    return {**others, "prompt": row.get("context"), "chosen": better["completion"], "rejected": worse["completion"]}


ADAPTERS: dict[str, Adapter] = {
    "anthropic_hh": anthropic_hh,
    "implicit_prompt": implicit_prompt,
    "alpaca": alpaca,
    "sharegpt": sharegpt,
    "openai_messages": openai_messages,
    "ms_swift": ms_swift,
    "nemo_rl": nemo_rl,
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
"""Columns that an adapter makes other ones of; all others stay."""


def require_kept(name: str, row: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Raises: ValueError for a column of the row in whose place one of `ADAPTERS` has written another."""
    for column, value in row.items():
        kept = column in _READ[name] or value in (None, "", [], {}) or record.get(column) is value
        if not kept and record.get(column) != value:
            raise ValueError(
                f"the row has a column {column!r}, in whose place the adapter writes what it makes of "
                f"{', '.join(each for each in _READ[name] if each in row)}; leave one of them out"
            )


def load_adapter(name: str) -> Adapter:
    """One of `ADAPTERS`, or a function of the user's as `package.module:function`. Raises: ValueError for another
    name."""
    if name in ADAPTERS:
        return ADAPTERS[name]
    module_name, colon, function = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, ADAPTERS, n=1)
        raise ValueError(
            f"unknown adapter {name!r}; "
            + (f"did you mean {near[0]!r}? " if near else "")
            + f"the known ones are {', '.join(ADAPTERS)}; write your own as package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"adapter {name!r}: cannot import {module_name!r} ({error}); put its directory on PYTHONPATH"
        ) from error
    adapter: Any = getattr(module, function, None)
    if not callable(adapter):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"adapter {name!r}: {module_name} has no function {function!r}; it has {', '.join(there)}")
    return cast(Adapter, adapter)


def digest_of_adapter(name: str | None) -> str | None:
    """Digest of the module that the configuration names for an adapter of the user's, of the file that its code stands
    in, and of those that both import, so that a changed one is another adapter. What a factory or a decorator has made
    has its code elsewhere: there too."""
    if name is None or name in ADAPTERS:
        return name
    adapter = load_adapter(name)
    module = sys.modules[name.partition(":")[0]]
    if not (getattr(module, "__file__", None) or "").endswith(".py"):
        raise ValueError(f"adapter {name!r}: {module} has no file in Python; name a function in a module")
    waiting = [(module.__name__, Path(str(module.__file__)))]
    with contextlib.suppress(TypeError):  # of an object that is called: its class stands in what the module imports
        code = inspect.unwrap(adapter)
        file, of_code = Path(inspect.getsourcefile(code) or ""), getattr(code, "__module__", None) or ""
        if file.suffix == ".py" and _is_own(of_code, file):
            waiting.append((of_code, file))
    files: dict[Path, bytes] = {}
    while waiting:
        module_name, path = waiting.pop()
        if path not in files:
            files[path] = path.read_bytes()
            waiting += _own_imports(files[path], module_name, path)
    digests = sorted((path.name, hashlib.sha256(content).hexdigest()) for path, content in files.items())
    return hashlib.sha256(repr(digests).encode()).hexdigest()


_INSTALLED = ("site-packages", "dist-packages")


def _is_own(module: str, file: Path) -> bool:
    """Tell whether a module comes neither with Python nor as a package that was installed."""
    known = module.partition(".")[0] in sys.stdlib_module_names | {"megarlhf"}
    return not known and not set(_INSTALLED) & set(file.parts)


def _own_imports(source: bytes, module: str, file: Path) -> Iterator[tuple[str, Path]]:
    """Modules that a file imports, anywhere in it, with their files: those of the user, which come neither with Python
    nor as a package that was installed."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {base, *(f"{base}{'' if base.endswith('.') else '.'}{alias.name}" for alias in node.names)}
    absolute: set[str] = set()
    for name in names:
        with contextlib.suppress(ImportError):  # a relative one in a module without a package, which cannot run
            parts = importlib.util.resolve_name(name, package).split(".")
            absolute |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    for name in sorted(absolute):
        spec = None
        if name.partition(".")[0] in sys.stdlib_module_names:
            continue
        with contextlib.suppress(ImportError, ValueError, AttributeError):  # a name that is no module, or is not there
            spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        path = Path(spec.origin)
        if _is_own(name, path):
            yield name, path


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        got = f"it is {type(value).__name__}" if key in row else f"found {', '.join(map(repr, row))}"
        raise ValueError(f"expected a text in {key!r}, {got}")
    return value
