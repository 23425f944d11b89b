"""Check that a run writes its texts as its models were trained: plain, or by the same chat template.

An SFT model that knows a chat template answers plain texts badly, and the other way round, and no metric shows the
reason. So exports state how their run wrote texts (`megarlhf.json`), and a later stage that writes differently is
refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from megarlhf.config import (
    ROLES,
    ConversationConfig,
    EvaluateConfig,
    GenerateConfig,
    PromptDataConfig,
    RewardConfig,
    RLConfig,
    RoleConfig,
    trained_roles,
)
from megarlhf.config.ask import AskConfig
from megarlhf.config.rewards import unique_labels
from megarlhf.data.samples.encoders import Form, PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.samples.texts import TextEncoder
from megarlhf.data.sources.find import FoundSource, find
from megarlhf.data.sources.reasoning_gym import is_task
from megarlhf.data.text.end_tokens import turn_end_of
from megarlhf.data.text.templates import chat_template, has_template
from megarlhf.data.tokenize.load import first_record
from megarlhf.data.tokenizers.protocol import ChatTokenizer
from megarlhf.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megarlhf.planning.data.encoders import AnyEncoder, RecordEncoder, encoders_of
from megarlhf.planning.machine.capabilities import AnyConfig
from megarlhf.provenance import FILE, Provenance, Writing, read_provenance

_EVALUATED: Mapping[type, tuple[str, ...]] = {
    SFTEncoder: ("actor",), PromptEncoder: ("actor", "against", "reward_model"),
    PairEncoder: ("reward_model",), TextEncoder: (),
}  # fmt: skip
"""Roles that read the data in `eval`, by the data's encoder."""
_WORDS = {"template": "another chat template", "template_args": "other template_args", "end": "another end of answers"}
_AS_BEFORE = "Write the data as before (data.template, data.chat_template, data.template_args)"
_AS_THE_CLASSIFIER_READS = (
    "Set form: joined and append_eos: true of the reward where it was trained on texts as they stand, form: chat where "
    "on conversations, which it writes by its own chat template"
)


def writing_of_training(cfg: AnyConfig, role: str) -> Writing | None:
    """The statement in a role's exports: how this run writes. Where that is unknown (raw texts, token ids, data of the
    hub), the statement of the model that it began with."""
    (encoder,) = encoders_of(cfg)
    section = cfg.roles()[role]
    own = _writing(cfg.data, section.model.tokenizer_place(), training_forms(cfg.data, encoder))
    stated = _stated(section)
    return own or (None if stated is None else stated.writing)


def check_writing(cfg: AnyConfig) -> list[str]:
    """Compare how a run writes with the training of each model that reads its texts. Returns warnings where the
    configuration allows a difference. Raises: ValueError where it does not."""
    notes = []
    for name, path, stated, now, remedy in (*_roles(cfg), *_classifiers(cfg)):
        if not (differences := _differences(stated.writing or {}, now)):
            continue
        sentence = (
            f"{name}: {path} comes from {stated.run} (megarlhf {stated.command}), which wrote "
            f"{_in_words(stated.writing or {})}, and this run writes {_in_words(now)}: {'; '.join(differences)}"
        )
        if cfg.data.other_writing == "refuse":
            raise ValueError(
                f"{sentence}. {remedy}, or set data.other_writing=allow if the change is meant. {FILE} beside the "
                "weights says how it was"
            )
        notes.append(f"WARNING: {sentence} (data.other_writing = allow)")
    return notes


def training_forms(data: PromptDataConfig, encoder: AnyEncoder) -> frozenset[Form]:
    """Forms of the training records, by the first records of each set. Without raw texts, unknown forms, and texts that
    a template has written already, such as the prompts that `generate` keeps."""
    if isinstance(encoder, TextEncoder):
        return frozenset()
    forms = {_form_of(encoder, find(source)) for source in data.train if source.kind != "megatron"}
    return frozenset(form for form in forms if form is not None)


def _forms(cfg: AnyConfig, encoder: AnyEncoder) -> frozenset[Form]:
    """Forms of the records; in `ask`, of the typed prompt."""
    if isinstance(cfg, AskConfig):
        return frozenset({"conversations" if cfg.data.template_mode == "chat" else "texts"})
    return training_forms(cfg.data, encoder)


def _form_of(encoder: RecordEncoder, found_source: FoundSource) -> Form | None:
    if found_source.kind == "hub" or is_task(found_source.source.path):
        known: Form = "conversations" if encoder.template == "chat" else "texts"
        return None if found_source.kind == "hub" and encoder.template == "auto" else known
    if (first := first_record(encoder, found_source)) is None or first[0] == "raw texts":
        return None
    form, record = first
    return (
        None
        if form == "texts" and has_special_tokens(str(record["prompt"]), load_tokenizer(encoder.tokenizer))
        else form
    )


