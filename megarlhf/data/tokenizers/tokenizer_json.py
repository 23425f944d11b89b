"""tokenizer.json, read as it stands.

transformers' own classes take vocabulary and merges out of the file and put parts of their own in place of the rest:
LlamaTokenizer's over a byte-level file drop every space. Which class is taken depends on config.json beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megarlhf.data.tokenizers.files import damaged
from megarlhf.data.tokenizers.settings import Mismatch, Settings, settled, text_of

logger = logging.getLogger(__name__)


def of_json(directory: Path) -> Any:
    """The tokenizer of the file, with the names and templates of the files beside it.

    Raises: Mismatch for added tokens that the file lacks and that have no place in it; whatever transformers and
    tokenizers raise for a damaged file.
    """
    settings = Settings.read(directory)
    kind = settings.kind()
    inputs = (kind or PreTrainedTokenizerFast).model_input_names
    made = _OfTheFile.from_pretrained(
        str(directory),
        local_files_only=True,
        of_class=settings.unstated_names(kind),
        added=settings.added(),
        model_input_names=settings.stated.get("model_input_names", inputs),
        **({} if settings.of_mistral() else {"fix_mistral_regex": False}),  # else it warns of every large vocabulary
    )
    return settled(made, settings)


def of_directory(directory: Path) -> Any:
    """For a model of transformers: the file's tokenizer, and AutoTokenizer's where there is no tokenizer.json. Raises:
    ValueError, OSError, KeyError for what cannot be read."""
    if not (directory / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    with damaged(directory / "tokenizer.json"):
        return of_json(directory)


class _OfTheFile(PreTrainedTokenizerFast):
    """What the file says of its own tokens holds, whatever tokenizer_config.json says of them."""

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """See `PreTrainedTokenizerFast`, which calls it with all that it has read."""
        of_class, added = kwargs.pop("of_class"), kwargs.pop("added")
        made: dict[str, Any] = super().convert_to_native_format(**kwargs)
        file = made["tokenizer_object"]
        tokens = {token.content: token for token in file.get_added_tokens_decoder().values()}

        def of_file(token: Any) -> Any:
            return tokens.get(text_of(token) or "", token)

        def known(token: str) -> bool:
            return token in added or file.token_to_id(token) is not None

        made |= {name: token for name, token in of_class.items() if name not in made and known(token)}
        _require_known(made, known, cls.SPECIAL_TOKENS_ATTRIBUTES)
        for name in cls.SPECIAL_TOKENS_ATTRIBUTES:
            if made.get(name) is not None:
                made[name] = of_file(made[name])
        if isinstance(further := made.get("extra_special_tokens"), list):
            made["extra_special_tokens"] = [of_file(token) for token in further]
        made["added_tokens_decoder"] = _lacking(file, added, made.get("added_tokens_decoder") or {})
        return made


def _require_known(made: dict[str, Any], known: Callable[[str], bool], names: Collection[str]) -> None:
    """A special token that no file has an id for would get a new row of the model, about which nobody has learnt. A
    line names it. Raises: Mismatch for the begin and the end, which every text would have."""
    named = [(name, text_of(made.get(name))) for name in names]
    if isinstance(further := made.get("extra_special_tokens"), list | tuple):
        named += [("extra_special_tokens", text_of(token)) for token in further]
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
    """Tokens that the files beside name and tokenizer.json lacks: they follow its last one. Raises: Mismatch where
    they would get other ids than those files say."""
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
    for place, stated in enumerate(sorted(lacking), size):
        if place != stated:
            raise Mismatch(
                f"{lacking[stated]!r} is token {stated} in tokenizer_config.json or added_tokens.json, and no token in "
                f"tokenizer.json, which has {size} tokens: files of two tokenizers; copy the model's again"
            )
    return {stated: described.get(stated, AddedToken(token, special=True)) for stated, token in lacking.items()}
