"""Records become texts or conversations, by their columns. No template and no tokenizer is used yet.

`plain` reads texts: `prompt` with `response`, or with `chosen` and `rejected`. `chat` reads conversations: `messages`
or `conversations`, else `prompt` (a text is one user message) with the answers, each a text or messages. `auto` reads
whichever the columns allow, and refuses a record that has both. Messages are `{role, content}`, or ShareGPT's
`{from, value}`, as a list or as its JSON text. A record with `text` and none of these is raw text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarlhf.config.conversations import RESERVED_VARIABLES
from megarlhf.data.json_text import parse_text, with_lists
from megarlhf.data.records.messages import messages_of, require_order, without_weights
from megarlhf.data.records.record_fields import describe_value, missing, present, required_text
from megarlhf.data.sources.unread_columns import require_no_messages, require_read
from megarlhf.data.text.templates import Conversation, Template
from megarlhf.data.tokenizers.jinja_chat import STANDARD_ROLES

Record = Mapping[str, Any]

_LISTS = ("messages", "conversations")
CONVERSATION_COLUMNS = ("prompt", *_LISTS)
"""Columns that become the prompt. They are not among its `fields`."""
_OF_MESSAGES = (*CONVERSATION_COLUMNS, "response", "chosen", "rejected")
"""Columns that may hold messages."""

VARIABLES = "chat_template_kwargs"
"""The column with a record's own template variables."""

BESIDE_A_CONVERSATION = ("system", "tools", VARIABLES)
"""Columns that only a chat template writes. Plain texts have no place for them."""