def has_special_tokens(text: str, tokenizer: Tokenizer) -> bool:
    """Tell whether a text contains special tokens, as a chat template writes them."""
    names = tokenizer.tokens()
    special = (names[token] for token in cast(ChatTokenizer, tokenizer).special_ids if token < len(names))
    return any(name in text for name in special if len(name) > 2)


_Reader = tuple[str, Path, Provenance, Writing, str]
"""A model that reads a run's texts: its name, path, provenance, how the run writes for it, and the remedy for a
difference."""


def _roles(cfg: AnyConfig) -> Iterator[_Reader]:
    """Roles with a statement on their training. All read ids of one tokenizer, except a reward model that is given
    text, and the other model of a comparison, which has its own tokenizer."""
    roles, retokenizes = cfg.roles(), isinstance(cfg, RLConfig | EvaluateConfig) and cfg.retokenizes
    scorers = {name for name in roles if ROLES[name].column} - {"actor", *trained_roles(cfg)}
    for encoder in encoders_of(cfg):
        forms = _forms(cfg, encoder)
        for name in _EVALUATED[type(encoder)] if isinstance(cfg, EvaluateConfig) else roles:
            section = roles.get(name)
            if section is None or (name in scorers and section.model.path == roles["actor"].model.path):
                continue  # a frozen scorer with the actor's path needs no check of its own
            if (stated := _stated(section)) is None or not stated.writing:
                continue
            is_given_text = retokenizes and ROLES[name].may_retokenize
            apart = is_given_text or name == "against"
            tokenizer = section.model.tokenizer_place() if apart else encoder.tokenizer
            writing = _writing(ConversationConfig() if is_given_text else cfg.data, tokenizer, forms)
            yield name, section.model.path, stated, writing, _AS_BEFORE


def _classifiers(cfg: AnyConfig) -> Iterator[_Reader]:
    """Rewards that are models of an earlier run."""
    if not isinstance(cfg, RLConfig | GenerateConfig | EvaluateConfig):
        return
    forms = [_forms(cfg, encoder) for encoder in encoders_of(cfg) if isinstance(encoder, PromptEncoder)]
    for label, reward in zip(unique_labels(cfg.rewards), cfg.rewards, strict=True):
        if reward.path is None or (stated := read_provenance(reward.path)) is None or not stated.writing:
            continue
        for encoder in forms:
            writing = _writing_for(reward, reward.path, encoder)
            yield f"reward {label!r}", reward.path, stated, writing, _AS_THE_CLASSIFIER_READS


def _writing_for(reward: RewardConfig, path: Path, forms: frozenset[Form]) -> Writing:
    """The writing of `rollout.rewards.classifier` for a model of an earlier run, for prompts of these forms."""
    if reward.form == "pair":
        return {"pairs of texts": {}} if forms else {}
    if reward.form == "chat" and forms:
        forms = frozenset({"conversations"})
    if "conversations" in forms and not has_template(load_tokenizer(path)):
        return {"conversations": {}}  # by the actor's template
    writing = dict(_writing(ConversationConfig(), path, forms))
    if "texts" in writing and not reward.append_eos:
        writing["texts"] = {"end": None}
    return writing


def _stated(section: RoleConfig) -> Provenance | None:
    """The provenance of the adapter that a model has, else of the model. Raises: ValueError for a damaged file."""
    adapter = None if section.lora is None else section.lora.path
    paths = [path for path in (adapter, None if section.model.random_init else section.model.path) if path is not None]
    return next((stated for path in paths if (stated := read_provenance(Path(path))) is not None), None)


def _writing(data: ConversationConfig, tokenizer_path: Path, forms: frozenset[Form]) -> Writing:
    """The writing by form, with the tokenizer at `place`: the settings that determine the tokens of prompt and answer.

    Example: {"texts": {"end": 2}, "conversations": {"template": SHA256, "template_args": {}, "end": 7}}
    """
    if not forms:
        return {}
    tokenizer, writing = load_tokenizer(tokenizer_path), dict[str, Mapping[str, Any]]()
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
    """Descriptions of the differences. A model that was trained on both forms may be used with either."""
    differences = [f"it knows no {form}" for form in now if form not in before]
    for form in now.keys() & before.keys():
        differences += [_WORDS[key] for key, value in now[form].items() if before[form].get(key) != value]
    return differences


def _in_words(writing: Writing) -> str:
    sentences = {"texts": "texts as they stand", "conversations": "conversations by a chat template"}
    return " and ".join(sentences.get(form, form) for form in sorted(writing))
