"""How a run writes its records as tokens, and whether a model that it begins with was trained on text written so.

An SFT model that knows a chat template answers plain texts badly, and the other way round, and no figure says why. So
exports state how their run wrote (`megarlhf.json`), and a later stage that writes otherwise is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from megarlhf.config import ConversationConfig, EvaluateConfig, PromptDataConfig, RLConfig, RoleConfig, roles_of
from megarlhf.data.ends import turn_end_of
from megarlhf.data.load import first_record
from megarlhf.data.samples import Form, PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.sources import Place, find
from megarlhf.data.templates import chat_template
from megarlhf.data.texts import TextEncoder
from megarlhf.data.tokenizer import Tokenizer, load_tokenizer
from megarlhf.data.tokenizer_formats.protocol import ChatTokenizer
from megarlhf.planning.encoders import AnyEncoder, RecordEncoder, encoders_of
from megarlhf.planning.policies import AnyConfig
from megarlhf.provenance import FILE, Provenance, Writing, read_provenance

_EVALUATED: Mapping[type, tuple[str, ...]] = {
    SFTEncoder: ("actor",), PromptEncoder: ("actor", "reward_model"), PairEncoder: ("reward_model",), TextEncoder: ()
}  # fmt: skip
"""By what `eval` makes of the data: the roles that read it."""
_WORDS = {"template": "another chat template", "template_args": "other template_args", "end": "another end of answers"}


def writing_of_training(cfg: AnyConfig, role: str) -> Writing | None:
    """What exports of a role state: how this run writes, or, where that cannot be told (raw texts, token ids, data of
    the hub), how the model was written for that it began with."""
    (encoder,) = encoders_of(cfg)
    section = roles_of(cfg)[role]
    own = _writing(cfg.data, section, forms_of(cfg.data, encoder))
    stated = _stated(section)
    return own or (None if stated is None else stated.writing)


def check_writing(cfg: AnyConfig) -> list[str]:
    """The models that a run begins with against how it writes, in sentences where the configuration allows another
    way. Raises: ValueError where it does not."""
    notes = []
    for name, data, section, forms in _read_by(cfg):
        stated = _stated(section)
        if stated is None or not stated.writing or not (now := _writing(data, section, forms)):
            continue
        if not (differences := _differences(stated.writing, now)):
            continue
        words = (
            f"{name}: {section.model.path} comes from {stated.run} (megarlhf {stated.command}), which wrote "
            f"{_in_words(stated.writing)}, and this run writes {_in_words(now)}: {'; '.join(differences)}"
        )
        if cfg.data.other_writing == "refuse":
            raise ValueError(
                f"{words}. Write the data as before (data.template, data.chat_template, data.template_args), or set "
                f"data.other_writing=allow if the change is meant. {FILE} beside the weights says how it was"
            )
        notes.append(f"WARNING: {words} (data.other_writing = allow)")
    return notes


def forms_of(data: PromptDataConfig, encoder: AnyEncoder) -> frozenset[Form]:
    """What the training records are read as, by the first ones of each set. Left out are raw texts, what cannot be
    told, and texts that a template has written before, as `generate` keeps its prompts."""
    if isinstance(encoder, TextEncoder):
        return frozenset()
    forms = {_form_of(encoder, find(source)) for source in data.train if source.kind != "megatron"}
    return frozenset(form for form in forms if form is not None)


def _form_of(encoder: RecordEncoder, place: Place) -> Form | None:
    if place.kind in ("generated", "hub"):
        known: Form = "conversations" if encoder.template == "chat" else "texts"
        return None if place.kind == "hub" and encoder.template == "auto" else known
    if (first := first_record(encoder, place)) is None or first[0] == "raw texts":
        return None
    form, record = first
    return None if form == "texts" and has_marks(str(record["prompt"]), load_tokenizer(encoder.tokenizer)) else form


def has_marks(text: str, tokenizer: Tokenizer) -> bool:
    """Whether special tokens stand in a text, as a chat template writes them."""
    names = tokenizer.tokens()
    special = (names[each] for each in cast(ChatTokenizer, tokenizer).special_ids if each < len(names))
    return any(name in text for name in special if len(name) > 2)


def _read_by(cfg: AnyConfig) -> list[tuple[str, ConversationConfig, RoleConfig, frozenset[Form]]]:
    """The models that read the data, each with how it is written for them."""
    roles, read = roles_of(cfg), list[tuple[str, ConversationConfig, RoleConfig, frozenset[Form]]]()
    for encoder in encoders_of(cfg):
        forms = forms_of(cfg.data, encoder)
        readers = _EVALUATED[type(encoder)] if isinstance(cfg, EvaluateConfig) else ("actor", "reward_model")
        for name in (name for name in readers if name in roles):
            apart = isinstance(cfg, RLConfig | EvaluateConfig) and name == "reward_model" and cfg.retokenizes
            read.append((name, ConversationConfig() if apart else cfg.data, roles[name], forms))
    return read


def _stated(section: RoleConfig) -> Provenance | None:
    """Of the adapter that a model has, else of the model. Raises: ValueError for a damaged file."""
    adapter = None if section.lora is None else section.lora.path
    paths = [path for path in (adapter, None if section.model.random_init else section.model.path) if path is not None]
    return next((stated for path in paths if (stated := read_provenance(Path(path))) is not None), None)


def _writing(data: ConversationConfig, section: RoleConfig, forms: frozenset[Form]) -> Writing:
    """By form: what makes the tokens of an answer and of what stands before it."""
    if not forms:
        return {}
    tokenizer, writing = load_tokenizer(section.model.tokenizer_place()), dict[str, Mapping[str, Any]]()
    if "texts" in forms:
        writing["texts"] = {"end": tokenizer.eos_id}
    if "conversations" in forms:
        template = chat_template(tokenizer, data.chat_template_text(), data.template_args)
        text = template.given or template.tokenizer.own_template() or ""
        end = turn_end_of(data, tokenizer)
        writing["conversations"] = {
            "template": hashlib.sha256(text.strip().encode()).hexdigest(),
            "template_args": json.loads(json.dumps(dict(data.template_args))),
            "end": tokenizer.eos_id if end is None else end,
        }
    return writing


def _differences(before: Writing, now: Writing) -> list[str]:
    """In words; a model that was trained on both forms is used with either."""
    found = [f"it knows no {form}" for form in now if form not in before]
    for form in now.keys() & before.keys():
        found += [_WORDS[key] for key, value in now[form].items() if before[form].get(key) != value]
    return found


def _in_words(writing: Writing) -> str:
    words = {"texts": "texts as they stand", "conversations": "conversations by a chat template"}
    return " and ".join(words.get(form, form) for form in sorted(writing))
