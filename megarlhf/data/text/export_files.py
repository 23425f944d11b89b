"""Small files that a trained model's exports need beside its own: how texts and conversations are written for it."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Collection
from pathlib import Path

from megarlhf.config import ConversationConfig, ModelConfig
from megarlhf.data.text.end_tokens import turn_end_of
from megarlhf.data.tokenizers.comparison import read_otherwise
from megarlhf.data.tokenizers.files import has_tokenizer, tokenizer_files
from megarlhf.data.tokenizers.settings import read_object
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megarlhf.model_directory import end_tokens

logger = logging.getLogger(__name__)

CONFIG = "config.json"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"


def files_of_exports(model: ModelConfig, data: ConversationConfig, learnt: Collection[int]) -> dict[str, bytes]:
    """The tokenizer that `model.tokenizer` names, a chat template of the configuration's, and a generation_config.json
    that ends a response where the chat template ends an answer, if that is among the tokens that are `learnt` as ends
    and the model's files say otherwise."""
    files: dict[str, bytes] = {}
    place, directory = model.tokenizer_place(), model.hf_directory()
    if model.tokenizer is not None:
        files |= {_name_in_export(place, path): path.read_bytes() for path in tokenizer_files(place)}
    if (template := data.chat_template_text()) is not None:
        files[TEMPLATE] = template.encode()
    if not has_tokenizer(place):
        return files
    tokenizer = load_tokenizer(place)
    files |= _readable_by_transformers(place, directory, tokenizer)
    ends = end_tokens(directory, tokenizer.eos_id)
    if (turn_end := turn_end_of(data, tokenizer)) in learnt and turn_end is not None and turn_end not in ends:
        given = directory / GENERATION
        settings = json.loads(given.read_text(encoding="utf-8")) if given.is_file() else {}
        settings["eos_token_id"] = [*ends, turn_end]
        files[GENERATION] = (json.dumps(settings, indent=2) + "\n").encode()
    return files


def _readable_by_transformers(place: Path, model: Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Files of a tokenizer with which transformers makes the ids that the model is trained with, where it would not by
    those that are there: its classes put parts of their own in place of tokenizer.json's."""
    with tempfile.TemporaryDirectory() as temporary:
        export = Path(temporary)
        for path in (*tokenizer_files(place), model / CONFIG):
            link = export / (CONFIG if path.name == CONFIG else _name_in_export(place, path))
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.absolute())
        if read_otherwise(export, tokenizer) is None:
            return {}
        assert isinstance(tokenizer, HuggingFaceTokenizer), "others are not compared"
        own, stated = tokenizer.of_transformers, read_object(export / SETTINGS)
        settings = {**own.special_tokens_map, **stated, "tokenizer_class": "PreTrainedTokenizerFast"}
        files = {
            SETTINGS: (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode(),
            "tokenizer.json": own.backend_tokenizer.to_str(pretty=True).encode(),
        }
        for name, content in files.items():
            (export / name).unlink(missing_ok=True)
            (export / name).write_bytes(content)
        if other := read_otherwise(export, tokenizer):
            logger.warning("exports: %s; load their tokenizer with PreTrainedTokenizerFast.from_pretrained", other)
        return files


def _name_in_export(place: Path, path: Path) -> str:
    """A SentencePiece file may have any name; a model's directory has it by this one."""
    return "tokenizer.model" if path == place else str(path.relative_to(place))
