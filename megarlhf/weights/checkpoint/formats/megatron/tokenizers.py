"""Megatron-LM's `--tokenizer-type` and the files that belong to it, as a checkpoint's arguments state them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarlhf.data.tokenizers.files import has_tokenizer

FILES: Mapping[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "Llama3Tokenizer": ("tokenizer_model",),
    "MistralTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "MultimodalTokenizer": ("tokenizer_model",),
}
"""Arguments that name a tokenizer's files, by its type."""
_OF_OTHER_FORMS = ("Llama3Tokenizer", "MistralTokenizer", "TikTokenizer", "MultimodalTokenizer")
"""Types whose file has another form; the same tokenizer on the Hugging Face hub has a tokenizer.json."""


def tokenizer_place(args: Mapping[str, Any]) -> Path | None:
    """Value for `model.tokenizer`: a SentencePiece file, a Hugging Face directory, or the directory of GPT-2's two
    files; None where the arguments name none that can be read as it is."""
    kind = args.get("tokenizer_type")
    paths = [Path(str(args[name])) for name in FILES.get(str(kind), ()) if args.get(name)]
    if not paths or kind in _OF_OTHER_FORMS or len({path.parent for path in paths}) > 1:
        return None
    return paths[0] if len(paths) == 1 else paths[0].parent


def stored_tokenizer(checkpoint: Path, args: Mapping[str, Any]) -> Path | None:
    """Folder with the tokenizer that a run saved in its checkpoint: Megatron-LM (`--save-tokenizer-assets`; its
    TikTokenizer is of another form) in the iteration, NeMo 2 beside `weights/`. None: there is none that can be read.
    """
    places = [] if args.get("tokenizer_type") == "TikTokenizer" else [checkpoint / "tokenizer"]
    places.append(checkpoint.parent / "context" / "nemo_tokenizer")
    return next((place for place in places if place.is_dir() and has_tokenizer(place)), None)


def tokenizer_in_words(args: Mapping[str, Any]) -> str:
    """A sentence on the tokenizer that the arguments name, and what to do with it; "" where they name none."""
    kind = args.get("tokenizer_type")
    if not kind:
        return ""
    given = [f"--{name.replace('_', '-')} {args[name]}" for name in FILES.get(str(kind), ()) if args.get(name)]
    origin = f"the checkpoint was trained with --tokenizer-type {' '.join([str(kind), *given])}"
    if (place := tokenizer_place(args)) is not None:
        return f"{origin}: set model.tokenizer to {place}, or to where that is here"
    if kind in _OF_OTHER_FORMS:
        return (
            f"{origin}: set model.tokenizer to a directory with the same tokenizer as a tokenizer.json of Hugging Face"
        )
    if given:
        return f"{origin}: put these files into one directory, and set model.tokenizer to it"
    return (
        f"{origin}, and names no file: set model.tokenizer to the tokenizer's directory, or to its SentencePiece file"
    )
