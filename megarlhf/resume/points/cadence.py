"""Decides when a resume point is due, and when the job's time left is too short to go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megarlhf.config import CheckpointConfig
from megarlhf.resume.points.point import Position


@dataclass
class Cadence:
    """Cadence of resume points, asked at every boundary. All ranks agree on steps and updates; for times, rank 0
    decides."""

    cfg: CheckpointConfig
    time_left: Callable[[], float | None]
    clock: Callable[[], float] = time.monotonic
    longest_boundary: float = 0.0
    """Seconds between two boundaries."""
    longest_save: float = 0.0
    _saved_at: float = field(init=False)
    _updates: int = 0
    """Optimizer updates since the last save."""
    _last_boundary: float = field(init=False)

    def __post_init__(self) -> None:
        self._saved_at = self._last_boundary = self.clock()

    def at_boundary(self, updates: int) -> None:
        """Note a boundary, `updates` optimizer updates after the last one: actor and critic count as one."""
        now = self.clock()
        self.longest_boundary = max(self.longest_boundary, now - self._last_boundary)
        self._last_boundary = now
        self._updates += updates

    def due(self, position: Position) -> bool:
        """Tell whether a point is due at this boundary, by steps or updates."""
        cfg, at_step = self.cfg, not position.update and position.step > 0
        return bool(cfg.every and at_step and position.step % cfg.every == 0) or bool(
            cfg.every_updates and self._updates >= cfg.every_updates
        )

    def overdue(self) -> bool:
        """Tell whether a point is due by time, at the next boundary at which none is being written."""
        return 0 < self.cfg.every_minutes <= (self.clock() - self._saved_at) / 60

    def time_is_up(self) -> bool:
        """Tell whether another step and a save after it may no longer fit into the job."""
        left = self.time_left()
        return left is not None and left < self.longest_boundary + self.longest_save + self.cfg.seconds_before_end

    def save_at_once(self) -> bool:
        """Tell whether there is only time left for a save, even in the middle of a step."""
        left = self.time_left()
        return left is not None and left < self.longest_save + self.cfg.seconds_before_end

    def saving(self) -> None:
        """A save begins."""
        self._saved_at, self._updates = self.clock(), 0

    def saved(self, seconds: float) -> None:
        """A save has ended, well or not."""
        self.longest_save = max(self.longest_save, seconds)
