"""Settings in the small files beside a tokenizer: its class, names of special tokens, added tokens, the begin."""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Names of the special tokens that are used here."""
_WRITES_AS_STATED = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
"""Classes that write bos by `add_bos_token`, not by tokenizer.json's post-processor. They did so in transformers 4,
with which their models were trained. transformers 5 goes by the file alone."""
_GENERAL = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "MistralCommonBackend")
"""Classes without special tokens of their own."""


class Mismatch(ValueError):
    """Valid files of a tokenizer that contradict each other."""


@dataclass(frozen=True)
class Settings:
    """The small files of a tokenizer's directory."""

    directory: Path
    stated: dict[str, Any]
    """tokenizer_config.json."""
    model: dict[str, Any]
    """config.json."""

    @classmethod
    def read(cls, directory: Path) -> Settings:
        """Read the files. Raises: ValueError for an invalid tokenizer_config.json. An invalid config.json is ignored:
        its other readers report it."""
        stated = read_object(directory / "tokenizer_config.json")
        try:
            model = read_object(directory / "config.json")
        except ValueError:
            model = {}
        return cls(directory, stated, model)

    def class_name(self) -> str | None:
        """The tokenizer's class name without `Fast`. None where no file names it."""
        name = self.stated.get("tokenizer_class") or self.model.get("tokenizer_class")
        if name is None:
            from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

            name = TOKENIZER_MAPPING_NAMES.get(self.model.get("model_type"))
        return None if name is None or name in _GENERAL else str(name).removesuffix("Fast")

    def kind(self) -> type[Any] | None:
        """The class. None for one that transformers does not have."""
        from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

        name = self.class_name()
        return None if name is None else tokenizer_class_from_name(name)

    def of_mistral(self) -> bool:
        """Tell whether the model may be one whose tokenizer.json was published with a wrong regular expression."""
        return str(self.model.get("model_type")).startswith(("mistral", "ministral", "pixtral", "voxtral"))

    def code(self) -> str | None:
        """The code in the directory that the tokenizer needs (`trust_remote_code`), if any."""
        named = self.stated.get("auto_map")
        if isinstance(named, dict):
            named = named.get("AutoTokenizer")
        if isinstance(named, list | tuple):
            named = next(filter(None, named), None)
        return None if named is None else str(named)

    def unstated_names(self, kind: type[Any] | None) -> dict[str, str]:
        """Special tokens that tokenizer_config.json does not name, from special_tokens_map.json or else the class."""
        beside = read_object(self.directory / "special_tokens_map.json")
        parameters = {} if kind is None else inspect.signature(kind.__init__).parameters
        names = {}
        for name in NAMES:
            if name in self.stated:
                continue
            default = parameters[name].default if name in parameters else None
            token = token_text(beside.get(name)) or token_text(default)
            if token is not None:
                names[name] = token
        return names

    def added(self) -> dict[str, int]:
        """Ids of added tokens by their text, from tokenizer_config.json and added_tokens.json."""
        tokens = {str(text): int(token) for text, token in read_object(self.directory / "added_tokens.json").items()}
        decoder = self.stated.get("added_tokens_decoder") or {}
        return tokens | {str(token_text(token)): int(token_id) for token_id, token in decoder.items()}

    def begin(self) -> bool | None:
        """Tell whether a text begins with bos. None where the tokenizer itself decides it."""
        stated = self.stated.get("add_bos_token")
        return bool(stated) if stated is not None and self.class_name() in _WRITES_AS_STATED else None

    def rows(self) -> int | None:
        """The size of the model's embedding. None where it is unknown."""
        text_model = self.model.get("text_config")
        rows = self.model.get("vocab_size") or (text_model.get("vocab_size") if isinstance(text_model, dict) else None)
        return rows if isinstance(rows, int) else None

    def chat_template(self) -> str | None:
        """The chat template of the files beside the tokenizer. Of several with names, the one for tools, as in
        transformers."""
        beside = self.directory / "chat_template.jinja"
        if beside.is_file():
            return beside.read_text(encoding="utf-8")
        own_template = self.stated.get("chat_template")
        if own_template is None:
            own_template = read_object(self.directory / "chat_template.json").get("chat_template")
        if isinstance(own_template, list):
            named = {template["name"]: template["template"] for template in own_template}
            own_template = named.get("tool_use", named.get("default"))
        return own_template


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Empty without a file. Raises: ValueError."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds {type(content).__name__}, expected an object")
    return content


def token_text(token: Any) -> str | None:
    """The text of a token that is given as text, or as an object with flags. None without a token."""
    if isinstance(token, dict):
        token = token.get("content")
    return None if token is None else str(token)


def with_settings(tokenizer: Any, settings: Settings) -> Any:
    """A tokenizer of transformers with the begin token and template of its directory, and without a padding token that
    the model has no row for."""
    begin = settings.begin()
    if begin is not None and begin != writes_bos(tokenizer):
        logger.info(
            "%s: a text begins %s bos, as add_bos_token of tokenizer_config.json says; tokenizer.json says otherwise",
            settings.directory,
            "with" if begin else "without",
        )
        tokenizer.add_bos_token = begin
    if tokenizer.chat_template is None:
        tokenizer.chat_template = settings.chat_template()
    rows, padding = settings.rows(), tokenizer.pad_token_id
    if rows is not None and padding is not None and padding >= rows:
        logger.info(
            "%s: the padding token %r is %d, and the model has rows for ids up to %d: it is left out, which nothing "
            "needs",
            *(settings.directory, tokenizer.pad_token, padding, rows - 1),
        )
        return _without_padding(tokenizer)
    return tokenizer


def writes_bos(tokenizer: Any) -> bool:
    """Tell whether a tokenizer of transformers begins a text with its bos."""
    return tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def _without_padding(tokenizer: Any) -> Any:
    """The tokenizer without its padding token, also in texts."""
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerFast

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] != tokenizer.pad_token_id]
    if isinstance(vocabulary := content["model"].get("vocab"), dict):
        vocabulary.pop(tokenizer.pad_token, None)
    content["padding"] = None
    names = {
        name: token for name, token in tokenizer.special_tokens_map.items() if name in NAMES and name != "pad_token"
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer.from_str(json.dumps(content)),
        chat_template=tokenizer.chat_template,
        split_special_tokens=tokenizer.split_special_tokens,
        model_max_length=tokenizer.model_max_length,
        **names,
    )


def require_ids(tokenizer: Any, settings: Settings) -> None:
    """Raises: Mismatch where an added token does not have the id that the files state."""
    own = tokenizer.get_vocab()
    for token, stated in settings.added().items():
        if (made_id := own.get(token)) != stated:
            would_be = "none" if made_id is None else made_id
            raise Mismatch(
                f"{settings.directory}: the token {token!r} is {stated} in tokenizer_config.json or added_tokens.json, "
                f"and would be {would_be} by the vocabulary: files of two tokenizers; copy the model's again"
            )
