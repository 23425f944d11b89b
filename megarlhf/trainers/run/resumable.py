"""State with which a run can be resumed, and by which a resume recognises it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarlhf.config import CheckpointConfig, DPOConfig, FrozenModel, RLConfig, RMConfig, RunConfig, SFTConfig
from megarlhf.models.role import Role
from megarlhf.provenance import Weights, Writing
from megarlhf.resume.claim.config_changes import compare
from megarlhf.resume.points.point import Position
from megarlhf.resume.points.restore import Identity
from megarlhf.resume.points.stateful import Stateful
from megarlhf.resume.points.writer import PointWriter
from megarlhf.resume.signals import StopRequest
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.best_checkpoint import Best


@dataclass(frozen=True)
class ResumableState:
    """Everything of a training run that a resume needs."""

    checkpoint: CheckpointConfig
    roles: Sequence[Role]
    """Roles whose weights change: they are saved."""
    stop: StopRequest
    """Entered before the models are built, so that a signal in the meantime is not lost."""
    data: str
    """Digest of the training samples."""
    states: Mapping[str, Stateful] = field(default_factory=dict)
    """Whatever keeps state over steps, by name."""
    base: Mapping[str, Weights] = field(default_factory=dict)
    """Weights that each trained role began with."""
    adapter_bases: Mapping[str, Weights] = field(default_factory=dict)
    """Weights below the adapter, of the roles that have one."""
    writing: Writing | None = None
    """How the run writes its records as tokens."""
    reference: Weights | None = None
    """Weights of the reference, in `rl` and where the loss of `dpo` reads one."""
    architectures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Architecture of every role that is built."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Digests of whatever else takes part in what is computed, by its name."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests of sources of the user's, by name; another source is said and refuses nothing."""
    on_saved: Callable[[Position], None] = lambda position: None
    """Called on rank 0 after a resume point was written, with the position of the oldest of the newest `keep`."""
    best: Best | None = None
    """Choice of the best step, where one is made."""
    writer: Callable[[Runtime], PointWriter] = PointWriter
    """Makes what writes them."""


def identity_of(cfg: FrozenModel, run: RunConfig, command: str, training: ResumableState) -> Identity:
    """Identity of this start of a run."""

    def changed(before: Mapping[str, Any]) -> list[str]:
        assert isinstance(cfg, SFTConfig | RMConfig | DPOConfig | RLConfig)
        try:
            return [str(change) for change in compare(type(cfg).model_validate(before), cfg).mathematics]
        except ValueError as error:
            return [f"it cannot be read by this version ({error})"]

    return Identity(
        command=command,
        data=training.data,
        reference=None if training.reference is None else training.reference.digest,
        others={
            **training.others,
            **{
                f"the model that the adapter of {role} is on ({role}.model.path)": base.digest
                for role, base in training.adapter_bases.items()
            },
        },
        sources=training.sources,
        architectures=training.architectures,
        base=training.base,
        config=cfg.model_dump(mode="json"),
        changed=changed,
        allow_changes=run.allow_changes,
    )
