"""Do the models of a run belong together, and has each the head that its role needs? Headers and small files say."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from pathlib import Path

import yaml

from megarlhf.architectures.hf_config import architecture_from_hf, read_config
from megarlhf.config import RLConfig, RoleConfig
from megarlhf.data.tokenizer import first_difference, has_tokenizer, load_tokenizer
from megarlhf.model_directory import end_tokens
from megarlhf.observe.run_directory import CONFIG_FILE, written_by
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint, require_scalar_head

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


def check_vocabularies(roles: Mapping[str, RoleConfig]) -> list[str]:
    """Every role reads the token ids that the first one's tokenizer wrote; they must mean the same to all.

    Returns: what a user should know, in sentences. Raises: ValueError that names the first difference, a vocabulary
    that is too small, or a model without a tokenizer whose vocabulary has another size.
    """
    writer, described = next((role, section.model.hf_directory()) for role, section in roles.items())
    tokenizer = load_tokenizer(described)
    notes = []
    if further := end_tokens(described, tokenizer.eos_id)[1:]:
        notes.append(
            f"{writer}: generated responses end at token {tokenizer.eos_id}, the tokenizer's end-of-sequence, and at "
            f"{', '.join(map(str, further))}, which eos_token_id in {described} names; training data ends with the "
            "first only"
        )
    for role, section in roles.items():
        directory = section.model.hf_directory()
        vocab_size = architecture_from_hf(directory).vocab_size
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"{role}: the tokenizer of {described} has {tokenizer.vocab_size} tokens, {section.model.path} has "
                f"vocab_size = {vocab_size}; do tokenizer and model belong together?"
            )
        if _same_tokenizer(described, directory):
            continue
        if has_tokenizer(directory):
            if difference := first_difference(tokenizer, load_tokenizer(directory)):
                raise ValueError(
                    f"{role}: the tokenizer of {directory} is not that of {described} ({writer}), whose token ids it "
                    f"would read: {difference}. Give a {role} with the same tokenizer"
                )
        elif vocab_size != (expected := architecture_from_hf(described).vocab_size):
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


def _same_tokenizer(first: Path, second: Path) -> bool:
    """Whether the files are the same to the byte, which spares reading them."""
    present = [name for name in _TOKENIZER_FILES if (first / name).exists() or (second / name).exists()]
    return bool(present) and len(filecmp.cmpfiles(first, second, present, shallow=False)[0]) == len(present)


def check_heads(roles: Mapping[str, RoleConfig], *, trains_reward_model: bool) -> list[str]:
    """A reward model's scores and a critic's values come from a scalar head, a policy's log-probs from a language head.

    Returns: which heads start at random, in sentences. Raises: ValueError for a model of the other kind, as for one
    that cannot be opened.
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
            checkpoint = open_checkpoint(model.path, hf=model.hf, head="scalar")
            if not (model.fresh_head or trains_reward_model):
                try:
                    require_scalar_head(checkpoint)
                except ValueError as error:
                    raise ValueError(f"{role}: {error}") from None
            if model.fresh_head or checkpoint.head != "scalar":
                notes.append(f"{role}: the scalar head starts at random, the rest is {model.path}")
            continue
        if model.fresh_head:
            raise ValueError(f"{role}.model.fresh_head: a language model has no scalar head; leave it out")
        kinds = read_config(model.hf_directory()).get("architectures") or []
        if any(kind.endswith("ForSequenceClassification") for kind in kinds):
            raise ValueError(
                f"{role}: {model.path} is a reward model or a critic ({kinds[0]}), not a language model; give one "
                "that writes responses"
            )
    return notes


def check_anchor(cfg: RLConfig) -> None:
    """Without a `reference` section the reference is the actor's model. Where that is a checkpoint of an earlier rl
    run, the KL would be taken to a trained policy, and from run to run to another one.

    Raises: ValueError that names what the earlier run's reference was.
    """
    uses_kl = cfg.algo.kl.coef > 0 or cfg.train.stop.max_kl is not None
    if cfg.reference is not None or not uses_kl or cfg.actor.model.random_init:
        return
    path = cfg.actor.model.path
    run = next((run for place in (path.absolute(), path.resolve()) if (run := _rl_run_of(place))), None)
    if run is None:
        return
    earlier = _reference_in(run / CONFIG_FILE)
    was = f" (that run's was {earlier})" if earlier else f" ({run / CONFIG_FILE} says what that run's was)"
    key = f"algo.kl.coef = {cfg.algo.kl.coef}" if cfg.algo.kl.coef > 0 else "train.stop.max_kl"
    raise ValueError(
        f"actor.model.path = {path} is a checkpoint of the rl run {run}, and without a reference section it would be "
        f"the reference too: {key} would measure the KL to this trained policy, no longer to the model that the "
        f"earlier run began with. Set reference.model.path{was}, or to {path} if that is meant"
    )


def _rl_run_of(place: Path) -> Path | None:
    """The directory of the rl run among whose checkpoints `place` is; the nearest run counts."""
    for parent in place.parents:
        config = parent / CONFIG_FILE
        if place.relative_to(parent).parts[0] == "checkpoints" and (command := written_by(config)):
            return parent if command == "rl" else None
    return None


def _reference_in(config: Path) -> str | None:
    """The path of the reference of the run that wrote `config`; None where it does not say."""
    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        return str((tree.get("reference") or tree["actor"])["model"]["path"])
    except (OSError, ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError):
        return None  # written by another version, or changed since
