"""Controller that adapts the coefficient of the KL to the measured KL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megarlhf.algo.kl import adapted_coefficient
from megarlhf.config import KLConfig


class KLController:
    """Coefficient of the KL, in the reward or in the loss. It changes between steps and is saved with the run."""

    def __init__(self, cfg: KLConfig) -> None:
        self._cfg = cfg
        self.coef = cfg.coef

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "configured": self._cfg.model_dump()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the coefficient, unless other settings than today's led to it."""
        self.coef = float(state["coef"]) if state["configured"] == self._cfg.model_dump() else self._cfg.coef

    def update(self, kl: float | None, num_samples: int) -> None:
        """Adapt the coefficient to the metric `kl` (mean per response token) of a step of `num_samples` samples."""
        if self._cfg.controller == "fixed" or kl is None or not math.isfinite(kl):
            return
        assert self._cfg.target is not None
        self.coef = adapted_coefficient(self.coef, kl, self._cfg.target, num_samples, self._cfg.horizon)

    def metrics(self) -> dict[str, float]:
        """The coefficient as a metric; nothing where it is fixed."""
        return {} if self._cfg.controller == "fixed" else {"kl_coef": self.coef}
