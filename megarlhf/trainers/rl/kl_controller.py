"""The coefficient of the KL to the reference, where it follows the KL that is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megarlhf.algo.kl import adapted_coefficient
from megarlhf.config import KLConfig


class KLController:
    """`coef` is what a step uses, in reward and loss alike; it changes between steps, and is saved with the run."""

    def __init__(self, cfg: KLConfig) -> None:
        self._cfg = cfg
        self.coef = cfg.coef

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "configured": self._configured()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A coefficient that other settings than today's have led to does not count."""
        self.coef = float(state["coef"]) if state["configured"] == self._configured() else self._cfg.coef

    def update(self, kl: float | None, num_samples: int) -> None:
        """After a step in which `kl` (the metric: mean per response token) was measured over so many samples."""
        if self._cfg.controller == "fixed" or kl is None or not math.isfinite(kl):
            return
        assert self._cfg.target is not None
        self.coef = adapted_coefficient(self.coef, kl, self._cfg.target, num_samples, self._cfg.horizon)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step that uses the coefficient; nothing where it is fixed."""
        return {} if self._cfg.controller == "fixed" else {"kl_coef": self.coef}

    def _configured(self) -> dict[str, Any]:
        return self._cfg.model_dump()
