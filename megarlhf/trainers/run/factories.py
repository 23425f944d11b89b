"""Factories of the parts of a run that tests and rehearsals replace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megarlhf.config import ProfileConfig, RolloutConfig
from megarlhf.config.watchdog import WatchdogConfig
from megarlhf.models.role import Role
from megarlhf.models.weights import CHECKPOINTS, WeightSource
from megarlhf.observe.watch.phases import Phases
from megarlhf.observe.watch.profile import recorded_phases
from megarlhf.parallel.device_memory import HostMemory
from megarlhf.resume.points.writer import PointWriter
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.factory import make_engine
from megarlhf.runtime import Runtime


class MakePhases(Protocol):
    """Context with the phases of a run. Collective."""

    def __call__(
        self, watchdog: WatchdogConfig, profile: ProfileConfig, run_dir: Path, runtime: Runtime, /
    ) -> AbstractContextManager[Phases]: ...


class MakeEngine(Protocol):
    """Function that builds the configured engine, without weights. Collective."""

    def __call__(
        self, rollout: RolloutConfig, actor: Role, max_prompt_tokens: int, micro_batch_samples: int, /
    ) -> RolloutEngine: ...


@dataclass(frozen=True, kw_only=True)
class RunFactories:
    """Factories for a real run. Tests and rehearsals pass their own."""

    phases: MakePhases = recorded_phases
    weights: WeightSource = CHECKPOINTS
    """Source of the roles' weights."""
    engine: MakeEngine = make_engine
    host: Callable[[torch.device], HostMemory] = HostMemory
    """Memory for parts of roles that are not on the device."""
    writer: Callable[[Runtime], PointWriter] = PointWriter
    """Writer of resume points."""
    groups_with_signal: Callable[..., list[int]] | None = None
    """Function in place of `trainers.rl.dynamic_sampling.groups_with_signal`."""
