"""Comparisons of a tokenizer: with the text that it encodes, and with transformers' AutoTokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarlhf.data.tokenizers.sample_texts import TEXTS, where_they_differ
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

_SAMPLE = "Ab  12\n\n\tEf"


def text_not_kept(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """A text and its changed form after encoding and decoding, for a tokenizer that joins white space or changes
    letters. None for one that keeps texts. Characters that it does not know are left out of the test."""
    unknown = tokenizer.unk_id if isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer) else None
    text = "".join(letter for letter in _SAMPLE if unknown is None or unknown not in tokenizer.encode(letter)).strip()
    read = tokenizer.decode(tokenizer.encode(text))
    return None if read == text else (text, read)


def transformers_difference(directory: Path, tokenizer: Tokenizer) -> str | None:
    """Describe how transformers' AutoTokenizer of a directory reads texts differently from `tokenizer`, including the
    tokens added before and after. None where it does not, or the tokenizer is SentencePiece's. Its classes replace
    parts of tokenizer.json by their own, depending on config.json."""
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
    except Exception as error:  # noqa: BLE001 - of config.json, of code, of a missing package
        return f"{name} cannot read it ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    finally:
        transformers.logging.set_verbosity(verbosity)
    different = [reading for reading in read if reading[1] != reading[2]]
    if not different:
        return None
    text, ids, other = different[0]
    mine, others = where_they_differ(ids, other)
    return (
        f"{name} ({type(theirs).__name__}) makes other ids of {len(different)} of {len(texts)} sample texts, such as "
        f"of {text!r}: {others} in place of {mine}"
    )
