"""Decisions by held-out metrics during a run: which checkpoint is the best, and when to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megarlhf.config.choices import BestConfig, PatienceConfig, Watched, watched
from megarlhf.observe.records.metrics import Metric


class Patience:
    """Ends a run whose held-out metric no longer improves."""

    def __init__(self, cfg: PatienceConfig, command: str) -> None:
        self._cfg = cfg
        self._watched = watched(command, "train.stop", cfg.metric, cfg.mode)
        self._best = self._watched.worst
        self._evaluations_since = 0
        self.reason: str | None = None

    def state_dict(self) -> dict[str, Any]:
        best = self._best if math.isfinite(self._best) else None
        counted = {"best": best, "evaluations_since": self._evaluations_since}
        return {**counted, "reason": self.reason, "limits": self._limits()}

    def _limits(self) -> dict[str, Any]:
        return {name: getattr(self._cfg, name) for name in PatienceConfig.model_fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state. Values of another metric, and a stop by another limit than today's, are ignored."""
        limits, before = self._limits(), state["limits"]
        if state["best"] is not None and {**before, "patience": None} == {**limits, "patience": None}:
            self._best, self._evaluations_since = state["best"], state["evaluations_since"]
        self.reason = state["reason"] if before == limits else None

    def watch(self, evaluation: Mapping[str, Metric]) -> bool:
        """Record an evaluation that is due by `eval.every`; returns whether the run ends here."""
        value = evaluation.get(self._watched.metric)
        if value is not None and math.isfinite(value):
            if self._watched.better(value, self._best, self._cfg.min_change):
                self._best, self._evaluations_since = value, 0
            else:
                self._evaluations_since += 1
        if self._cfg.patience is not None and self._evaluations_since >= self._cfg.patience:
            self.reason = f"stopped: {self._watched.metric} has not improved for {self._cfg.patience} evaluations"
        return self.reason is not None


@dataclass(frozen=True)
class _Kept:
    """A step whose export is or was the best."""

    step: int
    value: float
    only: bool
    """Whether the export was written only because it was the best."""


class Best:
    """The step with the best held-out figures, and the exports that are kept for it.

    A former best export is kept while a resume point older than its successor exists, because resuming there makes it
    the best again.
    """

    def __init__(self, cfg: BestConfig | None, command: str) -> None:
        self._watched = None if cfg is None else watched(command, "checkpoint.best", cfg.metric, cfg.mode)
        self._kept: list[_Kept] = []
        self._candidate: float | None = None
        self.forgotten = ""
        """Message about a best step that an earlier part of the run chose by another rule than today's."""

    def state_dict(self) -> dict[str, Any]:
        return {"watched": self._asdict(), "kept": [asdict(kept) for kept in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state. Steps chosen by another metric, or by the other mode, are ignored."""
        kept, before = [_Kept(**fields) for fields in state["kept"]], state["watched"]
        if before == self._asdict():
            self._kept = kept
        elif kept and before is not None:
            self.forgotten = (
                f"WARNING: the best so far, step {kept[-1].step}, was chosen by another rule ({before['metric']} = "
                f"{kept[-1].value:.4g}) than today's checkpoint.best, and is ignored: checkpoints/best is chosen from "
                "the next evaluation on"
            )

    def _asdict(self) -> dict[str, str] | None:
        return None if self._watched is None else asdict(self._watched)

    @property
    def watched(self) -> Watched | None:
        """Metric that decides; None if no step is chosen."""
        return self._watched

    @property
    def step(self) -> int | None:
        """Step of the best export so far."""
        return self._kept[-1].step if self._kept else None

    @property
    def description(self) -> str:
        """Metric, value and step of the best so far."""
        assert self._watched is not None
        return f"best {self._watched.metric}: {self._kept[-1].value:.4g}, step {self._kept[-1].step}"

    def watch(self, evaluation: Mapping[str, Metric]) -> bool:
        """Whether the evaluation is the best so far. If so, its step is exported, and `take` is called."""
        self._candidate = None
        if self._watched is None:
            return False
        value = evaluation.get(self._watched.metric)
        before = self._kept[-1].value if self._kept else self._watched.worst
        if value is not None and math.isfinite(value) and self._watched.better(value, before):
            self._candidate = value
        return self._candidate is not None

    def take(self, step: int, *, only: bool) -> None:
        """Record that the step of the last evaluation was exported; `only`: just because it is the best."""
        assert self._candidate is not None
        self._kept.append(_Kept(step, self._candidate, only))
        self._candidate = None

    def needed(self) -> dict[int, bool]:
        """Steps whose exports must stay, and whether they were written only for being the best."""
        return {kept.step: kept.only for kept in self._kept}

    def release(self, oldest: int | None) -> list[int]:
        """Forget former best steps that no resume point needs; returns those whose exports can be removed.

        oldest: step of the oldest resume point; None: no point will be resumed
        """
        pairs = zip(self._kept, self._kept[1:], strict=False)
        spent = [kept for kept, successor in pairs if oldest is None or successor.step <= oldest]
        self._kept = self._kept[len(spent) :]
        return [kept.step for kept in spent if kept.only]
