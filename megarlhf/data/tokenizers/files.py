"""Files of a tokenizer: listing, digest, and files that are not read."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarlhf.data.tokenizers.settings import Mismatch, Settings

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "*vocab.json", "*merges.txt", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Files of a tokenizer and its chat template."""
_FOREIGN = ("tekken.json", "*.tiktoken", "tiktoken.model")
"""Files of mistral-common and of tiktoken."""
_SAVE = "transformers.AutoTokenizer.from_pretrained(DIR{options}).save_pretrained(DIR)"
"""Code that writes a tokenizer.json, where transformers can."""
_TODAY = "strftime_now"
"""The function with which a chat template asks for the date."""


def tokenizer_files(tokenizer: str | Path) -> list[Path]:
    """Files of a tokenizer and its chat template: a SentencePiece model, or those in a directory."""
    tokenizer = Path(tokenizer)
    if tokenizer.is_file():
        return [tokenizer]
    return sorted({path for pattern in _FILES for path in tokenizer.glob(pattern)})


def tokenizer_digest(tokenizer: str | Path) -> str:
    """SHA-256 of `tokenizer_files`."""
    digest = hashlib.sha256()
    for path in tokenizer_files(tokenizer):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def writes_the_date(tokenizer: str | Path, template: str | None) -> bool:
    """Tell whether the chat template asks for today's date: tomorrow it may write something else."""
    if template is not None:
        return _TODAY in template
    named = [
        path for path in tokenizer_files(tokenizer) if path.suffix == ".jinja" or path.name == "tokenizer_config.json"
    ]
    return any(_TODAY.encode() in path.read_bytes() for path in named)


def has_tokenizer(directory: Path) -> bool:
    """Tell whether `load_tokenizer` finds a tokenizer."""
    if directory.is_file():
        return True
    known = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return known or byte_pairs(directory) is not None


def byte_pairs(directory: Path) -> tuple[Path, Path] | None:
    """GPT-2's two files, if present. Raises: ValueError where there are several of either."""
    candidates = [sorted(directory.glob(f"*{name}")) for name in ("vocab.json", "merges.txt")]
    if not all(candidates):
        return None
    if several := next((paths for paths in candidates if len(paths) > 1), None):
        names = ", ".join(path.name for path in several)
        raise ValueError(f"{directory} has several of a tokenizer's files: {names}; keep the ones that are meant")
    return candidates[0][0], candidates[1][0]


def require_readable(directory: Path) -> None:
    """Raises: ValueError for a tokenizer that needs code from its directory, or that only other programs read."""
    with damaged(directory / "tokenizer_config.json"):
        code = Settings.read(directory).code()
    if code is not None:
        raise ValueError(
            f"the tokenizer of {directory} needs code from there (auto_map in tokenizer_config.json: {code}), which is "
            f"never run; a tokenizer.json is read without it: {_SAVE.format(options=', trust_remote_code=True')}"
        )
    has_other = any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json", "gpt2-vocab.json"))
    foreign = None if has_other else next((p for pattern in _FOREIGN for p in sorted(directory.glob(pattern))), None)
    if foreign is not None:
        raise ValueError(
            f"no tokenizer in {directory} but {foreign.name}, which other programs read; a tokenizer.json is needed: "
            f"copy that of the model's own repository, or write one: {_SAVE.format(options='')}"
        )


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Keep transformers from importing torch. No tokenizer needs torch, and its import takes three times as long as the
    rest of a tokenizing process's start. Afterwards a user's code may import it as usual."""
    if "torch" in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # its import fails, as if it were not installed
    try:
        yield
    finally:
        del modules["torch"]


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Turn a reader's errors into a ValueError that names the file. A `Mismatch` of valid files passes."""
    try:
        yield
    except Mismatch:
        raise
    except Exception as error:  # of the readers: JSON, keys, values
        raise ValueError(
            f"{path}, or a file that belongs to it (tokenizer_config.json), cannot be read as a Hugging Face "
            f"tokenizer: {type(error).__name__}: {str(error).partition(chr(10))[0]}; copy the tokenizer of the model "
            "there again"
        ) from error
