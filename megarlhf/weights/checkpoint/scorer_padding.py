"""The padding token of a model with a scalar head: others read a row's score at its last token that is no padding.

transformers and TRL fill rows up with the tokenizer's padding token, and look for the last token that is not the one
that config.json names. Where that is an end token, as in most language models, they read the score before the end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

log = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
_IN_NO_TEXT = ("pad", "reserved", "unused")
"""Parts of the names of special tokens that no text contains. TRL takes every padding token for padding, also one
within a conversation."""


def with_padding(config: Mapping[str, Any], files: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """config.json with a padding token that ends no text, and those of the files, by name, that have to change for it.

    `files` are those beside config.json. The token is the tokenizer's own where that is no end; else its unknown token,
    or a special token that is never the last of a text. Where there is none, none is named, which the log says:
    transformers then scores one text at a time only.
    """
    settings, ids = _json(files, TOKENIZER_CONFIG), _special_ids(files)
    ends = _ends(config, files) | {ids[name] for name in [_name(settings.get("eos_token"))] if name in ids}
    vocab_size = config.get("vocab_size") or max(ids.values(), default=-1) + 1
    written = files.get("chat_template.jinja", b"").decode() or json.dumps(settings.get("chat_template") or "")
    for name in _candidates(settings, ids, written):
        if ids[name] not in ends and ids[name] < vocab_size:
            return {**config, "pad_token_id": ids[name]}, _naming(name, settings, files)
    if ids or config.get("pad_token_id") in ends:
        log.warning(
            "no token of the tokenizer can be the padding of a reward model, whose score is read at the last token that"
            " is none: config.json names none, and transformers scores one text at a time"
        )
        return {key: value for key, value in config.items() if key != "pad_token_id"}, {}
    return dict(config), {}


def _naming(name: str, settings: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of the tokenizer, where they name another padding."""
    if _name(settings.get("pad_token")) == name:
        return {}
    changed = {TOKENIZER_CONFIG: {**settings, "pad_token": name}}
    if SPECIAL_TOKENS in files:
        changed[SPECIAL_TOKENS] = {**_json(files, SPECIAL_TOKENS), "pad_token": name}
    return {file: (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode() for file, tree in changed.items()}


def _candidates(settings: Mapping[str, Any], ids: Mapping[str, int], template: str) -> Iterator[str]:
    for key in ("pad_token", "unk_token"):
        if (name := _name(settings.get(key))) in ids:
            yield str(name)
    for word in _IN_NO_TEXT:
        yield from (name for name in ids if word in name.lower())
    begin = _name(settings.get("bos_token"))
    yield from (name for name in ids if template and name != begin and name not in template)
    if begin in ids:
        yield str(begin)


def _ends(config: Mapping[str, Any], files: Mapping[str, bytes]) -> set[int]:
    end_ids: set[int] = set()
    for tree in (config, _json(files, "generation_config.json")):
        ids = tree.get("eos_token_id")
        end_ids |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return end_ids


def _special_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """Special tokens by name, as either file of the tokenizer lists them."""
    listed = [(token.get("id"), token) for token in _json(files, "tokenizer.json").get("added_tokens") or []]
    listed += list((_json(files, TOKENIZER_CONFIG).get("added_tokens_decoder") or {}).items())
    id_of = {token["content"]: int(number) for number, token in listed if token.get("special")}
    return dict(sorted(id_of.items(), key=lambda pair: pair[1]))


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    tree = json.loads(files[name]) if name in files else {}
    return tree if isinstance(tree, dict) else {}


def _name(token: Any) -> str | None:
    """The text of a special token, which may be written with how it is cut from its neighbours."""
    return token.get("content") if isinstance(token, Mapping) else token
