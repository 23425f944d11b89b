"""The reference of the KL in `rl`. It must not change silently when a run begins with a trained model."""

from __future__ import annotations

from pathlib import Path

import yaml

from megarlhf.config import ModelConfig, RLConfig
from megarlhf.observe.records.run_directory import CONFIG_FILE, written_by
from megarlhf.provenance import Weights, read_provenance


def check_reference(cfg: RLConfig) -> list[str]:
    """Refuse an actor that is a checkpoint of an earlier rl run as the reference of its own KL.

    Without a `reference` section the reference is the actor's model. If that is a checkpoint of an rl run, or a copy of
    one, the KL would be measured to a trained policy, and to another one in each run.

    Returns: a sentence if the KL is only logged. Raises: ValueError that names the earlier run's reference, if the KL
    has an effect; and if `megarlhf.json` beside the actor's weights is damaged.
    """
    if cfg.actor.model.random_init or not cfg.needs_reference:
        return []
    path = cfg.actor.model.path
    origin = _origin(path)
    if origin is None or cfg.reference is not None:
        return []
    checkpoint, earlier = origin
    if cfg.algo.kl.coef == 0 and cfg.train.stop.max_kl is None:
        note = f"actor.model.path = {path} is {checkpoint}, and there is no reference section"
        return [f"{note}: the metric kl is measured to this trained policy{earlier}"]
    key = f"algo.kl.coef = {cfg.algo.kl.coef}" if cfg.algo.kl.coef > 0 else "train.stop.max_kl"
    raise ValueError(
        f"actor.model.path = {path} is {checkpoint}, and without a reference section it would be the reference too: "
        f"{key} would measure the KL to this trained policy, no longer to the model that the earlier run began with. "
        f"Set reference.model.path{earlier}, or to {path} if that is meant"
    )


def reference_notes(actor: ModelConfig, reference: Weights | None) -> list[str]:
    """A warning if the actor comes from an earlier rl run, whose KL was measured to another model."""
    stated = None if actor.random_init else read_provenance(actor.path)
    if reference is None or stated is None or stated.command != "rl" or stated.reference is None:  # dpo measures no KL
        return []
    earlier, run = stated.reference, f"the run {stated.run}, from which the actor comes"
    if earlier.dtype != reference.dtype:
        note = f"the reference could not be compared with that of {run}"
        return [f"{note}: it is loaded in {reference.dtype}, and was {earlier.path} in {earlier.dtype} there"]
    if earlier.digest == reference.digest:
        return []
    note = f"WARNING: the KL is measured to another model than in {run}"
    now = f"the reference is {reference.path} (digest {reference.digest})"
    return [f"{note}: {now}, and was {earlier.path} (digest {earlier.digest}) there"]


def _origin(path: Path) -> tuple[str, str] | None:
    """The rl run of which a model is a checkpoint, and that run's reference, in words; None for other models."""
    stated = read_provenance(path)
    if stated is not None:
        if stated.command != "rl" or stated.reference is None:
            return None
        earlier = f"{stated.reference.path}, digest {stated.reference.digest}"
        return f"a checkpoint of the rl run {stated.run}, step {stated.step}", f" (that run's was {earlier})"
    run = _rl_run_of(path.absolute()) or _rl_run_of(path.resolve())
    if run is None:
        return None
    reference = _reference_in(run / CONFIG_FILE)
    earlier = f"that run's was {reference}" if reference else f"{run / CONFIG_FILE} names that run's"
    return f"a checkpoint of the rl run {run}", f" ({earlier})"


def _rl_run_of(path: Path) -> Path | None:
    """The directory of the rl run whose checkpoint `path` is; the nearest run counts."""
    for parent in path.parents:
        config = parent / CONFIG_FILE
        if path.relative_to(parent).parts[0] in ("checkpoints", "resume") and (command := written_by(config)):
            return parent if command == "rl" else None
    return None


def _reference_in(config: Path) -> str | None:
    """The path of the reference of the run that wrote `config`; None if the file does not name it."""
    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
        return str((tree.get("reference") or tree["actor"])["model"]["path"])
    except (OSError, ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError):
        return None  # written by another version, or changed since
