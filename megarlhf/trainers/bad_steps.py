"""Optimizer steps whose numbers are not to be trusted: which are skipped, what is kept of them, when the run ends.

Every rank decides from the same two numbers, the loss summed over all ranks and the agreed gradient norm
(`parallel.step.Trainer.gradient_norm`), so a step is skipped on all ranks or on none.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megarlhf.config import SkipConfig
from megarlhf.models.role import Role
from megarlhf.parallel.batching import MicroBatchLayout
from megarlhf.parallel.step import MicroBatch, StepResult

log = logging.getLogger(__name__)

WINDOW = 64
"""Gradient norms that the running median is of."""
MIN_NORMS = 16
KEPT = 5
"""Skipped steps that are kept in `failures/`: the newest."""


class SkippedTooOften(FloatingPointError):
    """Too many optimizer steps of one role in a row were skipped. Raised on every rank; no weight has been changed."""


@dataclass(frozen=True)
class Update:
    """Which optimizer step of the run, and what it is made of."""

    step: int
    """1 is the first, as in the metrics."""
    number: int | None
    """Of the mini-batch in its step, from 0; None where a step has one."""
    samples: Sequence[int]
    """The mini-batch, by the numbers of the data (sft, rm) or of the step's samples (rl)."""

    @property
    def name(self) -> str:
        return f"step_{self.step:06d}" + ("" if self.number is None else f"_update_{self.number:04d}")


class BadSteps:
    """Of one role."""

    def __init__(self, cfg: SkipConfig, failures: Path) -> None:
        self._cfg, self._failures = cfg, failures
        self._in_a_row = 0
        self._norms: deque[float] = deque(maxlen=WINDOW)
        """Of the last steps that were not skipped."""

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row, "norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_a_row, self._norms = int(state["in_a_row"]), deque(state["norms"], maxlen=WINDOW)

    def reason_to_skip(self, sums: dict[str, float], norm: float) -> str:
        """Why a step of this loss and gradient norm is skipped; empty: it is not."""
        if not math.isfinite(sums["loss"]):
            return f"the loss is {sums['loss']}"
        if not math.isfinite(norm):
            return "the gradient is not finite"
        above = self._cfg.skip_grad_norm_above
        if above is not None and norm > above:
            return f"the gradient norm {norm:.4g} is above train.skip_grad_norm_above = {above:g}"
        factor = self._cfg.skip_grad_norm_factor
        if factor is not None and len(self._norms) >= MIN_NORMS and norm > factor * (middle := median(self._norms)):
            return (
                f"the gradient norm {norm:.4g} is above train.skip_grad_norm_factor = {factor:g} times {middle:.4g}, "
                f"the median of the last {len(self._norms)} steps"
            )
        return ""

    def apply(self, role: Role, sums: dict[str, float], update: Update, batches: Sequence[MicroBatch]) -> StepResult:
        """The optimizer step after `role.accumulate` has returned `sums` for this rank's `batches`, unless it is
        skipped. Collective.

        Raises: SkippedTooOften, when this is one skipped step in a row too many.
        """
        result = role.optimizer_step(sums, self.reason_to_skip)
        if not result.skipped:
            self._in_a_row = 0
            self._norms.append(result.grad_norm)
            return result
        self._in_a_row += 1
        most = self._cfg.max_skipped_in_a_row
        kept = self._failures / f"{update.name}_{role.name}"
        try:
            keep(kept, role, result, update, batches)
        except OSError as error:  # the evidence is not worth a run
            log.warning("the batch of the skipped step could not be kept in %s: %s", kept, error)
        what = f"{role.name}, {update.name.replace('_', ' ')}: {result.skipped}"
        log.info("optimizer step skipped on all ranks (%d in a row, %d end the run): %s", self._in_a_row, most, what)
        if self._in_a_row >= most:
            raise SkippedTooOften(
                f"{what}. {self._in_a_row} optimizer step(s) in a row were skipped, and train.max_skipped_in_a_row = "
                f"{most}; the weights are those before them. The batch is kept in {kept}. Look at the last losses, "
                "lower the learning rate, or check the data of this step"
            )
        return result


def keep(directory: Path, role: Role, result: StepResult, update: Update, batches: Sequence[MicroBatch]) -> None:
    """Each rank's micro-batches and gradients by parameter; the step's numbers; nothing but the newest `KEPT`."""
    runtime = role.mesh.runtime
    directory.mkdir(parents=True, exist_ok=True)
    tensors = [
        {
            "tokens_BS": batch.tokens_BS.cpu(),
            "columns": {name: column.cpu() for name, column in batch.columns.items()},
            "layout": None if batch.layout is None else asdict(batch.layout),
        }
        for batch in batches
    ]
    stem = f"rank_{runtime.rank:05d}"
    torch.save(tensors, directory / f".{stem}.pt.partial")
    (directory / f".{stem}.pt.partial").replace(directory / f"{stem}.pt")
    gradients = {name: _norm(p) for name, p in role.shard.module.named_parameters() if p.requires_grad}
    numbers: dict[str, Any] = {"gradient_norms_of_this_rank": gradients}
    if runtime.is_main:
        numbers |= {"reason": result.skipped, "sums": _plain(result.sums), "gradient_norm": str(result.grad_norm)}
        numbers |= {"step": update.step, "update": update.number, "role": role.name, "samples": list(update.samples)}
    (directory / f"{stem}.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    if runtime.is_main:
        kept = sorted(directory.parent.glob("step_[0-9]*"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def load_kept(file: Path) -> list[MicroBatch]:
    """The micro-batches of a rank, from `rank_RRRRR.pt`."""
    return [
        MicroBatch(
            tokens_BS=batch["tokens_BS"],
            columns=batch["columns"],
            layout=None if batch["layout"] is None else MicroBatchLayout(**batch["layout"]),
        )
        for batch in torch.load(file, weights_only=True)
    ]


def _norm(parameter: torch.nn.Parameter) -> float | str:
    """Of what lies in this rank's gradient buffer, as JSON: a text where it is not finite."""
    gradient = getattr(parameter, "main_grad", None)
    return "none" if gradient is None else _plain({"": float(gradient.norm())})[""]


def _plain(numbers: dict[str, float]) -> dict[str, float | str]:
    return {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
