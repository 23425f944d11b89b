"""Columns that should change what is learnt from a record but are not read. They are refused by name, or counted.

Ordinary columns (`id`, `source`, `score`) pass and are listed with their set. In prompts all columns are fields for the
rewards; only those that belong to a prompt (`images`, `documents`) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from megarlhf.data.json_rows import shown
from megarlhf.data.json_text import messages_in, parse_text
from megarlhf.data.sample_types import PairSample, SFTSample
from megarlhf.data.text.replaced import THOUGHTS

_OF_ALL = ("prompt", "messages", "conversations", "system", "tools", "chat_template_kwargs")
_READ: Mapping[type, frozenset[str]] = {
    SFTSample: frozenset(("response", "finished", *_OF_ALL)),
    PairSample: frozenset(("chosen", "rejected", "margin", *_OF_ALL)),
}
"""Columns that are read, by the type of sample. Of a prompt all columns are read: rewards get them."""
NOT_READ = "not_read"
"""New name for a column that the configuration excludes on purpose."""
_SCORE = re.compile("scor|rating|reward")
_JUDGEMENTS = ("is_correct", "correct", "is_chosen", "is_preferred")
"""Columns that judge the answer."""
_MESSAGES_AS_TEXT = re.compile(r"""\ufeff?\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")


def counted(sample_type: type, record: Mapping[str, Any]) -> Iterator[str]:
    """Descriptions of a record that other programs would not learn as it is. Each is counted."""
    if sample_type is SFTSample:
        for name in _JUDGEMENTS:
            if name in record and _off(record[name]):
                yield f"with {name} = {record[name]}, which are learnt as the others"
    if sample_type is PairSample:
        for name in record:
            if "chosen" in name and _SCORE.search(name):
                other = name.replace("chosen", "rejected")
                chosen, rejected = (_number(record.get(column)) for column in (name, other))
                if chosen is not None and rejected is not None and chosen < rejected:
                    yield f"with {name} below {other}"
        if (_number(record.get("margin")) or 0.0) < 0:
            yield "with a margin below 0"


def unread_columns(sample_type: type, record: Mapping[str, Any]) -> Iterator[str]:
    """Columns that are not in the record's sample, except those whose text is part of a column that is read."""
    known = _READ.get(sample_type)
    if known is None or record.keys() <= known:
        return
    read = {name: messages_in(record[name]) or record[name] for name in known if record.get(name) is not None}
    if "text" in record and not read.keys() & {"prompt", "messages", "conversations"}:
        read["text"] = record["text"]
    for name, value in record.items():
        if name in read or name == NOT_READ or value in (None, "", [], {}):
            continue
        if not (isinstance(value, str) and _stands_in(value.strip(), read.values())):
            yield name


_SHORT = 16
"""Characters below which a text may occur anywhere by chance."""


def _stands_in(text: str, values: Iterable[Any]) -> bool:
    """Tell whether a text equals one of the values, or one in their messages, or is a longer part of one."""
    for value in values:
        if isinstance(value, list | Mapping):
            if _stands_in(text, value.values() if isinstance(value, Mapping) else value):
                return True
        elif isinstance(value, str) and (text == value.strip() or (len(text) >= _SHORT and text in value)):
            return True
    return False


def _given(value: Any) -> bool:
    return bool(value)


_SWITCHES = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
"""Values of the texts in CSV files."""


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _SWITCHES.get(value.strip().lower())
    return float(value) if isinstance(value, bool | int | float) else None


def _not_one(value: Any) -> bool:
    return _number(value) != 1


def _off(value: Any) -> bool:
    return _number(value) == 0


def is_flag(value: Any) -> bool:
    """Tell whether a value is a boolean, also as a number or a CSV text."""
    return _number(value) in (0, 1)


def is_verdict(value: Any) -> bool:
    """Tell whether a value judges a single answer, as in KTO's data."""
    return is_flag(value) or str(value).strip().lower() in ("desirable", "undesirable")


def _mask(value: Any) -> bool:
    """Tell whether NeMo's `mask`, the role that is not learnt, is another one than the user."""
    return bool(value) and str(value).lower() not in ("user", "human")


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _words(value: Any) -> bool:
    """Tell whether a value is a text of several words, not a switch such as "on"."""
    return _text(value) and len(value.split()) > 1


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
"""For each column, a function that tells whether a value is meaningful, and a text on what it means and what to do."""


def _rules(names: str, says: Callable[[Any], bool], meaning: str) -> Rules:
    return dict.fromkeys(names.split(), (says, meaning))


