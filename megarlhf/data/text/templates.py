"""A chat template with its tokenizer: conversations as text and as token ids, and the token that ends a turn."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, cast

from megarlhf.data.text.omissions import Omission
from megarlhf.data.text.replaced import THOUGHTS, kept_strings
from megarlhf.data.text.tool_keys import keys_of_tools, without_key
from megarlhf.data.text.written import WrittenPart, compare
from megarlhf.data.tokenizers.jinja_chat import STANDARD_ROLES, ChatProgram, program_of
from megarlhf.data.tokenizers.protocol import ChatTokenizer
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

Template = Literal["auto", "plain", "chat"]
Message = Mapping[str, Any]
Messages = Sequence[Message]
READ_KEYS = frozenset(("role", "content", "tool_calls", "tool_call_id", "id", *THOUGHTS))
"""Keys of a message that are read, or that only identify messages."""

_OF_CALLS = frozenset(("id", "type", "index", "function", "name", "arguments"))
_NOTHING: tuple[Any, ...] = (None, "", [], {})

_ANSWER = "zqxjkv"
"""An answer that has no meaning in any template."""


@dataclass(frozen=True)
class Conversation:
    """Messages, each with `role` and `content`, and descriptions of tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    unlearnt: frozenset[int] = frozenset()
    """Indices of the assistant's messages that are not to be learnt (`weight: 0`)."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The record's own template variables, its `chat_template_kwargs`."""

    def before(self, count: int) -> Conversation:
        """The conversation of the first `count` messages."""
        unlearnt = frozenset(n for n in self.unlearnt if n < count)
        return replace(self, messages=self.messages[:count], unlearnt=unlearnt)

    @property
    def roles(self) -> list[str]:
        """Roles of the messages."""
        return [message["role"] for message in self.messages]


