"""Protocols of a tokenizer: for the rest of megarlhf, and for writing conversations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Messages = Sequence[Mapping[str, Any]]


class Tokenizer(Protocol):
    """A tokenizer as the rest of megarlhf uses it."""

    eos_id: int
    """Token that ends a response."""
    bos_id: int | None
    """Token that starts a text. None where the model's own tokenizer writes none."""
    pad_id: int
    """Token that fills rows. It is masked everywhere, so any id would do."""
    vocab_size: int
    """Ids are 0..vocab_size - 1. A model's embedding may be padded beyond."""

    def tokens(self) -> list[str]:
        """The text of each id from 0 to vocab_size - 1. "" for an unused id."""
        ...

    def encode(self, text: str, *, continuation: bool = False) -> list[int]:
        """Ids of the text, without bos or eos; `continuation` for text that follows other text."""
        ...

    def decode(self, ids: Sequence[int], *, continuation: bool = False, special: bool = False) -> str:
        """Text of the ids; `continuation` keeps a leading space. Special tokens leave no text, unless `special`; ids
        beyond the tokenizer's vocabulary, which a model may have, never do."""
        ...


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that can write conversations."""

    name: str
    """Name for messages."""
    special_ids: frozenset[int]
    """Ids of tokens that do not depend on the text around, such as a template's marks."""
    unk_id: int | None
    """Token for unknown text. None where every text is known, or the token has other uses too."""
    named_bos_id: int | None
    """The template's `bos_token`. It may write it where the tokenizer itself does not."""

    takes_white_space: tuple[tuple[str, ...], tuple[str, ...]]
    """Tokens that absorb white space after them, and tokens that absorb white space before them."""

    divides: re.Pattern[str] | None
    """Pattern for tokens at which a text is split first, so that the ids on both sides are independent. None where
    there are none."""

    def own_template(self) -> str | None:
        """The tokenizer's own chat template, if any."""
        ...

    def render(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any, reply: bool
    ) -> str:
        """The conversation as text, by `template` or the own one; with `reply` up to the beginning of the assistant's
        next message. Raises: errors of the template."""
        ...

    def encode_rendered(self, text: str, *, continuation: bool = False) -> list[int]:
        """Ids of a rendered text: names of special tokens become these tokens, and none is added. `continuation` for
        text that follows other text."""
        ...

    def marked(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any
    ) -> tuple[list[int], list[bool]]:
        """The whole conversation's ids, with a mask of those that the template marks with `{% generation %}`."""
        ...

    def marked_places(
        self, messages: Messages, template: str | None, variables: Mapping[str, Any], *, tools: Any
    ) -> list[tuple[int, int]]:
        """Start and end of each marked stretch of the rendered text."""
        ...
