"""Plain texts as token ids, cut into pieces that fit a micro-batch. Used by rl's pretraining mix and eval's
perplexity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarlhf.data.samples.encoders import Unusable
from megarlhf.data.tokenizers.files import tokenizer_digest
from megarlhf.data.tokenizers.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Text:
    """A text, or a piece of one."""

    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """Encoder of records with `text`. Each gives one or several samples."""

    tokenizer: Path
    longest: int
    """Most tokens of a piece."""
    end: bool = True
    """Add an end-of-sequence token to each text."""

    def load(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer)

    def by(self, loaded: Tokenizer) -> Callable[[int, Mapping[str, Any]], list[Text]]:

        def encode(index: int, record: Mapping[str, Any]) -> list[Text]:
            parts = pieces(record["text"], loaded, self.longest, end=self.end)
            if not parts:
                raise Unusable("text of fewer than two tokens")
            return [Text(part) for part in parts]

        return encode

    def key(self) -> dict[str, Any]:
        tokenizer = tokenizer_digest(self.tokenizer)
        return {"samples": "texts", "tokenizer": tokenizer, "longest": self.longest, "end": self.end}


def pieces(text: str, tokenizer: Tokenizer, longest: int, *, end: bool = True) -> list[list[int]]:
    """Tokenize a text and cut it into pieces. Each begins with bos, if the tokenizer writes one. With `end` the text
    ends with eos. A piece from which nothing could be learnt is left out."""
    tokens = [*tokenizer.encode(text), *[tokenizer.eos_id] * end]
    lead = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    room = longest - len(lead)
    cut = [[*lead, *tokens[start : start + room]] for start in range(0, len(tokens), room)]
    return [piece for piece in cut if len(piece) > 1 and text.strip()]
