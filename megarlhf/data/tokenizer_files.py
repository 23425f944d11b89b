"""The files that a tokenizer is read from: which there are, what they are, and GPT-2's pair of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "*vocab.json", "*merges.txt", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Whatever a tokenizer is read from."""
_TODAY = "strftime_now"
"""The function by which a chat template asks for the date."""
_END_OF_TEXT = "<|endoftext|>"
"""GPT-2's only special token."""


def tokenizer_files(place: str | Path) -> list[Path]:
    """The files that make a tokenizer and its chat template: a SentencePiece model, or those of a directory."""
    place = Path(place)
    if place.is_file():
        return [place]
    return sorted({path for pattern in _FILES for path in place.glob(pattern)})


def tokenizer_digest(place: str | Path) -> str:
    """SHA-256 of `tokenizer_files`."""
    digest = hashlib.sha256()
    for path in tokenizer_files(place):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def writes_the_date(place: str | Path, template: str | None) -> bool:
    """Whether the chat template asks for today's date: tomorrow it may write something else."""
    if template is not None:
        return _TODAY in template
    named = [path for path in tokenizer_files(place) if path.suffix == ".jinja" or path.name == "tokenizer_config.json"]
    return any(_TODAY.encode() in path.read_bytes() for path in named)


def has_tokenizer(directory: Path) -> bool:
    """Whether `load_tokenizer` finds one there."""
    if directory.is_file():
        return True
    known = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return known or byte_pairs(directory) is not None


def byte_pairs(directory: Path) -> tuple[Path, Path] | None:
    """GPT-2's two files. Raises: ValueError where there are several of either."""
    found = [sorted(directory.glob(f"*{name}")) for name in ("vocab.json", "merges.txt")]
    if not all(found):
        return None
    if several := next((paths for paths in found if len(paths) > 1), None):
        names = ", ".join(path.name for path in several)
        raise ValueError(f"{directory} has several of a tokenizer's files: {names}; keep the ones that are meant")
    return found[0][0], found[1][0]


def of_byte_pairs(vocab: Path, merges: Path) -> Any:
    """As transformers' GPT2Tokenizer: pairs of bytes, and `<|endoftext|>` as the only special token, which begins and
    ends a text. Settings that stand beside the files (tokenizer_config.json) count."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    settings: dict[str, Any] = {}
    with damaged(vocab):
        fast = FastTokenizer(models.BPE.from_file(str(vocab), str(merges)))
        given = vocab.parent / "tokenizer_config.json"
        if given.is_file():
            settings = json.loads(given.read_text(encoding="utf-8"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    end = _END_OF_TEXT if fast.token_to_id(_END_OF_TEXT) is not None else None
    names = {name: settings.get(name, end) for name in ("bos_token", "eos_token", "unk_token")}
    special = {name: token["content"] if isinstance(token, dict) else token for name, token in names.items()}
    made = PreTrainedTokenizerFast(tokenizer_object=fast, **{k: v for k, v in special.items() if v is not None})
    made.chat_template = settings.get("chat_template")
    return made


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """transformers imports torch where it can, which takes three times as long as all else that a process for
    tokenizing begins with; no tokenizer needs it. Behind this, code of a user's may import it as ever."""
    if "torch" in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # importing it fails, as where it is not installed
    try:
        yield
    finally:
        del modules["torch"]


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Raises: ValueError in place of what a reader raises of a file."""
    try:
        yield
    except Exception as error:  # what the readers below it raise: JSON, keys, values
        raise ValueError(
            f"{path}, or a file that belongs to it (tokenizer_config.json), cannot be read as a Hugging Face "
            f"tokenizer: {type(error).__name__}: {str(error).partition(chr(10))[0]}; copy the tokenizer of the model "
            "there again"
        ) from error
