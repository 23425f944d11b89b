"""Do the models of a run belong together, and has each the head that its role needs? Small files and headers say."""

from __future__ import annotations

import filecmp
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megarlhf.architectures.hf_config import architecture_from_hf, read_config, score_of_config
from megarlhf.architectures.placements import head_name, identity_placements, logical_tensors
from megarlhf.config import ModelConfig, RoleConfig
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
    """Every role reads the token ids that the first one's tokenizer wrote; they must mean the same to all, but for the
    roles in `retokenized`, which are given text.

    Returns: what a user should know, in sentences. Raises: ValueError that names the first difference, a vocabulary
    that is too small, or a model without a tokenizer whose vocabulary has another size.
    """
    writer, first = next(iter(roles.items()))
    described = first.model.tokenizer_place()
    _require_tokenizer(writer, first.model)
    tokenizer = load_tokenizer(described)
    notes = []
    if other := transformers_difference(described, tokenizer):
        notes.append(f"{writer}: texts are read as the files of {described} say; {other}")
    if change := text_not_kept(tokenizer):
        text, read = change
        notes.append(
            f"{writer}: the tokenizer of {described} does not keep texts as they are: {text!r} becomes {read!r}, in "
            "prompts and in what is learnt"
        )
    for role, section in roles.items():
        if role in retokenized:
            continue
        directory = section.model.tokenizer_place()
        vocab_size = architecture_from_hf(section.model.hf_directory()).vocab_size
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"{role}: the tokenizer of {described} has {tokenizer.vocab_size} tokens, {section.model.path} has "
                f"vocab_size = {vocab_size}; do tokenizer and model belong together?"
            )
        if _same_tokenizer(described, directory):
            continue
        if has_tokenizer(directory):
            if difference := first_difference(tokenizer, load_tokenizer(directory)):
                text = ", or give it text (rewards: [{kind: model, retokenize: true}])" * (role == "reward_model")
                if role == "against":
                    raise ValueError(
                        f"against: the tokenizer of {directory} is not that of {described} ({writer}): {difference}. "
                        "The reward model reads the token ids of both models' responses, and can have the tokenizer of "
                        "one only; give it text (rewards: [{kind: model, retokenize: true}]), or compare models with "
                        "one tokenizer"
                    )
                raise ValueError(
                    f"{role}: the tokenizer of {directory} is not that of {described} ({writer}), whose token ids it "
                    f"would read: {difference}. Give a {role} with the same tokenizer{text}"
                )
        elif vocab_size != (expected := architecture_from_hf(first.model.hf_directory()).vocab_size):
            raise ValueError(
                f"{role}: {directory} has no tokenizer, and its vocab_size = {vocab_size} is not the {expected} of "
                f"{described} ({writer}), whose token ids it would read; put the {role}'s tokenizer there"
            )
        else:
            notes.append(
                f"{role}: {directory} has no tokenizer to compare; its vocab_size is that of {writer}, and its token "
                "ids are taken to mean the same"
            )
    return notes


def _require_tokenizer(role: str, model: ModelConfig) -> None:
    """Raises: ValueError where the role that reads the data has none, and a Megatron checkpoint says what its is."""
    place = model.tokenizer_place()
    if has_tokenizer(place) or not place.is_dir() or not has_weights(model):
        return
    checkpoint = open_checkpoint(model.path, hf=model.hf)
    if words := tokenizer_in_words(checkpoint.args or {}):
        raise ValueError(f"{role}: no tokenizer in {place}; {words}")


