"""Decisions by held-out figures in the course of a run: which checkpoint is the best, and when to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megarlhf.config.choices import BestConfig, PatienceConfig, Watched, watched
from megarlhf.observe.records.metrics import Metric


class Patience:
    """Ends a run whose held-out metric stands still."""

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
        """Values of another metric say nothing; that another limit than today's has ended the run does not count."""
        limits, before = self._limits(), state["limits"]
        if state["best"] is not None and {**before, "patience": None} == {**limits, "patience": None}:
            self._best, self._evaluations_since = state["best"], state["evaluations_since"]
        self.reason = state["reason"] if before == limits else None

    def watch(self, evaluation: Mapping[str, Metric]) -> bool:
        """Take note of an evaluation that is due by `eval.every`; returns whether the run ends here."""
        value = evaluation.get(self._watched.metric)
        if value is not None and math.isfinite(value):
            if self._watched.better(value, self._best, self._cfg.min_change):
                self._best, self._evaluations_since = value, 0
            else:
                self._evaluations_since += 1
        if self._cfg.patience is not None and self._evaluations_since >= self._cfg.patience:
            self.reason = f"stopped: {self._watched.metric} has not got better for {self._cfg.patience} evaluations"
        return self.reason is not None


@dataclass(frozen=True)
class _Kept:
    """A step whose export was the best one for a while."""

    step: int
    value: float
    only: bool
    """Nothing else asked for the export."""


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
        """For people: what an earlier part of the run had as the best, by another rule than today's."""

    def state_dict(self) -> dict[str, Any]:
        return {"watched": self._asdict(), "kept": [asdict(each) for each in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Values of another metric, or of the other way to be better, say nothing."""
        kept, before = [_Kept(**each) for each in state["kept"]], state["watched"]
        if before == self._asdict():
            self._kept = kept
        elif kept and before is not None:
            self.forgotten = (
                f"WARNING: the best so far, step {kept[-1].step}, was chosen by another rule ({before['metric']} = "
                f"{kept[-1].value:.4g}) than checkpoint.best is now, and is forgotten: the next evaluation "
                "is the first that checkpoints/best is chosen from"
            )

    def _asdict(self) -> dict[str, str] | None:
        return None if self._watched is None else asdict(self._watched)

    @property
    def watched(self) -> Watched | None:
        """Metric that decides; None: nothing is chosen."""
        return self._watched

    @property
    def step(self) -> int | None:
        """Step of the best export so far."""
        return self._kept[-1].step if self._kept else None

    @property
    def words(self) -> str:
        """For people: the best so far."""
        assert self._watched is not None
        return f"best {self._watched.metric}: {self._kept[-1].value:.4g}, step {self._kept[-1].step}"

    def watch(self, evaluation: Mapping[str, Metric]) -> bool:
        """Whether the evaluation is the best so far: then the export of its step is to be written and taken."""
        self._candidate = None
        if self._watched is None:
            return False
        value = evaluation.get(self._watched.metric)
        before = self._kept[-1].value if self._kept else self._watched.worst
        if value is not None and math.isfinite(value) and self._watched.better(value, before):
            self._candidate = value
        return self._candidate is not None

    def take(self, step: int, *, only: bool) -> None:
        """The export of the step that was watched last is there; `only`: nothing else asked for it."""
        assert self._candidate is not None
        self._kept.append(_Kept(step, self._candidate, only))
        self._candidate = None

    def needed(self) -> dict[int, bool]:
        """Steps whose exports have to stay, and whether nothing else asked for them."""
        return {each.step: each.only for each in self._kept}

    def release(self, oldest: int | None) -> list[int]:
        """Every resume point that is left is of step `oldest` or later (None: none is gone back to): the steps whose
        exports were there for being the best only, and are needed no more."""
        spent = [
            each
            for each, after in zip(self._kept, self._kept[1:], strict=False)
            if oldest is None or after.step <= oldest
        ]
        self._kept = self._kept[len(spent) :]
        return [each.step for each in spent if each.only]