@dataclass(frozen=True)
class PairOfTexts:
    """A preference between two texts."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class PairOfConversations:
    """A preference between two conversations that differ only in their last message, the answer."""

    chosen: Conversation
    rejected: Conversation


@dataclass(frozen=True)
class RawText:
    """A text of which every token is learnt."""

    text: str


class EmptyText(Exception):
    """A record that is empty where a text is needed. It is skipped; the message is the reason."""


def read_lists(record: Record, template: Template) -> Record:
    """The record with lists of messages in place of their JSON text, unless the template mode is `plain`."""
    return record if template == "plain" else with_lists(record, _OF_MESSAGES)


def prompt_of(record: Record, template: Template) -> str | Conversation:
    """The prompt to answer. Raises: ValueError; EmptyText."""
    record = read_lists(record, template)
    column = _list_column(record, template, ("prompt",))
    asked = _text_or_question(record, template, ("prompt",)) if column is None else conversation_of(record, column)
    if isinstance(asked, Conversation) and column is not None:
        require_read(record, "messages to answer", asked.messages)
    else:
        require_read(record, "prompt")
    if isinstance(asked, str):
        return asked
    if asked.messages[-1]["role"] == "assistant":
        raise ValueError(
            f"the conversation in {column or 'prompt'!r} ends with a message of 'assistant', which would become part "
            "of the prompt; expected a message of the user, the system or a tool as the last one: drop the last "
            "message, or train on it with `megarlhf sft`"
        )
    return _require_texts(asked)


def example_of(record: Record, template: Template) -> tuple[str, str] | Conversation | RawText:
    """A prompt and a response, a conversation that ends with the assistant, or raw text. Raises: ValueError;
    EmptyText."""
    record = read_lists(record, template)
    if present(record, "text") and not any(present(record, name) for name in (*CONVERSATION_COLUMNS, "response")):
        return _raw_text(record, template)
    column = _list_column(record, template, ("prompt", "response"))
    if column is not None:
        whole = conversation_of(record, column)
        has_texts_too = present(record, "prompt") and present(record, "response")  # data.template says which is meant
        beside = {name: value for name, value in record.items() if name != "response" or not has_texts_too}
        require_read(beside, "conversation", whole.messages)
    elif isinstance(record.get("response"), list | Mapping) and template != "plain":
        whole = _with_answers(record)
    else:
        asked = _text_or_question(record, template, ("prompt", "response"))
        response = required_text(record, "response")
        _require_a_text("response", response, template)
        require_read(record, "texts")
        if isinstance(asked, str):
            return asked, response
        answer = {"role": "assistant", "content": response}
        whole = replace(asked, messages=[*asked.messages, answer])
    if "assistant" not in whole.roles:
        if unusual := [role for role in whole.roles if role not in STANDARD_ROLES]:
            raise ValueError(
                f"fine-tuning on messages expects answers of 'assistant', got none, and messages of {unusual[0]!r} "
                f"(roles: {', '.join(whole.roles)}); rename the role"
            )
        raise EmptyText("no message of the assistant")
    return _require_texts(whole)


def _raw_text(record: Record, template: Template) -> RawText:
    """Raises: ValueError; EmptyText."""
    require_read(record, "raw text")
    if template == "chat":
        raise ValueError(
            "the record has 'text' alone, which no chat template writes; set data.template to plain, by which every "
            "token of it is learnt, or give 'messages', or 'prompt' and 'response'"
        )
    text = required_text(record, "text")
    _require_a_text("text", text, template)
    if not text.strip():
        raise EmptyText("empty text")
    return RawText(text)


def _require_a_text(name: str, text: str, template: Template) -> None:
    """Raises: ValueError for messages in a text. With `plain` the text, code for instance, is meant as it is."""
    if template != "plain":
        require_no_messages(name, text)


def _with_answers(record: Record) -> Conversation:
    """A prompt followed by a `response` of messages. Only the response is learnt. Raises: ValueError; EmptyText."""
    asked = _text_or_question(record, "chat", ("prompt", "response"))
    assert isinstance(asked, Conversation), "chat makes conversations"
    require_read(record, "texts")
    behind = _messages(record, "response")
    before, whole = len(asked.messages), [*asked.messages, *behind]
    require_order(whole, "response")
    weighed = {index for index, message in enumerate(whole) if "weight" in message}
    return replace(asked, messages=without_weights(whole), unlearnt=frozenset({*range(before), *weighed}))


def pair_of(record: Record, template: Template) -> PairOfTexts | PairOfConversations:
    """A prompt and two responses. Raises: ValueError; EmptyText."""
    record = read_lists(record, template)
    for name in ("chosen", "rejected"):
        if not present(record, name):
            raise missing(record, name)
    kinds = {isinstance(record[name], str) for name in ("chosen", "rejected")}
    if kinds == {True}:
        require_read(record, "pair of texts")
    if len(kinds) > 1:
        raise ValueError(
            f"'chosen' is {describe_value(record['chosen'])}, 'rejected' is {describe_value(record['rejected'])}; "
            "expected two texts or two lists of messages"
        )
    if kinds == {True}:
        asked = _asked_of_pair(record, template)
        if isinstance(asked, str):
            for name in ("chosen", "rejected"):
                _require_a_text(name, record[name], template)
            return PairOfTexts(asked, record["chosen"], record["rejected"])
        sides = [[{"role": "assistant", "content": record[name]}] for name in ("chosen", "rejected")]
    elif template == "plain":
        raise ValueError(
            "'chosen' and 'rejected' are lists of messages, and data.template = plain reads texts; set it to chat"
        )
    else:
        sides = [_messages(record, name) for name in ("chosen", "rejected")]
        require_read(record, "pair", sides[0])
        asked = None
        if any(present(record, name) for name in CONVERSATION_COLUMNS):
            asked = _asked_of_pair(record, "chat")
            assert isinstance(asked, Conversation), "chat makes conversations"
    return _compared(record, asked, sides)


def _asked_of_pair(record: Record, template: Template) -> str | Conversation:
    """The `prompt`, else the conversation before the answers. Raises: ValueError; EmptyText."""
    names = ("prompt", "chosen", "rejected")
    column = _list_column(record, template, names)
    if column is not None and not present(record, "prompt"):
        return conversation_of(record, column)
    return _text_or_question(record, template, names)


def _compared(record: Record, asked: Conversation | None, sides: list[list[dict[str, Any]]]) -> PairOfConversations:
    """The pair from whole conversations on both sides, or from answers to `asked`. Raises: ValueError; EmptyText."""
    if any("weight" in side[-1] for side in sides):
        raise EmptyText("the answer is not to be learnt")
    sides = [without_weights(side) for side in sides]
    answers_only = all(side[0]["role"] == "assistant" for side in sides)
    if answers_only:
        if asked is None:
            raise ValueError(
                "'chosen' and 'rejected' begin with the answer, and there is no 'prompt' (or 'messages') that they "
                "answer; add it, or put the whole conversation into both"
            )
        sides = [[*asked.messages, *side] for side in sides]
    else:
        sides = [_with_system(record, side) for side in sides]
        common = _common(*sides)
        if asked is not None and not _leads_to(asked.messages, common):
            raise ValueError(
                "'chosen' and 'rejected' are whole conversations that do not begin with 'prompt'; give one of the two: "
                "whole conversations without a prompt, or answers only"
            )
    tools = asked.tools if asked is not None else tools_of(record)
    variables = variables_of(record)
    if sides[0] == sides[1]:
        raise EmptyText("chosen equals rejected")
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        require_order(side, name)
        if side[-1]["role"] != "assistant":
            raise ValueError(f"{name!r} ends with a message of {side[-1]['role']!r}; expected the assistant's answer")
    if _common(*sides) != sides[0][:-1] or len(sides[0]) != len(sides[1]):
        raise EmptyText("chosen and rejected differ before their last message")
    _require_no_others(record, sides)
    chosen, rejected = (_require_texts(Conversation(side, tools, variables=variables)) for side in sides)
    return PairOfConversations(chosen, rejected)


def _require_no_others(record: Record, sides: list[list[dict[str, Any]]]) -> None:
    """Check `messages` beside a prompt, which are not read: published sets keep a part of the pair there. Raises:
    ValueError where they are something else."""
    for column in (name for name in _LISTS if present(record, name) and present(record, "prompt")):
        given = without_weights(_messages(record, column))
        if not any(given in (side[: len(given)], side[-len(given) :]) for side in sides):
            raise ValueError(
                f"{column!r} beside 'prompt', 'chosen' and 'rejected' is no part of either conversation, and would not "
                "be read; leave one of them out"
            )


def _common(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest common beginning."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return first[:same]


def _leads_to(asked: list[dict[str, Any]], common: list[dict[str, Any]]) -> bool:
    """Tell whether the common beginning has what is asked: it starts with `asked`, or it ends with `asked` if that is
    a single message."""
    return common[: len(asked)] == asked or (len(asked) == 1 and common[-1:] == asked)


# --- which columns --------------------------------------------------------------------------------


def _list_column(record: Record, template: Template, texts: Sequence[str]) -> str | None:
    """The column with the conversation. None where the record is read by the columns `texts`.

    Raises: ValueError for a record with both while data.template is `auto`.
    """
    lists = [name for name in _LISTS if present(record, name)]
    if template == "plain" or not lists:
        return None
    if len(lists) > 1:
        raise ValueError("the record has both 'messages' and 'conversations'; leave one of them out")
    if template == "auto" and all(present(record, name) for name in texts):
        both = " and ".join(map(repr, texts))
        raise ValueError(
            f"the record has both {lists[0]!r} and {both}; say which is meant: data.template = chat reads "
            f"{lists[0]!r}, plain reads {both}"
        )
    return lists[0]


def _text_or_question(record: Record, template: Template, names: Sequence[str]) -> str | Conversation:
    """The `prompt` as a text, or with `chat` as a conversation. Raises: ValueError; EmptyText."""
    for name in names:
        if not present(record, name):
            raise missing(record, name)
    prompt = record["prompt"]
    if isinstance(prompt, str):
        require_no_messages("prompt", prompt)
        if template != "chat":
            _require_no_conversation(record)
            return prompt
        if not prompt.strip():
            raise EmptyText("empty prompt")
        messages = _with_system(record, [{"role": "user", "content": prompt}])
        return Conversation(messages, tools_of(record), variables=variables_of(record))
    if template == "plain" or not isinstance(prompt, list | Mapping):
        return required_text(record, "prompt")
    return conversation_of(record, "prompt")


def _require_no_conversation(record: Record) -> None:
    """Raises: ValueError for a system message or tools beside plain texts."""
    beside = [name for name in BESIDE_A_CONVERSATION if present(record, name) and record[name]]
    if beside:
        raise ValueError(
            f"the record has {' and '.join(map(repr, beside))} beside its texts, which only a chat template writes; "
            f"set data.template to chat, or give the column another name: columns: {{not_read: {beside[0]}}}"
        )


def conversation_of(record: Record, column: str) -> Conversation:
    """The conversation in a column, with the record's `system` and `tools`. Raises: ValueError; EmptyText."""
    messages = _with_system(record, _messages(record, column))
    require_order(messages, column)
    unlearnt = frozenset(index for index, message in enumerate(messages) if "weight" in message)
    return Conversation(without_weights(messages), tools_of(record), unlearnt, variables_of(record))


