"""Checks that the models of a run fit each other, and that each has the head of its role.

Only small files and headers of weights are read.
"""

from __future__ import annotations

import filecmp
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from megarlhf.architectures.hf_config import architecture_from_hf, read_config, score_of_config
from megarlhf.architectures.placements import head_name, identity_placements, logical_tensors
from megarlhf.config import ROLES, ModelConfig, RoleConfig
from megarlhf.data.text.templates import Template, chat_template
from megarlhf.data.tokenizers.comparison import text_not_kept, transformers_difference
from megarlhf.data.tokenizers.files import has_tokenizer
from megarlhf.data.tokenizers.tokenizer import first_difference, load_tokenizer
from megarlhf.planning.machine.capabilities import trained_tensors_of
from megarlhf.weights.checkpoint.dtype import has_weights
from megarlhf.weights.checkpoint.formats.megatron.tokenizers import tokenizer_in_words
from megarlhf.weights.checkpoint.open_checkpoint import Checkpoint, open_checkpoint, require_scalar_head
from megarlhf.weights.checkpoint.peft import brings_head, open_adapter
from megarlhf.weights.transport.storages import load_from_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


def check_vocabularies(roles: Mapping[str, RoleConfig], retokenized: Collection[str] = ()) -> list[str]:
    """Check that all roles give token ids the meaning of the first role's tokenizer.

    Roles in `retokenized` are given text and are not checked.

    Returns: notes for the user, in sentences. Raises: ValueError that names the first difference, a vocabulary that is
    too small, or a model without a tokenizer whose vocabulary has another size.
    """
    writer, first = next(iter(roles.items()))
    own = first.model.tokenizer_place()
    _require_tokenizer(writer, first.model)
    tokenizer = load_tokenizer(own)
    notes = []
    if other := transformers_difference(own, tokenizer):
        notes.append(f"{writer}: texts are read as the files of {own} say; {other}")
    if change := text_not_kept(tokenizer):
        text, read = change
        notes.append(
            f"{writer}: the tokenizer of {own} does not keep texts as they are: {text!r} becomes {read!r}, in prompts "
            "and in learnt texts"
        )
    for role, section in roles.items():
        if role in retokenized:
            continue
        directory = section.model.tokenizer_place()
        vocab_size = architecture_from_hf(section.model.hf_directory()).vocab_size
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"{role}: the tokenizer of {own} has {tokenizer.vocab_size} tokens, {section.model.path} has "
                f"vocab_size = {vocab_size}; do tokenizer and model belong together?"
            )
        if _same_tokenizer(own, directory):
            continue
        if has_tokenizer(directory):
            if difference := first_difference(tokenizer, load_tokenizer(directory)):
                _refuse_tokenizer(role, directory, f"{own} ({writer})", difference)
        elif vocab_size != (expected := architecture_from_hf(first.model.hf_directory()).vocab_size):
            raise ValueError(
                f"{role}: {directory} has no tokenizer, and its vocab_size = {vocab_size} is not the {expected} of "
                f"{own} ({writer}), whose token ids it would read; put the {role}'s tokenizer there"
            )
        else:
            notes.append(
                f"{role}: {directory} has no tokenizer to compare; its vocab_size is that of {writer}, so its token "
                "ids are assumed to mean the same"
            )
    return notes


def _refuse_tokenizer(role: str, directory: Path, expected: str, difference: str) -> NoReturn:
    """Raises: ValueError for a tokenizer that is not the expected one."""
    retokenize = "give it text (rewards: [{kind: model, retokenize: true}])"
    if role == "against":
        raise ValueError(
            f"against: the tokenizer of {directory} is not that of {expected}: {difference}. The reward model reads "
            f"the token ids of both models' responses, and can have the tokenizer of one only; {retokenize}, or "
            "compare models with one tokenizer"
        )
    remedy = f", or {retokenize}" if ROLES[role].may_retokenize else ""
    raise ValueError(
        f"{role}: the tokenizer of {directory} is not that of {expected}, whose token ids it would read: {difference}. "
        f"Give a {role} with the same tokenizer{remedy}"
    )


def _require_tokenizer(role: str, model: ModelConfig) -> None:
    """Raises: ValueError if the role that reads the data has no tokenizer, and its Megatron checkpoint names one."""
    directory = model.tokenizer_place()
    if has_tokenizer(directory) or not directory.is_dir() or not has_weights(model):
        return
    checkpoint = open_checkpoint(model.path, hf=model.hf)
    if checkpoint.tokenizer is not None:
        raise ValueError(
            f"{role}: no tokenizer in {directory}, and the checkpoint has one: set {role}.model.tokenizer to "
            f"{checkpoint.tokenizer}"
        )
    if description := tokenizer_in_words(checkpoint.args or {}):
        raise ValueError(f"{role}: no tokenizer in {directory}; {description}")


def check_retokenized(role: str, section: RoleConfig, template: Template) -> str:
    """Check a role that is given text. It needs its own tokenizer, and a chat template if the data has messages.

    Returns: a note for the user. Raises: ValueError.
    """
    described, directory = section.model.hf_directory(), section.model.tokenizer_place()
    if not has_tokenizer(directory):
        raise ValueError(f"{role}: {directory} has no tokenizer, which retokenize needs; put the {role}'s own there")
    if score_of_config(read_config(described), described) != "last_token":
        raise ValueError(
            f"{role}: {directory} scores by the mean over the response (loss = response_mean), and retokenize does not "
            "know where the response begins; train one with loss = last_token, or give one with the actor's tokenizer"
        )
    tokenizer, vocab_size = load_tokenizer(directory), architecture_from_hf(described).vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{role}: the tokenizer of {directory} has {tokenizer.vocab_size} tokens, its model has vocab_size = "
            f"{vocab_size}; do tokenizer and model belong together?"
        )
    if template == "chat":
        try:
            chat_template(tokenizer)
        except ValueError as error:
            raise ValueError(f"{role} (retokenize: true, data.template: {template}): {error}") from None
    return f"{role}: reads text, by the tokenizer of {directory}"


