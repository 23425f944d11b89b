"""Tokenizers from vocab.json and merges.txt: GPT-2's pair of files, which other models have too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarlhf.data.tokenizers.settings import Settings, read_object, require_ids, with_settings


def of_byte_pairs(vocab: Path, merges: Path) -> Any:
    """The tokenizer as transformers reads it, by the directory's class if that reads such files, else by GPT-2's.
    Settings beside the files are used: OPT's begin token, added tokens, a chat template.

    Raises: ValueError, and errors of transformers, for damaged files.
    """
    from transformers import GPT2Tokenizer

    settings = Settings.read(vocab.parent)
    kind = settings.kind()
    if kind is None or "merges_file" not in kind.vocab_files_names:
        kind = GPT2Tokenizer
    tokens = {*read_object(vocab), *settings.added()}
    unstated = settings.unstated_names(kind)
    names = {name: token if token in tokens else None for name, token in unstated.items()}
    tokenizer = kind.from_pretrained(
        str(vocab.parent),
        local_files_only=True,
        vocab_file=str(vocab),
        merges_file=str(merges),
        **names,
    )
    require_ids(tokenizer, settings)
    return with_settings(tokenizer, settings)
