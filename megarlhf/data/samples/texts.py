"""Plain texts as token ids, cut into pieces that a micro-batch can hold: what the pretraining mix of rl learns from,
and of which eval measures the perplexity."""

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
    """Of records with `text`, each of which may give several samples, or none."""

    tokenizer: Path
    longest: int
    """Tokens of a piece."""
    end: bool = True
    """Whether the end of a text is a token of it, to be learnt."""

    def load(self) -> Tokenizer:
        """See `Encoder.load`."""
        return load_tokenizer(self.tokenizer)

    def by(self, loaded: Tokenizer) -> Callable[[int, Mapping[str, Any]], list[Text]]:
        """See `Encoder.by`."""

        def encode(index: int, record: Mapping[str, Any]) -> list[Text]:
            parts = pieces(record["text"], loaded, self.longest, end=self.end)
            if not parts:
                raise Unusable("text of fewer than two tokens")
            return [Text(part) for part in parts]

        return encode

    def key(self) -> dict[str, Any]:
        """See `Encoder.key`."""
        tokenizer = tokenizer_digest(self.tokenizer)
        return {"samples": "texts", "tokenizer": tokenizer, "longest": self.longest, "end": self.end}


def pieces(text: str, tokenizer: Tokenizer, longest: int, *, end: bool = True) -> list[list[int]]:
    """A text as tokens, its end included where `end`, cut into pieces that begin as a text does: with bos, where the
    tokenizer writes it. A piece from which nothing could be learnt is left out."""
    tokens = [*tokenizer.encode(text), *[tokenizer.eos_id] * end]
    lead = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    room = longest - len(lead)
    cut = [[*lead, *tokens[start : start + room]] for start in range(0, len(tokens), room)]
    return [piece for piece in cut if len(piece) > 1 and text.strip()]
