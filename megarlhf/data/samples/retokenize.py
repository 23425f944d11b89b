"""Prompt and response as another tokenizer writes them, for a model that cannot read the actor's token ids.

The text is what is kept: with messages the conversation is rendered again by the other model's chat template, otherwise
the prompt's text is taken as it is. The response follows as a continuation, and where it had ended by itself it ends
with the token by which the other template ends a turn (of a text: with the other end of sequence), whichever token the
actor ended it with. So `megarlhf rm` makes its samples.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megarlhf.data.records.conversations import tools_of, variables_of
from megarlhf.data.text.omissions import Kind, require_written
from megarlhf.data.text.templates import ChatTemplate, Conversation, chat_template
from megarlhf.data.text.writer import with_bos
from megarlhf.data.tokenizers.tokenizer import Tokenizer


class TextTooLong(ValueError):
    """A text that the model cannot read, and that must not be cut."""


@dataclass(frozen=True)
class Retokenized:
    """One sample, by the other tokenizer."""

    tokens: list[int]
    """Prompt and response, with begin and end of sequence where there are any."""
    truncated: bool
    """The beginning of the text is missing."""


@dataclass(frozen=True)
class Retokenizer:
    """How samples are written for a model."""

    tokenizer: Tokenizer
    max_tokens: int
    """What the model can read."""
    cuts: bool = False
    """Cut the beginning of a longer text, instead of refusing it."""
    may_drop: tuple[Kind, ...] = ()
    """What the chat template may leave out of a conversation."""

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return chat_template(self.tokenizer)

    def __call__(
        self,
        prompt: str,
        messages: Sequence[Mapping[str, Any]] | None,
        response: str,
        *,
        finished: bool,
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> Retokenized:
        """Of the response to a prompt, whose text was rendered from `messages` if there are any, and from the `tools`
        in the record's `fields`.

        Raises: TextTooLong; ValueError for messages that the chat template refuses.
        """
        tokenizer, end = self.tokenizer, self.tokenizer.eos_id
        if messages is None:
            start, bos_id = with_bos(tokenizer.encode(prompt), tokenizer), tokenizer.bos_id
        else:
            template = self._template
            variables = {name: part for name, part in variables_of(fields).items() if template.program.names(name)}
            asked = Conversation([dict(message) for message in messages], tools_of(fields), variables=variables)
            template.check(asked)
            text = template.text(asked, reply=True)
            require_written(template.written(asked, text, reply=True).omissions, asked.roles, self.may_drop)
            start, end = template.ids(text), template.end
            bos_id = template.tokenizer.named_bos_id
        tokens = start + tokenizer.encode(response, continuation=True) + [end] * finished
        if len(tokens) <= self.max_tokens:
            return Retokenized(tokens, truncated=False)
        if not self.cuts:
            raise TextTooLong(
                f"its text has {len(tokens)} tokens for the reward model, which may read {self.max_tokens}; lower "
                "rollout.max_response_tokens or data.max_prompt_tokens, raise train.max_tokens_per_micro_batch where "
                "that is the limit, or set too_long: cut (what is cut is counted)"
            )
        bos = start[:1] if start[:1] == [bos_id] else []
        return Retokenized(bos + tokens[len(tokens) - self.max_tokens + len(bos) :], truncated=True)