def check_retokenized(role: str, section: RoleConfig, template: Template) -> str:
    """A role that is given text needs a tokenizer of its own, and a chat template where the data has messages.

    Returns: what a start says of it. Raises: ValueError.
    """
    described, directory = section.model.hf_directory(), section.model.tokenizer_place()
    if not has_tokenizer(directory):
        raise ValueError(f"{role}: {directory} has no tokenizer, which retokenize needs; put the {role}'s own there")
    if score_of_config(read_config(described), described) != "last_token":
        raise ValueError(
            f"{role}: {directory} scores by the mean over the response (loss = response_mean), which retokenize does "
            "not know apart from the prompt; train one with loss = last_token, or give one with the actor's tokenizer"
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
    """Whether the files are the same to the byte, which spares reading them."""
    if first == second:
        return True
    if not (first.is_dir() and second.is_dir()):
        return False
    present = [name for name in _TOKENIZER_FILES if (first / name).exists() or (second / name).exists()]
    return bool(present) and len(filecmp.cmpfiles(first, second, present, shallow=False)[0]) == len(present)


def check_heads(roles: Mapping[str, RoleConfig], *, trains_reward_model: bool) -> list[str]:
    """A reward model's scores and a critic's values come from a scalar head, a policy's log-probs from a language head.

    Returns: which heads are loaded, and which start at zero or at random, in sentences. Raises: ValueError for a model
    of the other kind, as for one that cannot be opened, and for scores that would all be the same.
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
        if role in ("critic", "reward_model"):
            notes.append(f"{role}: {_head_in_words(role, section, trains_reward_model=trains_reward_model)}")
            continue
        if model.fresh_head:
            raise ValueError(f"{role}.model.fresh_head: a language model has no scalar head; leave it out")
        kinds = read_config(model.hf_directory()).get("architectures") or []
        if any(kind.endswith("ForSequenceClassification") for kind in kinds):
            raise ValueError(
                f"{role}: {model.path} is a reward model or a critic ({kinds[0]}), not a language model; give one "
                "that writes responses"
            )
        open_checkpoint(model.path, hf=model.hf)  # missing, cut and misshapen weights are found before ranks start
    return notes


def _head_in_words(role: str, section: RoleConfig, *, trains_reward_model: bool) -> str:
    """Where the scalar head of a critic or a reward model comes from. Raises: ValueError as `check_heads` does."""
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
            f"the scalar head starts {start}, the rest is {model.path}, whose own scalar head is left unread: with "
            f"{role}.model.fresh_head = false it would be loaded"
        )
    if not (stored or brought):
        return f"the scalar head starts {start}, the rest is {model.path}"
    place = adapter if brought and adapter is not None else model.path
    head_H = _stored_head(checkpoint, adapter if brought else None)
    if not bool(head_H.isfinite().all()):
        raise ValueError(f"{role}: the scalar head of {place} holds NaN or infinite numbers; give another model")
    if not bool(head_H.any()):
        if role == "reward_model" and not trains_reward_model:
            raise ValueError(
                f"reward_model: the scalar head of {place} is zero, and every response would score the same; give "
                "a reward model that `megarlhf rm` has trained"
            )
        return f"the scalar head is loaded from {place}, where it is zero"
    unread = f", so that {role}.model.fresh_head has no effect" if model.fresh_head else ""
    return f"the scalar head is loaded from {place}{unread}"


def _require_trained_head(checkpoint: Checkpoint, section: RoleConfig) -> None:
    """Of a critic whose head starts at zero. Raises: ValueError where it would stay there."""
    head = head_name(checkpoint.arch, "scalar")
    if section.lora is None and head not in trained_tensors_of(checkpoint.arch, "critic", section):
        key, patterns = ("freeze", section.freeze) if section.freeze else ("train_only", section.train_only)
        raise ValueError(
            f"critic: the scalar head starts at zero, and critic.{key} = {list(patterns)} leaves it there, so that "
            f"every value would be 0; train it ({head}), or give a critic that has a head"
        )


def _stored_head(checkpoint: Checkpoint, adapter: Path | None) -> Tensor:
    """The weight of the scalar head, of the checkpoint or of an adapter: a few thousand numbers, the only ones that are
    read before a run."""
    name = head_name(checkpoint.arch, "scalar")
    shapes = {name: logical_tensors(checkpoint.arch, "scalar")[name]}
    only = identity_placements(shapes)
    head = {name: torch.empty(only.storages[name])}
    load_from_files(only, checkpoint.weights if adapter is None else open_adapter(adapter).weights(shapes), head)
    return head[name]
