"""Tokenizers from a tokenizer.json, read as it is.

transformers' classes take vocabulary and merges from the file and replace the rest by parts of their own: with
LlamaTokenizer, a byte-level file loses every space. The class depends on the config.json beside the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megarlhf.data.tokenizers.files import damaged
from megarlhf.data.tokenizers.settings import Mismatch, Settings, token_text, with_settings

logger = logging.getLogger(__name__)


def of_json(directory: Path) -> Any:
    """The tokenizer of the file, with the special tokens and templates of the files beside it.

    Raises: Mismatch for added tokens that the file lacks and that have no place in it; errors of transformers and
    tokenizers for a damaged file.
    """
    settings = Settings.read(directory)
    kind = settings.kind()
    inputs = (kind or PreTrainedTokenizerFast).model_input_names
    tokenizer = _OfTheFile.from_pretrained(
        str(directory),
        local_files_only=True,
        of_class=settings.unstated_names(kind),
        added=settings.added(),
        model_input_names=settings.stated.get("model_input_names", inputs),
        **({} if settings.of_mistral() else {"fix_mistral_regex": False}),  # else it warns of every large vocabulary
    )
    return with_settings(tokenizer, settings)


def of_directory(directory: Path) -> Any:
    """A tokenizer for a model of transformers: the file's, else AutoTokenizer's without a tokenizer.json. Raises:
    ValueError, OSError, KeyError for files that cannot be read."""
    if not (directory / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    with damaged(directory / "tokenizer.json"):
        return of_json(directory)


class _OfTheFile(PreTrainedTokenizerFast):
    """A fast tokenizer in which the file's own tokens take precedence over tokenizer_config.json."""

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """Hook of `PreTrainedTokenizerFast`, called with everything that it has read."""
        of_class, added = kwargs.pop("of_class"), kwargs.pop("added")
        arguments: dict[str, Any] = super().convert_to_native_format(**kwargs)
        file = arguments["tokenizer_object"]
        tokens = {token.content: token for token in file.get_added_tokens_decoder().values()}

        def of_file(token: Any) -> Any:
            return tokens.get(token_text(token) or "", token)

        def known(token: str) -> bool:
            return token in added or file.token_to_id(token) is not None

        arguments |= {name: token for name, token in of_class.items() if name not in arguments and known(token)}
        _require_known(arguments, known, cls.SPECIAL_TOKENS_ATTRIBUTES)
        for name in cls.SPECIAL_TOKENS_ATTRIBUTES:
            if arguments.get(name) is not None:
                arguments[name] = of_file(arguments[name])
        if isinstance(further := arguments.get("extra_special_tokens"), list):
            arguments["extra_special_tokens"] = [of_file(token) for token in further]
        arguments["added_tokens_decoder"] = _lacking(file, added, arguments.get("added_tokens_decoder") or {})
        return arguments


def _require_known(arguments: dict[str, Any], known: Callable[[str], bool], names: Collection[str]) -> None:
    """Warn of special tokens without an id in any file: they would get a new, untrained row of the model. Raises:
    Mismatch for begin and end, which every text would have."""
    named = [(name, token_text(arguments.get(name))) for name in names]
    if isinstance(further := arguments.get("extra_special_tokens"), list | tuple):
        named += [("extra_special_tokens", token_text(token)) for token in further]
    unknown = {token: name for name, token in named if token is not None and not known(token)}
    for token, name in unknown.items():
        if name in ("bos_token", "eos_token"):
            raise Mismatch(
                f"{name} is {token!r} in tokenizer_config.json or special_tokens_map.json, and tokenizer.json has no "
                "such token: files of two tokenizers; copy the model's again, or name a token that it has"
            )
    if unknown:
        logger.warning(
            "tokenizer_config.json or special_tokens_map.json name special tokens that tokenizer.json lacks, and that "
            "get ids behind its last: %s",
            ", ".join(f"{token!r} ({name})" for token, name in unknown.items()),
        )


def _lacking(file: Any, added: dict[str, int], described: dict[int, Any]) -> dict[int, Any]:
    """Tokens of the other files that tokenizer.json lacks. They follow its last one. Raises: Mismatch where they would
    get other ids than those files state."""
    from tokenizers import AddedToken

    contradicted = {token: stated for token, stated in added.items() if file.token_to_id(token) not in (None, stated)}
    if contradicted:
        token, stated = next(iter(contradicted.items()))
        logger.warning(
            "%d added tokens have other ids in tokenizer_config.json or added_tokens.json than in tokenizer.json, by "
            "which texts are read: %r is %d there, and %d in tokenizer.json",
            *(len(contradicted), token, stated, file.token_to_id(token)),
        )
    lacking = {stated: token for token, stated in added.items() if file.token_to_id(token) is None}
    size = file.get_vocab_size()
    for next_id, stated in enumerate(sorted(lacking), size):
        if next_id != stated:
            raise Mismatch(
                f"{lacking[stated]!r} is token {stated} in tokenizer_config.json or added_tokens.json, and no token in "
                f"tokenizer.json, which has {size} tokens: files of two tokenizers; copy the model's again"
            )
    return {stated: described.get(stated, AddedToken(token, special=True)) for stated, token in lacking.items()}