def _messages(record: Record, column: str) -> list[dict[str, Any]]:
    """Raises: ValueError; EmptyText."""
    value = record[column]
    if value == []:
        raise EmptyText("a conversation without messages")
    if isinstance(value, str):
        require_no_messages(column, value)
    return messages_of([value] if isinstance(value, Mapping) else value, column)


def _with_system(record: Record, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prepend the record's `system` message, if any. Raises: ValueError where the messages begin with one too."""
    system = record.get("system")
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise ValueError(f"field 'system' is {describe_value(system)}, expected a text: the system message")
    if messages[0]["role"] in ("system", "developer"):
        raise ValueError(
            "the record has a column 'system', and its conversation begins with a system message; leave one of them out"
        )
    return [{"role": "system", "content": system}, *messages]


def tools_of(record: Record) -> list[dict[str, Any]] | None:
    """Descriptions of the tools, from a list or its JSON text (Parquet). Raises: ValueError."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_text(tools)
        except ValueError as error:
            raise ValueError(f"field 'tools' is a text that is no JSON: {error}; expected a list of objects") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"field 'tools' is {describe_value(tools)}, expected a list of objects that describe tools")
    return [dict(tool) for tool in tools]


def variables_of(record: Record) -> dict[str, Any]:
    """The record's own template variables, from an object or its JSON text. Raises: ValueError."""
    given = record.get(VARIABLES)
    if isinstance(given, str) and given.strip():
        with contextlib.suppress(ValueError):
            given = parse_text(given)
    if not given:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"field {VARIABLES!r} is {describe_value(given)}, expected an object: variables of the chat template"
        )
    if reserved := [name for name, value in given.items() if value is not None and name in RESERVED_VARIABLES]:
        raise ValueError(
            f"field {VARIABLES!r} has {reserved[0]!r}, which is no variable that a record may set: "
            f"{RESERVED_VARIABLES[reserved[0]]}"
        )
    return {name: value for name, value in given.items() if value not in (None, "", [], {})}


def _require_texts(conversation: Conversation) -> Conversation:
    """The conversation itself. Raises: EmptyText for an empty message of the user or the assistant."""
    for message in conversation.messages:
        role = message["role"]
        if role in ("user", "assistant") and not message["content"].strip() and not message.get("tool_calls"):
            raise EmptyText("empty response" if role == "assistant" else "empty message of the user")
    return conversation