def _same_tokenizer(first: Path, second: Path) -> bool:
    """Whether the files are equal byte for byte, so that they need not be read."""
    if first == second:
        return True
    if not (first.is_dir() and second.is_dir()):
        return False
    present = [name for name in _TOKENIZER_FILES if (first / name).exists() or (second / name).exists()]
    return bool(present) and len(filecmp.cmpfiles(first, second, present, shallow=False)[0]) == len(present)


def check_heads(roles: Mapping[str, RoleConfig], *, trains_reward_model: bool) -> list[str]:
    """Check heads: reward model and critic need a scalar head, a policy needs a language head.

    Returns: notes on heads that are loaded, or start at zero or at random. Raises: ValueError for a model of the other
    kind or one that cannot be opened, and for scores that would all be the same.
    """
    notes = []
    for role, section in roles.items():
        model = section.model
        if model.random_init:
            if role == "reward_model" and not trains_reward_model:
                raise ValueError(
                    "reward_model.model.random_init = true: its scores would be random; give a reward model that "
                    "`megarlhf rm` has trained, and leave random_init out"
                )
            if role == "critic":
                notes.append(f"critic: all weights start at random, in the shape of {model.path}")
            continue
        if ROLES[role].head == "scalar":
            notes.append(f"{role}: {_scalar_head_note(role, section, trains_reward_model=trains_reward_model)}")
            continue
        if model.fresh_head:
            raise ValueError(f"{role}.model.fresh_head: a language model has no scalar head; leave it out")
        kinds = read_config(model.hf_directory()).get("architectures") or []
        if any(kind.endswith("ForSequenceClassification") for kind in kinds):
            raise ValueError(
                f"{role}: {model.path} is a reward model or a critic ({kinds[0]}), not a language model; give one "
                "that writes responses"
            )
        open_checkpoint(model.path, hf=model.hf)  # raises for missing, truncated and misshapen weights
    return notes


def _scalar_head_note(role: str, section: RoleConfig, *, trains_reward_model: bool) -> str:
    """The source of the scalar head of a critic or a reward model. Raises: ValueError as `check_heads` does."""
    model, lora = section.model, section.lora
    checkpoint = open_checkpoint(model.path, hf=model.hf, head="scalar")
    adapter = None if lora is None else lora.path
    brought = adapter is not None and brings_head(adapter, checkpoint.arch)
    stored = checkpoint.head == "scalar"
    if not (model.fresh_head or trains_reward_model or brought):
        try:
            require_scalar_head(checkpoint)
        except ValueError as error:
            raise ValueError(f"{role}: {error}") from None
    if role == "reward_model" and not trains_reward_model:
        score_of_config(read_config(model.hf_directory()), model.hf_directory())
    start = "at random" if trains_reward_model else "at zero"
    if role == "critic" and not brought and (model.fresh_head or not stored):
        _require_trained_head(checkpoint, section)
    if model.fresh_head and stored and not brought:
        return (
            f"the scalar head starts {start}, the rest is {model.path}, whose own scalar head is not read: with "
            f"{role}.model.fresh_head = false it would be loaded"
        )
    if not (stored or brought):
        return f"the scalar head starts {start}, the rest is {model.path}"
    source = adapter if brought and adapter is not None else model.path
    head_H = _stored_head(checkpoint, adapter if brought else None)
    if not bool(head_H.isfinite().all()):
        raise ValueError(f"{role}: the scalar head of {source} holds NaN or infinite numbers; give another model")
    if not bool(head_H.any()):
        if role == "reward_model" and not trains_reward_model:
            raise ValueError(
                f"reward_model: the scalar head of {source} is zero, and every response would score the same; give "
                "a reward model that `megarlhf rm` has trained"
            )
        return f"the scalar head is loaded from {source}, where it is zero"
    unread = f", so that {role}.model.fresh_head has no effect" if model.fresh_head else ""
    return f"the scalar head is loaded from {source}{unread}"


def _require_trained_head(checkpoint: Checkpoint, section: RoleConfig) -> None:
    """Require training of a critic's head that starts at zero. Raises: ValueError if it would stay there."""
    head = head_name(checkpoint.arch, "scalar")
    if section.lora is None and head not in trained_tensors_of(checkpoint.arch, "critic", section):
        key, patterns = ("freeze", section.freeze) if section.freeze else ("train_only", section.train_only)
        raise ValueError(
            f"critic: the scalar head starts at zero, and critic.{key} = {list(patterns)} leaves it there, so that "
            f"every value would be 0; train it ({head}), or give a critic that has a head"
        )


def _stored_head(checkpoint: Checkpoint, adapter: Path | None) -> Tensor:
    """The weight of the scalar head, of the checkpoint or of an adapter: a few thousand numbers.

    No other weights are read before a run.
    """
    name = head_name(checkpoint.arch, "scalar")
    shapes = {name: logical_tensors(checkpoint.arch, "scalar")[name]}
    only = identity_placements(shapes)
    head = {name: torch.empty(only.storages[name])}
    load_from_files(only, checkpoint.weights if adapter is None else open_adapter(adapter).weights(shapes), head)
    return head[name]
