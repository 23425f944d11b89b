"""Configuration of the watchdog: time limits of the phases of a run, and the detection of slow ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from megarlhf.config.roles import FrozenModel, NonNegative, Positive

Limit = Annotated[float, Field(ge=0.0)]
"""Seconds; 0 is no limit."""

DEFAULT_COLLECTIVE_TIMEOUT = 1800.0
NO_LIMIT_TIMEOUT = 7 * 24 * 3600.0


class StragglersConfig(FrozenModel):
    """Detection of ranks that are slower than the others. They are named in the log, and the run goes on."""

    factor: Annotated[float, Field(gt=1.0)] = 1.5
    """Factor by which a slow rank's own seconds in a step (without waiting for others) exceed the median of the other
    ranks."""
    steps: PositiveInt = 5
    """Consecutive slow steps after which a rank is named."""
    repeat_after: PositiveInt = 100
    """Steps within which the same rank is not named again for the same work."""
    min_excess: NonNegative = 1.0
    """Smallest excess over that median that counts, in seconds: a reward function of 2 ms instead of 1 ms is no
    straggler. Not read for the probe, which takes milliseconds."""
    probe_every: Annotated[int, Field(ge=0)] = 10
    """Steps between two probes, in which each rank times a matrix product of a fixed size on its own device, to find a
    device that is throttled or shared. 0: no probe."""


class WatchdogConfig(FrozenModel):
    """Time limits of phases in seconds. When a phase exceeds its limit, the log names the phase, the rank, its host and
    its stack. The run saves if it can, and ends with exit status 3.

    A limit is for one entry into the phase (one rollout, one mini-batch of `train`), not for the whole step. 0: no
    limit. The defaults are far above the times of a 70B run: lower them to ten times the `seconds_*` of your run.
    """

    enabled: bool = True
    """Apply the limits. If false, only torch's own time-out of collectives (30 minutes) ends a hanging run."""
    build: Limit = 7200.0
    """Reading data, building and loading all models, starting the rollout engine, checking and loading a resume point.
    Earlier work (joining the ranks, checking the nodes) is limited by torch's time-out."""
    rollout: Limit = 7200.0
    """Sampling the responses of a step."""
    reward: Limit = 3600.0
    """All rewards of a step: rules and reward model."""
    score: Limit = 3600.0
    """Log-probs or values of a step under one role."""
    advantages: Limit = 600.0
    """Advantages of a step."""
    observe: Limit = 600.0
    """Own metrics and observers (`observe`) of a step."""
    train: Limit = 3600.0
    """Forward and backward of one mini-batch of one role."""
    optimizer: Limit = 1800.0
    """One optimizer step of one role."""
    reshard: Limit = 1800.0
    """Transfer of the actor's weights to the rollout engine."""
    certificate: Limit = 1800.0
    """Check that the engine holds the actor's weights."""
    offload: Limit = 1800.0
    """Moving to the device what the next phase needs, and to host memory what it does not (`ROLE.offload`)."""
    eval: Limit = 7200.0
    """One evaluation on held-out data."""
    checkpoint: Limit = 7200.0
    """Writing a checkpoint, as far as training waits for it, or a step's metrics."""
    grace: Positive = 60.0
    """Seconds for a rank to leave the phase after it was interrupted. Then it ends itself with status 3."""
    stragglers: StragglersConfig = StragglersConfig()
    """Detection of slow ranks."""

    def limit(self, phase: str) -> float:
        """Limit of a phase in seconds; 0: none. `train/actor` has that of `train`."""
        return float(getattr(self, phase.partition("/")[0])) if self.enabled else 0.0

    def collective_timeout(self) -> float:
        """Seconds after which torch ends a collective: later than the watchdog, whose message names the cause."""
        if not self.enabled:
            return DEFAULT_COLLECTIVE_TIMEOUT
        limits = [self.limit(phase) for phase in PHASES]
        return max(DEFAULT_COLLECTIVE_TIMEOUT, *(limit or NO_LIMIT_TIMEOUT for limit in limits)) + self.grace + 300.0


PHASES = tuple(name for name in WatchdogConfig.model_fields if name not in ("enabled", "grace", "stragglers"))
"""Phases of a run, for metrics, watchdog and profiler. `score`, `train` and `optimizer` are entered for a role:
`score/actor`."""