_ALWAYS: Rules = {
    **_rules(
        "loss_mask completion_mask assistant_mask assistant_masks response_mask train_mask",
        _not_one,
        "says which tokens are learnt, and texts are tokenized here: say it by weight: 0 of messages, or data.loss_on",
    ),
    **_rules("mask", _mask, "says what is not learnt: say it by weight: 0 of messages, or data.loss_on"),
    **_rules("labels", _numbers, "says which tokens are learnt, and texts are tokenized here: leave them out"),
    **_rules(
        "weight weights sample_weight loss_weight loss_scale example_weight",
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
        is_flag,
        "is a variable of the chat template: give it under chat_template_kwargs, or for all in data.template_args",
    ),
}
"""Columns that can only belong to the prompt."""
_OTHER_PARTS: Rules = {
    **_rules("history", _given, f"{_PART}: the adapter alpaca joins the parts, or one of yours"),
    **_rules("functions function_call", _given, f"{_PART}: call the column 'tools'"),
    **{
        name: (_given, f"{_PART}: say columns: {{system: {name}}} and data.template = chat")
        for name in ("system_prompt", "system_message")
    },
}
_THOUGHTS: Rules = _rules(
    " ".join(THOUGHTS),
    _words,
    "looks like a thought before the answer, of which nothing would be learnt: make messages by an adapter of yours, "
    "with the thought under 'reasoning_content' of the assistant's message",
)
_NAME_OF_THOUGHTS = re.compile("(?:^|_)(?:thinking|thoughts?|reasoning|rationale|cot)(?:_|$)", re.IGNORECASE)
_THOUGHTS_ELSEWHERE = (
    lambda value: any(map(_words, value if isinstance(value, list) else [value])),
    _THOUGHTS["thought"][1],
)
"""The rule of columns such as `thinking_trajectories` and `Complex_CoT`."""
_THOUGHTS_OF_PAIRS = {name: _THOUGHTS[name] for name in ("reasoning_content", "thinking", "thought")}
"""Other columns, such as `rationale`, may be the judge's."""
_BESIDE_MESSAGES: Rules = {
    **_rules(
        "prompt query instruction context",
        _text,
        f"{_PART}, and is in no message: make a message of it",
    ),
    **_rules("available_tools", _given, f"{_PART}: call the column 'tools'"),
    **_rules("response completion output", _text, "looks like an answer, and is in no message: make a message of it"),
}
_SECOND_ANSWERS: Rules = _rules(
    "completion output", _text, "looks like an answer beside 'response': name the one that is meant by columns"
)
_BESIDE_TEXTS: Rules = {
    **_OTHER_PARTS,
    **_rules("instruction input", _given, f"{_PART}: the adapter alpaca joins the parts, or one of yours"),
    **_rules("context contexts passage passages", _given, f"{_PART}: join them by an adapter of yours"),
}
_UNPAIRED: Rules = _rules(
    "label kto_tag", is_verdict, "marks unpaired preferences (KTO), of which no command learns: keep the good answers"
)
_ALL_OF_THE_TEXT = (
    "is beside 'text', of which every token would be learnt: name prompt and response, or give an adapter"
)
_BESIDE_RAW_TEXT: Rules = {
    **_rules(
        "instruction input output question answer completion conversation system tools history chat_template_kwargs",
        _given,
        _ALL_OF_THE_TEXT,
    ),
    **_rules(
        "code solution solutions answers highlights translation sql target_text chosen rejected response responses "
        "explanation thinking",
        _words,
        _ALL_OF_THE_TEXT,
    ),
    **_rules("summary target role", _text, _ALL_OF_THE_TEXT),
}
Kind = Literal["raw text", "texts", "conversation", "pair", "pair of texts", "prompt", "messages to answer"]
_BESIDE_PROMPTS: Rules = {name: _OTHER_PARTS[name] for name in ("history", "system_prompt")}
_RULES: Mapping[Kind, Sequence[Rules]] = {
    "raw text": (_ALWAYS, _OF_TEMPLATE, _BESIDE_RAW_TEXT),
    "texts": (_ALWAYS, _OF_TEMPLATE, _BESIDE_TEXTS, _SECOND_ANSWERS, _UNPAIRED, _THOUGHTS),
    "conversation": (_ALWAYS, _OF_TEMPLATE, _OTHER_PARTS, _UNPAIRED, _BESIDE_MESSAGES, _THOUGHTS),
    "pair": (_ALWAYS, _OF_TEMPLATE, _BESIDE_TEXTS, _THOUGHTS_OF_PAIRS),
    "pair of texts": (_ALWAYS, _OF_TEMPLATE, _BESIDE_TEXTS, _THOUGHTS_OF_PAIRS),
    "prompt": (_OF_TEMPLATE, _BESIDE_PROMPTS),
    "messages to answer": (_OF_TEMPLATE, _BESIDE_PROMPTS, {"prompt": _BESIDE_MESSAGES["prompt"]}),
}
"""Rules by kind of record."""


def require_read(record: Mapping[str, Any], kind: Kind, messages: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raises: ValueError for a column that would change what is learnt or asked, unless its text is part of one of
    the `messages`."""
    for name, value in record.items():
        thought = [_THOUGHTS_ELSEWHERE] if _THOUGHTS in _RULES[kind] and _NAME_OF_THOUGHTS.search(name) else []
        for is_meaningful, meaning in [rules[name] for rules in _RULES[kind] if name in rules] or thought:
            is_repeated = is_meaningful in (_text, _words, _given) and _in_a_message(value, messages)
            if value is not None and is_meaningful(value) and not is_repeated:
                raise ValueError(
                    f"the record has {name!r} = {shown(value)}, which is not read, and {meaning}. Where it means "
                    f"nothing, give it another name: columns: {{not_read: {name}}}"
                )


def _in_a_message(value: Any, messages: Sequence[Mapping[str, Any]]) -> bool:
    return isinstance(value, str) and any(value.strip() in message["content"] for message in messages)


def require_no_messages(name: str, text: str) -> None:
    """Raises: ValueError for a text that looks like a whole list of messages but is not read as one."""
    if not _MESSAGES_AS_TEXT.match(text) or not text.rstrip().endswith("]"):
        return
    try:
        parse_text(text)
        why = (
            "would be written as it stands; messages are {role, content} or {from, value} each, in the columns "
            "'messages', 'conversations' or 'prompt', with data.template = auto or chat"
        )
    except ValueError as error:
        why = f"is no JSON of one ({error}); write a list, or its JSON (Python: json.dumps)"
    meant = "" if name in _OF_ALL else ". Where it is meant as it stands, set data.template to plain"
    raise ValueError(f"field {name!r} is the text {shown(text)}, which looks like a list of messages and {why}{meant}")
