"""Small files that a trained model's exports need beside its own: how texts and conversations are written for it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from megarlhf.config import ConversationConfig
from megarlhf.data.ends import turn_end_of
from megarlhf.data.tokenizer import has_tokenizer, load_tokenizer
from megarlhf.model_directory import end_tokens

GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"


def files_of_exports(directory: Path, data: ConversationConfig, learnt: Collection[int]) -> dict[str, bytes]:
    """A chat template of the configuration's, and a generation_config.json that ends a response where the chat template
    ends an answer, if that is among the tokens that are `learnt` as ends and the model's files say otherwise."""
    files: dict[str, bytes] = {}
    if (template := data.chat_template_text()) is not None:
        files[TEMPLATE] = template.encode()
    if not has_tokenizer(directory):
        return files
    tokenizer = load_tokenizer(directory)
    ends = end_tokens(directory, tokenizer.eos_id)
    if (turn_end := turn_end_of(data, tokenizer)) in learnt and turn_end is not None and turn_end not in ends:
        given = directory / GENERATION
        settings = json.loads(given.read_text(encoding="utf-8")) if given.is_file() else {}
        settings["eos_token_id"] = [*ends, turn_end]
        files[GENERATION] = (json.dumps(settings, indent=2) + "\n").encode()
    return files
