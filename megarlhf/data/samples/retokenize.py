"""Prompt and response by another tokenizer, for a model that cannot read the actor's token ids.

The text is kept. Messages are rendered again by the other model's chat template; a prompt without messages is taken as
it is. The response follows as a continuation. If it was finished, it ends with the token that ends a turn in the other
template (for a plain text: the other end of sequence), whichever token the actor ended it with. Samples of
`megarlhf rm` are written the same way.
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
    """A text that is too long for the model and must not be cut."""


@dataclass(frozen=True)
class Retokenized:
    """One sample, by the other tokenizer."""

    tokens: list[int]
    """Tokens of prompt and response, with begin and end of sequence if any."""
    truncated: bool
    """The beginning of the text was cut off."""


@dataclass(frozen=True)
class Retokenizer:
    """Writes samples for a model with another tokenizer."""

    tokenizer: Tokenizer
    max_tokens: int
    """Most tokens that the model can read."""
    cuts: bool = False
    """Cut the beginning of a longer text instead of refusing it."""
    may_drop: tuple[Kind, ...] = ()
    """Parts of a conversation that the chat template may leave out."""

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
        has_turns: bool = False,
    ) -> Retokenized:
        """Tokens of a prompt and its response. The prompt was rendered from `messages`, if any, and from the `tools` in
        the record's `fields`.

        has_turns: whether the actor has sampled answers among the messages; the template may leave out white space and
            thoughts

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
            may_drop = (*self.may_drop, "white_space", "thoughts") if has_turns else self.may_drop
            require_written(template.written(asked, text, reply=True).omissions, asked.roles, may_drop)
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
