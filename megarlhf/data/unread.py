"""Columns of a record that change what should be learnt from it, and that nothing reads: refused by name, or counted.

Ordinary columns (`id`, `source`, `score`) pass. In prompts all columns are fields for the rewards, but those that only
a prompt can mean (`images`, `documents`) are refused there too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from megarlhf.data.json_rows import shown
from megarlhf.data.sample_kinds import PairSample, SFTSample

_COUNTED: Mapping[type, tuple[str, ...]] = {SFTSample: ("chosen", "rejected"), PairSample: ("response", "completion")}
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


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


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
}
_PART = "looks like a part of the prompt"
_OF_TEMPLATE: Rules = {
    **_rules("image images video videos audio audios", _given, "belongs to the prompt, and only texts are read"),
    **_rules("documents", _given, f"{_PART}: give them to the template: chat_template_kwargs: {{documents: ...}}"),
    **_rules(
        "enable_thinking thinking",
        _flag,
        "is a variable of the chat template: give it under chat_template_kwargs, or for all in data.template_args",
    ),
}
"""Of the prompt, and of nothing else."""
_OTHER_PARTS: Rules = {
    **_rules("history", _given, f"{_PART}: the adapter alpaca joins the parts, or one of yours"),
    **_rules("functions function_call", _given, f"{_PART}: call the column 'tools'"),
    **_rules("system_prompt", _given, f"{_PART}: say columns: {{system: system_prompt}} and data.template = chat"),
}
_THOUGHTS: Rules = _rules(
    "reasoning reasoning_content thinking thought",
    _text,
    "looks like a thought before the answer, of which nothing would be learnt: make messages by an adapter of yours, "
    "with the thought under 'reasoning_content' of the assistant's message",
)
_BESIDE_MESSAGES: Rules = {
    **_rules("instruction context", _text, f"{_PART}, and stands in no message: make a message of it"),
    **_rules("response completion", _text, "looks like an answer, and stands in no message: make a message of it"),
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
Kind = Literal["raw text", "texts", "conversation", "pair", "pair of texts", "prompt"]
_BESIDE_PROMPTS: Rules = {name: _OTHER_PARTS[name] for name in ("history", "system_prompt")}
_RULES: Mapping[Kind, Sequence[Rules]] = {
    "raw text": (_ALWAYS, _OF_TEMPLATE, _BESIDE_RAW_TEXT),
    "texts": (_ALWAYS, _OF_TEMPLATE, _BESIDE_TEXTS, _UNPAIRED, _THOUGHTS),
    "conversation": (_ALWAYS, _OF_TEMPLATE, _OTHER_PARTS, _UNPAIRED, _BESIDE_MESSAGES),
    "pair": (_ALWAYS, _OF_TEMPLATE, _BESIDE_TEXTS),
    "pair of texts": (_ALWAYS, _OF_TEMPLATE, _BESIDE_TEXTS, _THOUGHTS),
    "prompt": (_OF_TEMPLATE, _BESIDE_PROMPTS),
}
"""By what a record is read as: its prompt and response, one conversation, two answers, what has to be answered."""


def require_read(record: Mapping[str, Any], kind: Kind, messages: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raises: ValueError for a column that would change what is learnt or asked of such a record, and that says more
    than a part of one of its `messages`."""
    for name, value in record.items():
        for says, meaning in (rules[name] for rules in _RULES[kind] if name in rules):
            if value is not None and says(value) and not _in_a_message(value, messages):
                raise ValueError(
                    f"the record has {name!r} = {shown(value)}, which is not read, and {meaning}. Where it means "
                    f"nothing, give it another name: columns: {{not_read: {name}}}"
                )


def _in_a_message(value: Any, messages: Sequence[Mapping[str, Any]]) -> bool:
    return isinstance(value, str) and any(value.strip() in message["content"] for message in messages)


def require_no_messages(name: str, text: str) -> None:
    """Raises: ValueError for a text that is a list of messages."""
    if _MESSAGES_AS_TEXT.match(text):
        raise ValueError(
            f"field {name!r} is the text {shown(text)}, which looks like a list of messages and would be written as it "
            "stands; write a list, or make one of it by an adapter (json.loads)"
        )
