"""Gap between the log-probs of rollout and trainer: measured, limited, and corrected by `algo.rollout_correction`.

At the same weights and temperature both should give a sampled token the same log-prob. The rest is rounding, unless
something is wrong. The policy's ratio uses the trainer's own log-probs (`old_logprobs`), so without the correction
nothing else reads the engine's. Where older weights drew a part of the samples, the gap is measured on a few responses
at equal weights (`scoring.probe_gap`), and what the age of the weights adds is measured by itself (`staleness`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.rollout_correction import Correction, rollout_correction
from megarlhf.algo.segments import Segments
from megarlhf.columns import Ragged
from megarlhf.config import LogprobGapConfig, RolloutCorrectionConfig
from megarlhf.experience import Experience
from megarlhf.models.settings import DTYPES
from megarlhf.trainers.experience.statistics import largest_of, means_of, num_tokens

log = logging.getLogger(__name__)

FIRST_TURNS, LATER_TURNS = "rollout_logprob_gap_first_turns", "rollout_logprob_gap_later_turns"
"""Metrics of conversations: mean gap of the tokens of first turns, and of later ones."""


class LogprobGapError(FloatingPointError):
    """The log-probs of rollout and trainer differed too much for too many steps."""


def logprob_gap(experience: Experience) -> dict[str, float]:
    """|rollout's log-prob - trainer's|, in nats, over the response tokens of a step on all ranks. Collective.

    Mean, 99.9th percentile and largest, exact and equal on every rank. The percentile is the smallest occurring gap
    that at least 999 of 1000 tokens do not exceed. NaN on either side makes the mean NaN.
    """
    old = experience.columns["old_logprobs"]
    gap_T = (experience.rollout_logprobs.values_T - old.values_T).abs()
    largest = experience.largest_values(gap_T, num_tokens(experience) // 1000 + 1)
    return {
        "rollout_logprob_gap_mean": means_of(experience, gap_T)[0],
        "rollout_logprob_gap_p999": float(largest[-1]),
        "rollout_logprob_gap_max": float(largest[0]),
        **_gap_by_turn(experience, gap_T, old.lengths_N),
    }


def _gap_by_turn(experience: Experience, gap_T: Tensor, lengths_N: Tensor) -> dict[str, float]:
    """Mean gap of first turns, and of later ones, in conversations with an environment. Collective.

    lengths_N: tokens of each sample in gap_T
    """
    stretches = experience.rollouts.stretches
    if stretches is None:
        return {}
    first_N = torch.tensor([int(row[0]) for row in stretches.lengths.rows()])
    starts_N = lengths_N.cumsum(0) - lengths_N
    within_T = torch.arange(len(gap_T)) - starts_N.repeat_interleave(lengths_N)
    is_first_T = (within_T < first_N.repeat_interleave(lengths_N)).to(gap_T)
    first, share, later = means_of(experience, gap_T * is_first_T, is_first_T, gap_T * (1 - is_first_T))
    by_turn = {FIRST_TURNS: (first, share), LATER_TURNS: (later, 1 - share)}
    return {name: mean / share for name, (mean, share) in by_turn.items() if share > 0}


def staleness(experience: Experience, step: int) -> dict[str, float]:
    """Age of the weights that drew the samples of a step, in steps, and how far the policy has moved since: the mean of
    the trainer's log-prob minus the engine's. Collective."""
    ages_T = step - experience.rollouts.versions.per_token().values_T
    moved_T = experience.columns["old_logprobs"].values_T - experience.rollout_logprobs.values_T
    return {
        "staleness_mean": float(ages_T.float().mean()),
        "staleness_max": int(ages_T.max()),
        "staleness_kl": means_of(experience, moved_T)[0],
    }


def add_rollout_correction(experience: Experience, cfg: RolloutCorrectionConfig) -> tuple[Experience, dict[str, float]]:
    """Add the column `rollout_weights`, factors of the tokens' losses; returns metrics too. Nothing changes for
    `kind = none`. Collective."""
    if cfg.kind == "none":
        return experience, {}
    old = experience.columns["old_logprobs"]
    rollout_T = experience.rollout_logprobs.values_T.to(old.values_T)
    responses = Segments(old.lengths_N.to(old.values_T.device), old.num_tokens)
    correction = correction_of(cfg, old.values_T, rollout_T, responses)
    cut, weight = means_of(experience, correction.cut_T.float(), correction.weights_T)
    metrics = {
        "rollout_correction_cut": cut,
        "rollout_correction_weight_mean": weight,
        "rollout_correction_ratio_max": largest_of(experience, correction.ratio_T),
    }
    return experience.with_columns({"rollout_weights": Ragged(correction.weights_T, old.lengths_N)}), metrics


def correction_of(cfg: RolloutCorrectionConfig, old_T: Tensor, rollout_T: Tensor, responses: Segments) -> Correction:
    """Apply `algo.rollout_correction` to the tokens of the responses, [T]."""
    assert cfg.kind in ("truncate", "mask"), f"no correction is configured: {cfg.kind}"
    return rollout_correction(
        old_T,
        rollout_T,
        responses,
        kind=cfg.kind,
        level=cfg.level,
        low=cfg.low,
        high=cfg.high,
        mask_weight=cfg.mask_weight,
    )


class MismatchGuard:
    """Counts consecutive steps in which the gap exceeds a limit. Only `raise_if_failed` raises."""

    def __init__(self, cfg: LogprobGapConfig, dtype: torch.dtype) -> None:
        self._limits = next(cfg.limits(name) for name in DTYPES if DTYPES[name] == dtype)
        self._steps_allowed, self._steps, self._all_steps = cfg.steps, 0, 0
        self._exceeded = ""

    def state_dict(self) -> dict[str, Any]:
        limits = dict(self._limits)
        return {"steps": self._steps, "all_steps": self._all_steps, "exceeded": self._exceeded, "limits": limits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the counts. Steps that exceeded other limits than today's do not count."""
        self._steps = state["steps"] if state["limits"] == dict(self._limits) else 0
        self._all_steps, self._exceeded = state["all_steps"], state["exceeded"]

    def failed(self, *, last: bool) -> bool:
        """Whether the run ends here: after too many steps in a row, or after the `last` step of a run in which all
        steps exceeded a limit."""
        return self._steps >= self._steps_allowed or (last and 0 < self._steps == self._all_steps)

    def watch(self, gap: Mapping[str, float]) -> None:
        """Compare a step's gap, found among its metrics, with the limits. NaN exceeds every limit."""
        if "rollout_logprob_gap_mean" not in gap:  # nothing was drawn that could be compared
            return
        values = {name: gap[f"rollout_logprob_gap_{name}"] for name in self._limits}
        over = [
            f"rollout_logprob_gap_{name} = {value:.3g} nats, above rollout.logprob_gap.{name} = {self._limits[name]:g}"
            for name, value in values.items()
            if not value <= self._limits[name]
        ]
        self._all_steps += 1
        self._steps = self._steps + 1 if over else 0
        self._exceeded = " and ".join(over)
        if over and gap.get(FIRST_TURNS, math.inf) <= self._limits["mean"] < gap.get(LATER_TURNS, 0.0):
            self._exceeded += (
                f" (first turns {gap[FIRST_TURNS]:.3g}, later ones {gap[LATER_TURNS]:.3g}: what the engine read before "
                "later turns is not what the trainer reads there, such as a history that was tokenized again, a "
                "thought that was dropped, or positions that are off)"
            )
        if over:
            log.info(  # equal on every rank; the first rank shows it
                "%s: step %d of the %d in a row that end the run", self._exceeded, self._steps, self._steps_allowed
            )

    def raise_if_failed(self, *, last: bool) -> None:
        """Raises: LogprobGapError, naming the likely causes, when the run has `failed`."""
        if self.failed(last=last):
            steps = f"{self._steps} step(s) in a row" + ", all of this run" * (self._steps == self._all_steps)
            raise LogprobGapError(
                f"rollout and trainer disagree: {self._exceeded}, for {steps}. A checkpoint "
                "has been written. Likely causes: the engine holds other weights than the actor; log-probs at another "
                "temperature or before it; top-p or top-k truncation on one side only; a lower precision on one side. "
                "Where the gap is rounding and nothing else (a large mixture of experts in bf16), raise the limit"
            )
