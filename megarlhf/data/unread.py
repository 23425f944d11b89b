"""Columns of a record that change what should be learnt from it, and that nothing reads: refused by name, or counted.

Ordinary columns (`id`, `source`, `score`) pass, and in prompts of `rl` every column is a field for the rewards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from megarlhf.data.json_rows import shown
from megarlhf.data.sample_kinds import PairSample, SFTSample

_COUNTED: Mapping[type, tuple[str, ...]] = {SFTSample: ("chosen", "rejected"), PairSample: ("response",)}
"""Columns with answers of which the samples of a kind have nothing."""
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")


def counted(sample_type: type, record: Mapping[str, Any]) -> Iterator[str]:
    """What of a record is not read, in words by which it is counted."""
    for name in _COUNTED.get(sample_type, ()):
        if record.get(name) is not None:
            yield f"with a column {name!r}, which is not read here"


def _given(value: Any) -> bool:
    return bool(value)


def _not_one(value: Any) -> bool:
    return not (isinstance(value, bool | int | float) and value == 1)


def _off(value: Any) -> bool:
    return isinstance(value, bool | int) and value == 0


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
"""By column: whether a value of it says something, and what."""


def _rules(names: str, says: Callable[[Any], bool], meaning: str) -> Rules:
    return dict.fromkeys(names.split(), (says, meaning))


_ALWAYS: Rules = {
    **_rules(
        "loss_mask completion_mask assistant_mask assistant_masks response_mask train_mask",
        _not_one,
        "says which tokens are learnt, and texts are tokenized here: say it by weight: 0 of messages, or data.loss_on",
    ),
    **_rules("labels", _numbers, "says which tokens are learnt, and texts are tokenized here: leave them out"),
    **_rules(
        "weight sample_weight loss_weight loss_scale example_weight",
        _not_one,
        "says how much the record counts, and each counts the same: make sets of them, each with its weight",
    ),
    **_rules("train loss", _off, "says that the record is not to be learnt: leave it out"),
    **_rules("image images video videos audio audios", _given, "belongs to the prompt, and only texts are read"),
}
_PART = "looks like a part of the prompt"
_OTHER_PARTS: Rules = {
    **_rules("history", _given, f"{_PART}: the adapter alpaca joins the parts, or one of yours"),
    **_rules("functions function_call", _given, f"{_PART}: call the column 'tools'"),
    **_rules("system_prompt", _given, f"{_PART}: say columns: {{system: system_prompt}} and data.template = chat"),
}
_BESIDE_TEXTS: Rules = {
    **_OTHER_PARTS,
    **_rules("instruction input", _given, f"{_PART}: the adapter alpaca joins the parts, or one of yours"),
    **_rules("context", _given, f"{_PART}: join them by an adapter of yours"),
}
_UNPAIRED: Rules = _rules(
    "label kto_tag", _flag, "marks unpaired preferences (KTO), of which no command learns: keep the good answers"
)
_BESIDE_RAW_TEXT: Rules = _rules(
    "instruction input output question answer completion conversation system",
    _given,
    "stands beside 'text', of which every token would be learnt: name prompt and response, or give an adapter",
)
Kind = Literal["raw text", "texts", "conversation", "pair"]
_RULES: Mapping[Kind, Rules] = {
    "raw text": {**_ALWAYS, **_BESIDE_RAW_TEXT},
    "texts": {**_ALWAYS, **_BESIDE_TEXTS, **_UNPAIRED},
    "conversation": {**_ALWAYS, **_OTHER_PARTS, **_UNPAIRED},
    "pair": {**_ALWAYS, **_BESIDE_TEXTS},
}
"""By what a record is learnt as: its prompt and response, one conversation, two answers."""


def require_read(record: Mapping[str, Any], kind: Kind) -> None:
    """Raises: ValueError for a column that would change what is learnt of such a record."""
    rules = _RULES[kind]
    for name, value in record.items():
        if name in rules and value is not None and rules[name][0](value):
            raise ValueError(
                f"the record has {name!r} = {shown(value)}, which is not read, and {rules[name][1]}. Where it means "
                f"nothing, give it another name: columns: {{not_read: {name}}}"
            )


def require_no_messages(name: str, text: str) -> None:
    """Raises: ValueError for a text that is a list of messages."""
    if _MESSAGES_AS_TEXT.match(text):
        raise ValueError(
            f"field {name!r} is the text {shown(text)}, which looks like a list of messages and would be written as it "
            "stands; write a list, or make one of it by an adapter (json.loads)"
        )
