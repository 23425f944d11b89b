"""Prompts and answers as token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from megarlhf.data.sample_types import Unusable
from megarlhf.data.text.assistant_mask import Answered, Inexact, LossOn, answered, learnt_turns
from megarlhf.data.text.omissions import Kind, NotWritten, require_written
from megarlhf.data.text.templates import ChatTemplate, Conversation, chat_template
from megarlhf.data.tokenizers.tokenizer import Tokenizer


class TokenWriter:
    """Writes prompts and answers by one tokenizer and one template."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, may_drop: tuple[Kind, ...], *, skips: bool
    ) -> None:
        """may_drop: parts that the template may leave out of a conversation
        skips: skip conversations that are not written exactly, instead of refusing them"""
        self.tokenizer, self._template, self._may_drop, self._skips = tokenizer, template, may_drop, skips

    @property
    def template(self) -> ChatTemplate:
        """The template. Raises: ValueError where there is none."""
        return self._template or chat_template(self.tokenizer)

    def answered(self, conversation: Conversation, loss_on: LossOn) -> Answered:
        """See `assistant_mask.answered`. Raises: Unusable, ValueError."""
        self.template.check(conversation)
        if not learnt_turns(conversation, loss_on):
            raise Unusable(f"{'every' if loss_on == 'all' else 'the last'} answer is not to be learnt")
        with self._skipping_inexact():
            answers = answered(self.template, conversation, loss_on, self._may_drop)
        return replace(answers, omissions=(*answers.omissions, *self._unread(conversation)))

    def asked(self, asked: str | Conversation) -> tuple[str, list[int], tuple[str, ...]]:
        """A prompt's text and ids, and descriptions of what is left out. Raises: Unusable, ValueError."""
        if isinstance(asked, str):
            return asked, text_tokens(asked, self.tokenizer), ()
        self.template.check(asked)
        text = self.template.text(asked, reply=True)
        with self._skipping_inexact():
            written = self.template.written(asked, text, reply=True)
            omissions = require_written(written.omissions, asked.roles, self._may_drop)
        return text, self.template.ids(text), (*omissions, *self._unread(asked))

    def _unread(self, conversation: Conversation) -> list[str]:
        """Descriptions of keys that are not read. Raises: ValueError for a key that would change what is asked."""
        keys = self.template.unread_keys(conversation)
        if "tools" in keys:
            raise ValueError(
                "a message has 'tools', which the chat template does not read there; give them as the record's column "
                "'tools'"
            )
        unread = {
            "messages that nobody reads": keys,
            "tools that the chat template does not write": self.template.unread_keys_of_tools(conversation),
        }
        return [f"with keys of {what} ({', '.join(names)})" for what, names in unread.items() if names]

    @contextlib.contextmanager
    def _skipping_inexact(self) -> Iterator[None]:
        try:
            yield
        except Inexact as error:
            if self._skips:
                raise Unusable("answers that cannot be told from the rest, token by token") from error
            raise
        except NotWritten as error:
            if self._skips:
                raise Unusable("messages of which the chat template leaves out something") from error
            raise


def text_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a plain prompt. Raises: Unusable for an empty one."""
    tokens = tokenizer.encode(text)
    if not text.strip() or not tokens:
        raise Unusable("empty prompt")
    return with_bos(tokens, tokenizer)


def with_bos(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Tokens with begin-of-sequence in front, if the tokenizer has one and the text does not begin with it already."""
    if tokenizer.bos_id is None or tokens[:1] == [tokenizer.bos_id]:
        return tokens
    return [tokenizer.bos_id, *tokens]


def response_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    if not text.strip():
        raise Unusable("empty response")
    return [*tokenizer.encode(text, continuation=True), tokenizer.eos_id]
