"""A chat template with its tokenizer: conversations as text and as token ids, and the token that ends a turn."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from megarlhf.data.jinja_chat import STANDARD_ROLES, ChatProgram, program_of
from megarlhf.data.tokenizer import ChatTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

Template = Literal["auto", "plain", "chat"]
Message = Mapping[str, Any]

_ANSWER = "zqxjkv"
"""An answer that no template takes for something else."""


@dataclass(frozen=True)
class Conversation:
    """Messages, each with `role` and `content`, and descriptions of tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    unlearnt: frozenset[int] = frozenset()
    """Numbers of the assistant's messages that are not to be learnt, as their `weight: 0` says."""

    def before(self, number: int) -> Conversation:
        """Its first messages."""
        return Conversation(self.messages[:number], self.tools, frozenset(n for n in self.unlearnt if n < number))


@dataclass(frozen=True)
class ChatTemplate:
    """How conversations are written for a model. Made by `chat_template`."""

    tokenizer: ChatTokenizer
    given: str | None = None
    """In place of the tokenizer's own template."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables that the template reads."""

    @functools.cached_property
    def program(self) -> ChatProgram:
        """What the template reads and writes. Raises: ValueError where it is no template."""
        text = self.given or self.tokenizer.own_template()
        assert text is not None, "see chat_template"
        return program_of(text)

    def text(self, conversation: Conversation, *, reply: bool = False) -> str:
        """As the template writes it; with `reply` up to where the assistant's next message begins.

        Raises: ValueError for messages that the template refuses.
        """
        with _refusals(self.tokenizer.name, conversation.messages):
            return self.tokenizer.render(
                conversation.messages, self.given, self.variables, tools=conversation.tools, reply=reply
            )

    def ids(self, text: str, *, continuation: bool = False) -> list[int]:
        """Of what the template has written; `continuation`: behind other text. It writes begin-of-sequence itself, or
        there is none."""
        return self.tokenizer.encode_rendered(text, continuation=continuation)

    def marked(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """All ids, and which of them the template marks. Raises: ValueError as `text`."""
        with _refusals(self.tokenizer.name, conversation.messages):
            return self.tokenizer.marked(conversation.messages, self.given, self.variables, tools=conversation.tools)

    @functools.cached_property
    def has_marks(self) -> bool:
        """Whether the template marks what the assistant says, for a tokenizer that can find the marks again."""
        return self.program.has_marks and isinstance(self.tokenizer, HuggingFaceTokenizer)

    @functools.cached_property
    def behind_an_answer(self) -> str:
        """What the template writes behind the text of a last answer. Raises: ValueError where it writes no answer."""
        asked = {"role": "user", "content": "a"}
        whole = self.text(Conversation([asked, {"role": "assistant", "content": _ANSWER}]))
        _, found, behind = whole.rpartition(_ANSWER)
        if not found:
            raise ValueError(
                "the chat template writes nothing of an assistant's message, so that nothing could be learnt; correct "
                "the template"
            )
        return behind

    @functools.cached_property
    def turn_end(self) -> int | None:
        """The token that ends an answer: the first special one that the template writes behind it; None where it
        writes none."""
        return next((token for token in self.ids(self.behind_an_answer) if token in self.tokenizer.special_ids), None)

    @functools.cached_property
    def behind_turn_end(self) -> list[int]:
        """What the template writes behind that token: ChatML's line break."""
        written = self.ids(self.behind_an_answer)
        return [] if self.turn_end is None else written[written.index(self.turn_end) + 1 :]

    @property
    def end(self) -> int:
        """The last token of an answer: `turn_end`, else the tokenizer's end of sequence."""
        return self.tokenizer.eos_id if self.turn_end is None else self.turn_end

    def check(self, conversation: Conversation) -> None:
        """Raises: ValueError for what the template would leave out in silence: a role that it does not know, tools or
        calls of tools that it does not read."""
        for number, message in enumerate(conversation.messages, 1):
            role = message["role"]
            if role not in STANDARD_ROLES and not self.program.names(role):
                near = difflib.get_close_matches(role, STANDARD_ROLES, n=1)
                known = f"did you mean {near[0]!r}?" if near else f"the usual ones are {', '.join(STANDARD_ROLES)}"
                raise ValueError(
                    f"message {number} has the role {role!r}, which is none that is usual and none that the chat "
                    f"template names; {known}"
                )
            if "tool_calls" in message and not self.program.names("tool_calls"):
                raise ValueError(
                    f"message {number} ({role!r}) has tool_calls, which the chat template leaves out; give a template "
                    "that writes them (data.chat_template), or put the calls into the content"
                )
        if conversation.tools and not self.program.names("tools"):
            raise ValueError(
                "the record has tools, which the chat template leaves out; give a template that writes them "
                "(data.chat_template), or leave the column out"
            )


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether a chat template belongs to the tokenizer."""
    known = isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer)
    return known and cast(ChatTokenizer, tokenizer).own_template() is not None


def chat_template(
    tokenizer: Tokenizer, given: str | None = None, variables: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """The template `given`, else the tokenizer's. Raises: ValueError where there is none, or it is no template."""
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


class _refusals:
    """What a template raises, as a ValueError with the roles."""

    def __init__(self, name: str, messages: Sequence[Message]) -> None:
        self._name, self._messages = name, messages

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):  # a template is a program: what it raises itself, and what fails in it
            return
        roles = ", ".join(message["role"] for message in self._messages) or "none"
        line = re.sub(r"\s+", " ", str(error).partition("\n")[0])
        raise ValueError(
            f"the chat template of {self._name} refuses the messages (roles: {roles}): {type(error).__name__}: "
            f"{line}; change the messages to what the template expects, or the template"
        ) from error
