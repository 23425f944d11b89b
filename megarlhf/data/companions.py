"""Small files that a trained model's exports need beside its own: how texts and conversations are written for it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from megarlhf.config import ConversationConfig, ModelConfig
from megarlhf.data.ends import turn_end_of
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.data.tokenizer_files import has_tokenizer, tokenizer_files
from megarlhf.model_directory import end_tokens

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
    ends = end_tokens(directory, tokenizer.eos_id)
    if (turn_end := turn_end_of(data, tokenizer)) in learnt and turn_end is not None and turn_end not in ends:
        given = directory / GENERATION
        settings = json.loads(given.read_text(encoding="utf-8")) if given.is_file() else {}
        settings["eos_token_id"] = [*ends, turn_end]
        files[GENERATION] = (json.dumps(settings, indent=2) + "\n").encode()
    return files


def _name_in_export(place: Path, path: Path) -> str:
    """A SentencePiece file may have any name; a model's directory has it by this one."""
    return "tokenizer.model" if path == place else str(path.relative_to(place))
