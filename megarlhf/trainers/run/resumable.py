"""State that a resume needs, and the identity by which it recognises the run."""

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
    """Stop request of the run, entered before the models are built so that no signal is lost."""
    data: str
    """Digest of the training samples."""
    states: Mapping[str, Stateful] = field(default_factory=dict)
    """Objects that keep state over steps, by name."""
    tables: Mapping[str, Stateful] = field(default_factory=dict)
    """Objects whose state has tensors, by name. Their states must not change after they were taken."""
    base: Mapping[str, Weights] = field(default_factory=dict)
    """Weights with which each trained role began."""
    adapter_bases: Mapping[str, Weights] = field(default_factory=dict)
    """Weights below the adapter, of the roles that have one."""
    writing: Writing | None = None
    """The way in which records become tokens, for the provenance."""
    frozen: Mapping[str, Weights] = field(default_factory=dict)
    """Weights with which each other role began: the reference (also one that moves), the reward model."""
    architectures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Architecture of every role that is built."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Digests of other inputs of the computation, by name."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's source files, by name; a changed one is noted and does not prevent a resume."""
    on_saved: Callable[[Position], None] = lambda position: None
    """Called on rank 0 after a resume point was written, with the position of the oldest point that is kept."""
    best: Best | None = None
    """Choice of the best step, if one is chosen."""
    writer: Callable[[Runtime], PointWriter] = PointWriter
    """Writer of resume points."""

    @property
    def reference(self) -> Weights | None:
        """Weights of the reference, in `rl`, and in `dpo` with a loss that reads one."""
        return self.frozen.get("reference")


def identity_of(cfg: FrozenModel, run: RunConfig, command: str, training: ResumableState) -> Identity:
    """Identity of this start of a run."""

    def changed(before: Mapping[str, Any]) -> list[str]:
        assert isinstance(cfg, SFTConfig | RMConfig | DPOConfig | RLConfig)
        try:
            return [str(change) for change in compare(type(cfg).model_validate(before), cfg).mathematics]
        except ValueError as error:
            return [f"it cannot be read by this version ({error})"]

    adapter_bases = {
        f"the model that the adapter of {role} is on ({role}.model.path)": base.digest
        for role, base in training.adapter_bases.items()
    }
    return Identity(
        command=command,
        data=training.data,
        frozen={role: weights.digest for role, weights in training.frozen.items()},
        others={**training.others, **adapter_bases},
        sources=training.sources,
        architectures=training.architectures,
        base=training.base,
        config=cfg.model_dump(mode="json"),
        changed=changed,
        allow_changes=run.allow_changes,
    )
