"""Small files that exports of a trained model need beside the model's own: tokenizer, chat template, end tokens."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Collection
from pathlib import Path

from megarlhf.config import ConversationConfig, ModelConfig
from megarlhf.data.text.end_tokens import turn_end_of
from megarlhf.data.tokenizers.comparison import transformers_difference
from megarlhf.data.tokenizers.files import has_tokenizer, tokenizer_files
from megarlhf.data.tokenizers.settings import read_object
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megarlhf.model_directory import end_tokens

logger = logging.getLogger(__name__)

CONFIG = "config.json"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"


def export_files(model: ModelConfig, data: ConversationConfig, learnt: Collection[int]) -> dict[str, bytes]:
    """Files that exports need: the tokenizer of `model.tokenizer`, the configuration's chat template, and a
    generation_config.json with the token that ends an answer, if it is among the `learnt` end tokens and not in the
    model's files."""
    files: dict[str, bytes] = {}
    tokenizer_path, directory = model.tokenizer_place(), model.hf_directory()
    if model.tokenizer is not None:
        files |= {_name_in_export(tokenizer_path, path): path.read_bytes() for path in tokenizer_files(tokenizer_path)}
    if (template := data.chat_template_text()) is not None:
        files[TEMPLATE] = template.encode()
    if not has_tokenizer(tokenizer_path):
        return files
    tokenizer = load_tokenizer(tokenizer_path)
    files |= _readable_by_transformers(tokenizer_path, directory, tokenizer)
    ends = end_tokens(directory, tokenizer.eos_id)
    if (turn_end := turn_end_of(data, tokenizer)) in learnt and turn_end is not None and turn_end not in ends:
        generation_config = directory / GENERATION
        settings = json.loads(generation_config.read_text(encoding="utf-8")) if generation_config.is_file() else {}
        settings["eos_token_id"] = [*ends, turn_end]
        files[GENERATION] = (json.dumps(settings, indent=2) + "\n").encode()
    return files


def _readable_by_transformers(tokenizer_path: Path, model: Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Files of a tokenizer that transformers reads as in training, if it would read the present files differently: its
    classes replace parts of tokenizer.json by their own."""
    with tempfile.TemporaryDirectory() as temporary:
        export = Path(temporary)
        for path in (*tokenizer_files(tokenizer_path), model / CONFIG):
            link = export / (CONFIG if path.name == CONFIG else _name_in_export(tokenizer_path, path))
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.absolute())
        if transformers_difference(export, tokenizer) is None:
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
        if other := transformers_difference(export, tokenizer):
            logger.warning("exports: %s; load their tokenizer with PreTrainedTokenizerFast.from_pretrained", other)
        return files


def _name_in_export(tokenizer: Path, path: Path) -> str:
    """Name of a tokenizer's file in a model's directory. A single SentencePiece file may have had any name."""
    return "tokenizer.model" if path == tokenizer else str(path.relative_to(tokenizer))
