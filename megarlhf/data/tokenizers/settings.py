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
"""Of the special tokens that have a use here."""
_WRITES_AS_STATED = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
"""Classes that write bos as `add_bos_token` says, whatever the post-processor of tokenizer.json writes: so did they in
transformers 4, with which their models were trained. transformers 5 goes by the file alone."""
_GENERAL = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "MistralCommonBackend")
"""Classes that name no special token themselves."""


class Mismatch(ValueError):
    """Files of a tokenizer that are sound, and of which two say different things."""


@dataclass(frozen=True)
class Settings:
    """The small files of one directory."""

    directory: Path
    stated: dict[str, Any]
    """tokenizer_config.json."""
    model: dict[str, Any]
    """config.json."""

    @classmethod
    def read(cls, directory: Path) -> Settings:
        """Raises: ValueError, JSONDecodeError for a tokenizer_config.json that is none. A config.json that cannot be
        read counts as none: whoever needs it says what is wrong with it."""
        stated = read_object(directory / "tokenizer_config.json")
        try:
            model = read_object(directory / "config.json")
        except ValueError:
            model = {}
        return cls(directory, stated, model)

    def class_name(self) -> str | None:
        """The class of the tokenizer, without `Fast`; None where nothing says it."""
        name = self.stated.get("tokenizer_class") or self.model.get("tokenizer_class")
        if name is None:
            from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

            name = TOKENIZER_MAPPING_NAMES.get(self.model.get("model_type"))
        return None if name is None or name in _GENERAL else str(name).removesuffix("Fast")

    def kind(self) -> type[Any] | None:
        """The class itself; None for one that transformers does not have."""
        from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

        name = self.class_name()
        return None if name is None else tokenizer_class_from_name(name)

    def of_mistral(self) -> bool:
        """True where the model may be one of those whose tokenizer.json was published with a wrong expression."""
        return str(self.model.get("model_type")).startswith(("mistral", "ministral", "pixtral", "voxtral"))

    def code(self) -> str | None:
        """The code in the directory that the tokenizer needs (`trust_remote_code`); None where it needs none."""
        named = self.stated.get("auto_map")
        if isinstance(named, dict):
            named = named.get("AutoTokenizer")
        if isinstance(named, list | tuple):
            named = next(filter(None, named), None)
        return None if named is None else str(named)

    def unstated_names(self, kind: type[Any] | None) -> dict[str, str]:
        """Special tokens that tokenizer_config.json does not name: those of special_tokens_map.json, else the class's
        own."""
        beside = read_object(self.directory / "special_tokens_map.json")
        parameters = {} if kind is None else inspect.signature(kind.__init__).parameters
        names = {}
        for name in NAMES:
            if name in self.stated:
                continue
            default = parameters[name].default if name in parameters else None
            token = text_of(beside.get(name)) or text_of(default)
            if token is not None:
                names[name] = token
        return names

    def added(self) -> dict[str, int]:
        """Ids of added tokens, by their text, as tokenizer_config.json and added_tokens.json state them."""
        tokens = {str(text): int(token) for text, token in read_object(self.directory / "added_tokens.json").items()}
        decoder = self.stated.get("added_tokens_decoder") or {}
        return tokens | {str(text_of(token)): int(number) for number, token in decoder.items()}

    def begin(self) -> bool | None:
        """True where a text begins with bos; None where the tokenizer's own files say it."""
        stated = self.stated.get("add_bos_token")
        return bool(stated) if stated is not None and self.class_name() in _WRITES_AS_STATED else None

    def rows(self) -> int | None:
        """The size of the model's embedding; None where nothing says it."""
        text_model = self.model.get("text_config")
        rows = self.model.get("vocab_size") or (text_model.get("vocab_size") if isinstance(text_model, dict) else None)
        return rows if isinstance(rows, int) else None

    def chat_template(self) -> str | None:
        """The chat template, of the files that may have one alone. Several with names: that for tools, as transformers
        takes it."""
        beside = self.directory / "chat_template.jinja"
        if beside.is_file():
            return beside.read_text(encoding="utf-8")
        given = self.stated.get("chat_template")
        if given is None:
            given = read_object(self.directory / "chat_template.json").get("chat_template")
        if isinstance(given, list):
            named = {each["name"]: each["template"] for each in given}
            given = named.get("tool_use", named.get("default"))
        return given


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. Raises: ValueError."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds {type(content).__name__}, expected an object")
    return content


def text_of(token: Any) -> str | None:
    """The text of a token that is written as a text, or as an object with flags; None where none is named."""
    if isinstance(token, dict):
        token = token.get("content")
    return None if token is None else str(token)


def settled(made: Any, settings: Settings) -> Any:
    """A tokenizer of transformers with the begin and the template that its directory states, and without a padding
    token that the model has no row for."""
    begin = settings.begin()
    if begin is not None and begin != writes_bos(made):
        logger.info(
            "%s: a text begins %s bos, as add_bos_token of tokenizer_config.json says; tokenizer.json says otherwise",
            settings.directory,
            "with" if begin else "without",
        )
        made.add_bos_token = begin
    if made.chat_template is None:
        made.chat_template = settings.chat_template()
    rows, padding = settings.rows(), made.pad_token_id
    if rows is not None and padding is not None and padding >= rows:
        logger.info(
            "%s: the padding token %r is %d, and the model has rows for ids up to %d: it is left out, which nothing "
            "needs",
            *(settings.directory, made.pad_token, padding, rows - 1),
        )
        return _without_padding(made)
    return made


def writes_bos(made: Any) -> bool:
    """Tell whether a tokenizer of transformers begins a text with its bos."""
    return made.bos_token_id is not None and made.encode("a")[:1] == [made.bos_token_id]


def _without_padding(made: Any) -> Any:
    """The same tokenizer without its padding token, which is then no token in a text either."""
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerFast

    content = json.loads(made.backend_tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] != made.pad_token_id]
    if isinstance(vocabulary := content["model"].get("vocab"), dict):
        vocabulary.pop(made.pad_token, None)
    content["padding"] = None
    names = {name: token for name, token in made.special_tokens_map.items() if name in NAMES and name != "pad_token"}
    return PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer.from_str(json.dumps(content)),
        chat_template=made.chat_template,
        split_special_tokens=made.split_special_tokens,
        model_max_length=made.model_max_length,
        **names,
    )


def require_ids(made: Any, settings: Settings) -> None:
    """Raises: Mismatch where an added token has not the id that the files beside state."""
    own = made.get_vocab()
    for token, stated in settings.added().items():
        if (made_id := own.get(token)) != stated:
            would_be = "none" if made_id is None else made_id
            raise Mismatch(
                f"{settings.directory}: the token {token!r} is {stated} in tokenizer_config.json or added_tokens.json, "
                f"and would be {would_be} by the vocabulary: files of two tokenizers; copy the model's again"
            )
