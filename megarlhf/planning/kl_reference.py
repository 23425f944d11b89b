"""The model to which `rl` measures the KL must not change without a word when a run begins with a trained model."""

from __future__ import annotations

from pathlib import Path

import yaml

from megarlhf.config import RLConfig
from megarlhf.observe.records.run_directory import CONFIG_FILE, written_by
from megarlhf.provenance import Weights, read_provenance


def check_anchor(cfg: RLConfig) -> list[str]:
    """Without a `reference` section the reference is the actor's model. Where that is a checkpoint of an earlier rl
    run, or a copy of one, the KL would be taken to a trained policy, and from run to run to another one.

    Returns: a sentence, where the KL is only measured. Raises: ValueError that names what the earlier run's reference
    was, where the KL counts; and when `megarlhf.json` beside the actor's weights is damaged.
    """
    if cfg.actor.model.random_init or not cfg.needs_reference:
        return []
    path = cfg.actor.model.path
    found = _origin(path)
    if found is None or cfg.reference is not None:
        return []
    where, was = found
    if cfg.algo.kl.coef == 0 and cfg.train.stop.max_kl is None:
        note = f"actor.model.path = {path} is {where}, and there is no reference section"
        return [f"{note}: the metric kl is measured to this trained policy{was}"]
    key = f"algo.kl.coef = {cfg.algo.kl.coef}" if cfg.algo.kl.coef > 0 else "train.stop.max_kl"
    raise ValueError(
        f"actor.model.path = {path} is {where}, and without a reference section it would be the reference too: {key} "
        "would measure the KL to this trained policy, no longer to the model that the earlier run began with. Set "
        f"reference.model.path{was}, or to {path} if that is meant"
    )


def anchor_notes(cfg: RLConfig, reference: Weights | None) -> list[str]:
    """What to say where the actor comes from an earlier rl run, and the KL is measured to another model than there."""
    stated = None if cfg.actor.model.random_init else read_provenance(cfg.actor.model.path)
    if reference is None or stated is None or stated.command != "rl" or stated.reference is None:  # dpo measures no KL
        return []
    was, earlier = stated.reference, f"the run {stated.run}, which the actor comes from"
    if was.dtype != reference.dtype:
        note = f"the reference could not be compared with that of {earlier}"
        return [f"{note}: it is loaded in {reference.dtype}, and was {was.path} in {was.dtype} there"]
    if was.digest == reference.digest:
        return []
    now = f"the reference is {reference.path} (digest {reference.digest})"
    note = f"WARNING: the KL is measured to another model than in {earlier}"
    return [f"{note}: {now}, and was {was.path} (digest {was.digest}) there"]


def _origin(path: Path) -> tuple[str, str] | None:
    """The rl run of which a model is a checkpoint, and what its reference was, in words; None for other models."""
    stated = read_provenance(path)
    if stated is not None:
        if stated.command != "rl" or stated.reference is None:
            return None
        was = f"{stated.reference.path}, digest {stated.reference.digest}"
        return f"a checkpoint of the rl run {stated.run}, step {stated.step}", f" (that run's was {was})"
    run = next((run for place in (path.absolute(), path.resolve()) if (run := _rl_run_of(place))), None)
    if run is None:
        return None
    earlier = _reference_in(run / CONFIG_FILE)
    was = f"that run's was {earlier}" if earlier else f"{run / CONFIG_FILE} says what that run's was"
    return f"a checkpoint of the rl run {run}", f" ({was})"


def _rl_run_of(place: Path) -> Path | None:
    """The directory of the rl run among whose checkpoints `place` is; the nearest run counts."""
    for parent in place.parents:
        config = parent / CONFIG_FILE
        if place.relative_to(parent).parts[0] in ("checkpoints", "resume") and (command := written_by(config)):
            return parent if command == "rl" else None
    return None


def _reference_in(config: Path) -> str | None:
    """The path of the reference of the run that wrote `config`; None where it does not say."""
    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        return str((tree.get("reference") or tree["actor"])["model"]["path"])
    except (OSError, ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError):
        return None  # written by another version, or changed since
