"""Configuration of the watchdog: how long each phase of a run may take, and which rank counts as slow."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from megarlhf.config.roles import FrozenModel, NonNegative, Positive

Limit = Annotated[float, Field(ge=0.0)]
"""Seconds; 0 is no limit."""

DEFAULT_COLLECTIVE_TIMEOUT = 1800.0
NO_LIMIT_TIMEOUT = 7 * 24 * 3600.0


class StragglersConfig(FrozenModel):
    """When a rank is named as slower than the others. It is said in the log and ends nothing."""

    factor: Annotated[float, Field(gt=1.0)] = 1.5
    """A rank is slow in a step when its own seconds (without waiting for others) exceed the median of the other ranks'
    by this factor."""
    steps: PositiveInt = 5
    """It is named after so many slow steps in a row."""
    repeat_after: PositiveInt = 100
    """The same rank is not named again for the same work within so many steps."""
    min_excess: NonNegative = 1.0
    """Seconds above that median that count at all: a reward function of 2 ms instead of 1 ms is no straggler. Not read
    for the probe, which takes milliseconds."""
    probe_every: Annotated[int, Field(ge=0)] = 10
    """Steps between two probes: each rank times a matrix product of a fixed size on its own device, which finds a
    device that is throttled or shared. 0: no probe."""


class WatchdogConfig(FrozenModel):
    """Seconds that a phase may take. When one passes its limit, the log names the phase, the rank, its host and what it
    was doing (its stack), the run saves if it can, and ends with exit status 3.

    A limit is for one entry into the phase (one rollout, one mini-batch of `train`), not for the whole step. 0: no
    limit. The defaults are far above what a phase of a 70B run takes: lower them to what your run shows in
    `seconds_*`, times ten.
    """

    enabled: bool = True
    """False: no limits, and torch's own time-out of collectives (30 minutes) is what ends a hanging run."""
    build: Limit = 7200.0
    """Reading data, building and loading all models, starting the rollout engine, examining and loading a resume
    point. What comes before, joining the ranks and checking the nodes, is ended by torch's time-out."""
    rollout: Limit = 7200.0
    """Sampling the responses of a step."""
    reward: Limit = 3600.0
    """All rewards of a step: rules and reward model."""
    score: Limit = 3600.0
    """Log-probs or values of a step under one role."""
    advantages: Limit = 600.0
    """Advantages of a step."""
    train: Limit = 3600.0
    """Forward and backward of one mini-batch of one role."""
    optimizer: Limit = 1800.0
    """One optimizer step of one role."""
    reshard: Limit = 1800.0
    """Carrying the actor's weights into the rollout engine."""
    certificate: Limit = 1800.0
    """The proof that the engine holds the actor's weights."""
    offload: Limit = 1800.0
    """Bringing to the device what the next phase needs, and to host memory what it does not (`ROLE.offload`)."""
    eval: Limit = 7200.0
    """One evaluation on held-out data."""
    checkpoint: Limit = 7200.0
    """Writing a checkpoint, as far as training waits for it, or a step's metrics."""
    grace: Positive = 60.0
    """Seconds that a rank has, after it was interrupted, to leave the phase. Then it ends itself with status 3."""
    stragglers: StragglersConfig = StragglersConfig()
    """Which rank counts as slow."""

    def limit(self, phase: str) -> float:
        """Of `train/actor` as of `train`, in seconds; 0 is no limit."""
        return float(getattr(self, phase.partition("/")[0])) if self.enabled else 0.0

    def collective_timeout(self) -> float:
        """Seconds after which torch ends a collective: later than the watchdog, which says why."""
        if not self.enabled:
            return DEFAULT_COLLECTIVE_TIMEOUT
        limits = [self.limit(phase) for phase in PHASES]
        return max(DEFAULT_COLLECTIVE_TIMEOUT, *(limit or NO_LIMIT_TIMEOUT for limit in limits)) + self.grace + 300.0


PHASES = tuple(name for name in WatchdogConfig.model_fields if name not in ("enabled", "grace", "stragglers"))
"""The phases of a run, one list for metrics, watchdog and profiler. `score`, `train` and `optimizer` are entered for a
role: `score/actor`."""
