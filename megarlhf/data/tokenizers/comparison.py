"""Compares: a tokenizer keeps texts, and transformers' AutoTokenizer makes the same ids of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarlhf.data.tokenizers.sample_texts import TEXTS, where_they_differ
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

_SAMPLE = "Ab  12\n\n\tEf"


def changed_text(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """A text and what it becomes as ids and back, for a tokenizer that puts one space for runs of white space, or
    changes letters; None for one that keeps them. Characters that it does not know say nothing of that."""
    unknown = tokenizer.unk_id if isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer) else None
    text = "".join(letter for letter in _SAMPLE if unknown is None or unknown not in tokenizer.encode(letter)).strip()
    read = tokenizer.decode(tokenizer.encode(text))
    return None if read == text else (text, read)


def read_otherwise(directory: Path, tokenizer: Tokenizer) -> str | None:
    """How transformers' AutoTokenizer reads texts by a directory otherwise than `tokenizer`, with what stands before
    and behind them; None where it does not, or where SentencePiece alone reads them. Its classes put parts of their own
    in place of tokenizer.json's, by what config.json says beside it."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    import transformers

    own = tokenizer.of_transformers
    name = f"AutoTokenizer of transformers {transformers.__version__}"
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # what it warns of is compared here
    try:
        theirs: Any = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        special = [token.content for token in own.added_tokens_decoder.values() if token.special]
        texts = [*TEXTS, *(f"a {token} b\n{token}c" for token in special[:3])]
        read = [(text, list(own.encode(text)), list(theirs.encode(text))) for text in texts]
    except Exception as error:  # noqa: BLE001 - of config.json, of code, of a package that is not installed
        return f"{name} cannot read it ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    finally:
        transformers.logging.set_verbosity(verbosity)
    different = [each for each in read if each[1] != each[2]]
    if not different:
        return None
    text, ids, other = different[0]
    mine, others = where_they_differ(ids, other)
    return (
        f"{name} ({type(theirs).__name__}) makes other ids of {len(different)} of {len(texts)} sample texts, such as "
        f"of {text!r}: {others} in place of {mine}"
    )