@dataclass(frozen=True)
class ChatTemplate:
    """Writes conversations for a model. Made by `chat_template`."""

    tokenizer: ChatTokenizer
    given: str | None = None
    """Replaces the tokenizer's own template."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the template."""

    @functools.cached_property
    def program(self) -> ChatProgram:
        """The parsed template. Raises: ValueError for a text that is no template."""
        text = self.given or self.tokenizer.own_template()
        assert text is not None, "see chat_template"
        return program_of(text)

    def text(self, conversation: Conversation, *, reply: bool = False) -> str:
        """Render a conversation; with `reply` up to the beginning of the assistant's next message.

        Raises: ValueError for messages that the template refuses.
        """
        return self._render(self._adapted(conversation.messages), conversation.tools, conversation.variables, reply)

    def _render(
        self, messages: Messages, tools: Any, variables: Mapping[str, Any] = MappingProxyType({}), reply: bool = False
    ) -> str:
        with _refusals(self.tokenizer.name, messages):
            return self.tokenizer.render(
                messages, self.given, {**self.variables, **variables}, tools=tools, reply=reply
            )

    def written(self, conversation: Conversation, text: str, *, reply: bool = False) -> WrittenPart:
        """Find the conversation's parts in `text`, which `self.text` has rendered. Raises: ValueError as `text`."""
        messages, tools = self._adapted(conversation.messages), conversation.tools
        comparison = self._compare(text, messages, tools, conversation.variables, reply)
        return replace(comparison, omissions=[*comparison.omissions, *self._swallowed(text, comparison)])

    def _compare(
        self,
        text: str,
        messages: Messages,
        tools: Any = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        reply: bool = False,
    ) -> WrittenPart:
        def render(messages: Messages, tools: Any) -> str:
            return self._render(messages, tools, variables, reply)

        return compare(text, render, messages, tools, self._kept)

    @functools.cached_property
    def _kept(self) -> re.Pattern[str] | None:
        return kept_strings(self.program.strings)

    def _swallowed(self, text: str, written: WrittenPart) -> list[Omission]:
        """White space that the template writes but the tokenizer drops, beside a token that takes it in: Phi-3's marks
        have `rstrip`."""
        taken = [match.span(match.lastindex or 0) for match in self._takes.finditer(text)] if self._takes else []
        parts = [part for first, end, part in written.spans if any(s < end and first < e for s, e in taken)]
        return [Omission("white_space", part.message, part.key, part.text) for part in parts]

    @functools.cached_property
    def _takes(self) -> re.Pattern[str] | None:
        """A pattern for white space that a token takes in, after or before it. None where no token does."""
        behind, before = ("|".join(map(re.escape, tokens)) for tokens in self.tokenizer.takes_white_space)
        forms = [f"(?:{behind})(\\s+)"] * bool(behind) + [f"(\\s+)(?:{before})"] * bool(before)
        return re.compile("|".join(forms)) if forms else None

    def _adapted(self, messages: Messages) -> Messages:
        """Messages in the form that the template reads: thoughts under its key, tool calls as it writes them."""
        return [self._adapted_message(message) for message in messages]

    def _adapted_message(self, message: Message) -> dict[str, Any]:
        adapted = dict(message)
        if message["role"] == "assistant" and (keys := [key for key in THOUGHTS if message.get(key)]):
            known = self._thought_keys
            if known and not known & set(keys):
                adapted[min(known, key=THOUGHTS.index)] = adapted.pop(keys[0])
                keys = keys[1:]
            thought = next((adapted[key] for key in known if adapted.get(key)), None)
            for key in keys:  # some interfaces give the same thought twice
                if key not in known and adapted[key] == thought:
                    del adapted[key]
        if message.get("tool_calls"):
            content, arguments = self._form_of_calls
            adapted["content"] = message.get("content") or content
            adapted["tool_calls"] = [_with_arguments(call, arguments) for call in message["tool_calls"]]
        return adapted

    @functools.cached_property
    def _thought_keys(self) -> frozenset[str]:
        """Keys of a message under which the template writes a thought."""

        def writes(key: str) -> bool:
            answer = {"role": "assistant", "content": "b", key: "c"}
            return self.program.names(key) and self._writes([{"role": "user", "content": "a"}, answer])

        return frozenset(key for key in THOUGHTS if writes(key))

    @functools.cached_property
    def _form_of_calls(self) -> tuple[str | None, type]:
        """The form of tool calls: the content where a message has none, and the type of arguments (mapping or JSON
        text). The first form with which the template writes a call."""
        for content, kind in itertools.product(("", None), (dict, str)):
            asked = {"role": "user", "content": "a"}
            answer = {"role": "assistant", "content": content, "tool_calls": [_with_arguments(_sample_call("f"), kind)]}
            if self._writes([asked, answer]):
                return content, kind
        return "", dict

    def _writes(self, messages: Messages) -> bool:
        """Tell whether the template writes all of a sample."""
        try:
            return not self._compare(self._render(messages, None), messages).omissions
        except ValueError:
            return False

    def ids(self, text: str, *, continuation: bool = False) -> list[int]:
        """Token ids of a rendered text; `continuation`: it follows other text. The template writes begin-of-sequence
        itself, or there is none."""
        return self.tokenizer.encode_rendered(text, continuation=continuation)

    def marked(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """All ids, with a mask of those that the template marks. Raises: ValueError as `text`."""
        with _refusals(self.tokenizer.name, conversation.messages):
            return self.tokenizer.marked(*self._arguments(conversation), tools=conversation.tools)

    def marked_places(self, conversation: Conversation) -> list[tuple[int, int]]:
        """Start and end of each stretch of `text` that the template marks. Raises: ValueError as `text`."""
        with _refusals(self.tokenizer.name, conversation.messages):
            return self.tokenizer.marked_places(*self._arguments(conversation), tools=conversation.tools)

    def _arguments(self, conversation: Conversation) -> tuple[Messages, str | None, dict[str, Any]]:
        return self._adapted(conversation.messages), self.given, {**self.variables, **conversation.variables}

    @functools.cached_property
    def has_marks(self) -> bool:
        """True where the template marks the assistant's answers and the tokenizer can find the marks."""
        return self.program.has_marks and isinstance(self.tokenizer, HuggingFaceTokenizer)

    @functools.cached_property
    def behind_an_answer(self) -> str:
        """The text that the template writes after the last answer. Raises: ValueError where it writes no answer."""
        asked = {"role": "user", "content": "a"}
        whole, other = (
            self.text(Conversation([asked, {"role": "assistant", "content": answer}])) for answer in (_ANSWER, "yhwbpg")
        )
        _, answer_part, behind = whole.rpartition(_ANSWER)
        if not answer_part:
            wrong = "writes nothing" if whole == other else "changes or cuts the text"
            raise ValueError(
                f"the chat template {wrong} of an assistant's message: it writes {_ANSWER!r} as {whole!r}, so that no "
                "answer could be learnt as it is given; correct the template"
            )
        return behind

    @functools.cached_property
    def turn_end(self) -> int | None:
        """The token that ends an answer: the first special token after it. None where the template writes none."""
        return next((token for token in self.ids(self.behind_an_answer) if token in self.tokenizer.special_ids), None)

    @functools.cached_property
    def behind_turn_end(self) -> list[int]:
        """Ids that the template writes after `turn_end`, such as ChatML's line break."""
        written = self.ids(self.behind_an_answer)
        return [] if self.turn_end is None else written[written.index(self.turn_end) + 1 :]

    @property
    def end(self) -> int:
        """The last token of an answer: `turn_end`, else the tokenizer's end of sequence."""
        return self.tokenizer.eos_id if self.turn_end is None else self.turn_end

    @functools.cached_property
    def end_of_calls(self) -> int:
        """The last special token of an answer that calls tools. An answer with two calls is used if the template writes
        one, since the end of a call does not end the answer."""
        _, kind = self._form_of_calls
        asked = {"role": "user", "content": "a"}
        for names in ("fg", "f"):
            calls = [_with_arguments(_sample_call(name), kind) for name in names]
            with contextlib.suppress(ValueError):
                text = self.text(Conversation([asked, {"role": "assistant", "content": "", "tool_calls": calls}]))
                written = self.ids(text)[len(self.ids(self.text(Conversation([asked]), reply=True))) :]
                tail = [self.end, *self.behind_turn_end]
                if written[-len(tail) :] == tail:
                    return self.end
                if special := [token for token in written if token in self.tokenizer.special_ids]:
                    return special[-1]
        return self.end

    def check(self, conversation: Conversation) -> None:
        """Raises: ValueError for a role or a variable that the template does not know, and that is probably misspelt.
        Omissions are found by `written`."""
        for number, role in enumerate(conversation.roles, 1):
            if role not in STANDARD_ROLES and not self.program.names(role):
                near = difflib.get_close_matches(role, STANDARD_ROLES, n=1)
                known = f"did you mean {near[0]!r}?" if near else f"the usual ones are {', '.join(STANDARD_ROLES)}"
                raise ValueError(
                    f"message {number} has the role {role!r}, which is none that is usual and none that the chat "
                    f"template names; {known}"
                )
        if unread := [name for name in conversation.variables if not self.program.names(name)]:
            raise ValueError(
                f"chat_template_kwargs of the record has {unread[0]!r}, which the chat template does not read; leave "
                "it out, or give a template that reads it (data.chat_template)"
            )

    def unread_keys(self, conversation: Conversation) -> list[str]:
        """Keys of messages that are not read: the rendered text is the same without them."""
        messages = conversation.messages
        keys = {key for part in messages for key in part if key not in READ_KEYS and part[key] not in _NOTHING}
        unread = {key for key in keys if not (self.program.names(key) and self._changes(conversation, key))}
        calls = [call for message in messages for call in message.get("tool_calls") or [] if isinstance(call, Mapping)]
        functions = [call["function"] for call in calls if isinstance(call.get("function"), Mapping)]
        unread |= {f"tool_calls.{key}" for part in (*calls, *functions) for key in part.keys() - _OF_CALLS}
        return sorted(unread)

    def unread_keys_of_tools(self, conversation: Conversation) -> Sequence[str]:
        """Keys in descriptions of tools, such as `enum`, that do not change the rendered text."""
        if not conversation.tools:
            return ()
        described = json.dumps(conversation.tools, sort_keys=True, default=str)
        if described not in self._unread_by_tools:
            if len(self._unread_by_tools) >= 1000:
                self._unread_by_tools.clear()
            keys = sorted(keys_of_tools(conversation.tools))
            asked = Conversation([{"role": "user", "content": "a"}], conversation.tools)
            self._unread_by_tools[described] = [key for key in keys if not self._describes(asked, key)]
        return self._unread_by_tools[described]

    @functools.cached_property
    def _unread_by_tools(self) -> dict[str, Sequence[str]]:
        """Cache of unread keys by the tools: many records have the same ones."""
        return {}

    def _describes(self, conversation: Conversation, key: str) -> bool:
        """Tell whether a key of descriptions of tools changes what the template writes."""
        try:
            without = replace(conversation, tools=without_key(conversation.tools, key))
            return self.text(conversation) != self.text(without)
        except ValueError:
            return True

    def _changes(self, conversation: Conversation, key: str) -> bool:
        """Tell whether a key of messages changes what the template writes."""
        without = [{name: part for name, part in message.items() if name != key} for message in conversation.messages]
        try:
            return self.text(conversation) != self.text(replace(conversation, messages=without))
        except ValueError:
            return True


def _sample_call(name: str) -> dict[str, Any]:
    id_of_call = 8 * "a" + name  # Mistral's have nine characters
    return {"id": id_of_call, "type": "function", "function": {"name": name, "arguments": {"x": "y"}}}


def _with_arguments(call: Any, kind: type) -> Any:
    """A tool call with its arguments as a mapping or as JSON."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], kind)}
    if not isinstance(call, Mapping) or isinstance(arguments := call.get("arguments"), kind):
        return call
    if kind is str:
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {**call, "arguments": json.loads(arguments)} if isinstance(arguments, str) else call


def has_template(tokenizer: Tokenizer) -> bool:
    """Tell whether a chat template belongs to the tokenizer."""
    known = isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer)
    return known and cast(ChatTokenizer, tokenizer).own_template() is not None


def chat_template(
    tokenizer: Tokenizer, given: str | None = None, variables: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The template `given`, else the tokenizer's. Raises: ValueError for a missing or invalid template."""
    if not isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer):
        raise ValueError(
            f"a conversation needs a Hugging Face or SentencePiece tokenizer, got {type(tokenizer).__name__}; set "
            "data.template to plain"
        )
    if given is None and cast(ChatTokenizer, tokenizer).own_template() is None:
        kind = "a SentencePiece model has" if isinstance(tokenizer, SentencePieceTokenizer) else f"{tokenizer.name} has"
        raise ValueError(
            f"{kind} no chat template, which conversations are written with; name one (data.chat_template: a jinja "
            "file), or set data.template to plain, which reads texts"
        )
    template = ChatTemplate(cast(ChatTokenizer, tokenizer), given, variables or {})
    _ = template.program
    return template


@contextlib.contextmanager
def _refusals(name: str, messages: Sequence[Message]) -> Iterator[None]:
    """Turn a template's errors into a ValueError with the roles. A template is a program and may raise anything."""
    try:
        yield
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages) or "none"
        line = re.sub(r"\s+", " ", str(error).partition("\n")[0])
        raise ValueError(
            f"the chat template of {name} refuses the messages (roles: {roles}): {type(error).__name__}: "
            f"{line}; change the messages to what the template expects, or the template"
        ) from error
