"""Protocols of a tokenizer: for the rest of megarlhf, and for writing conversations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Messages = Sequence[Mapping[str, Any]]


class Tokenizer(Protocol):
    """A tokenizer, as the rest of megarlhf uses it."""

    eos_id: int
    """Ends a response."""
    bos_id: int | None
    """Starts a text; None where the model's own tokenizer starts none with it."""
    pad_id: int
    """Fills rows; masked everywhere, so that any id does."""
    vocab_size: int
    """Ids are 0..vocab_size - 1; a model's embedding may be padded beyond."""

    def tokens(self) -> list[str]:
        """The text of each id, from 0 to vocab_size - 1; "" for an id that stands for nothing."""
        ...

    def encode(self, text: str, *, continuation: bool = False) -> list[int]:
        """Ids of the text, without bos or eos; `continuation` for text that follows other text."""
        ...

    def decode(self, ids: Sequence[int], *, continuation: bool = False) -> str:
        """Text of the ids; `continuation` keeps a leading space. Special tokens leave no text, nor do ids
        beyond the tokenizer's vocabulary, which a model may have."""
        ...


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that a conversation can be written with."""

    name: str
    """For messages."""
    special_ids: frozenset[int]
    """Of tokens that stand for themselves, whatever text is around them: a template's marks."""
    unk_id: int | None
    """What text becomes that it has no piece for; None where it writes every text, or has no token for this alone."""
    named_bos_id: int | None
    """`bos_token` to a template, which may write it where the tokenizer itself does not."""

    takes_white_space: tuple[tuple[str, ...], tuple[str, ...]]
    """Tokens that take in the white space behind them, and those that take in the white space before them."""

    divides: re.Pattern[str] | None
    """Finds tokens at which a text is divided before anything else, so that ids before and behind one do not depend on
    each other; None where there are none."""

    def own_template(self) -> str | None:
        """The chat template that belongs to it; None where there is none."""
        ...

    def render(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any, reply: bool
    ) -> str:
        """The conversation as text, by `template` or its own one; with `reply` up to where the assistant's next
        message begins. Raises: what the template raises."""
        ...

    def encode_rendered(self, text: str, *, continuation: bool = False) -> list[int]:
        """Ids of what a template has written: the names of special tokens are those tokens, and none is added;
        `continuation` for what it has written behind other text."""
        ...

    def marked(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any
    ) -> tuple[list[int], list[bool]]:
        """The whole conversation's ids, and which of them the template marks with `{% generation %}`."""
        ...

    def marked_places(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any
    ) -> list[tuple[int, int]]:
        """Places of the stretches of the rendered text that are marked so."""
        ...
