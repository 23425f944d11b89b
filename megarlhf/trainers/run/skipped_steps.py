"""Skips optimizer steps whose loss or gradient is not finite or too large, keeps their batches, and ends the run when
too many in a row were skipped.

Every rank decides from the same two numbers, the loss summed over all ranks and the gradient norm that all agree on
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

from megarlhf.atomic_write import atomic_path
from megarlhf.collective_errors import from_first_rank
from megarlhf.config import SkipConfig, dump_config
from megarlhf.models.role import Role
from megarlhf.observe.records.run_directory import CONFIG_FILE, CONFIG_HEADER
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.loss import Loss, StepResult
from megarlhf.parallel.megatron_cpu import norm_of
from megarlhf.parallel.micro_batch import MicroBatch, MicroBatchLayout
from megarlhf.resume.claim.config_changes import TrainingConfig
from megarlhf.resume.points import sharded_state
from megarlhf.resume.points.kept_weights import KeptWeights, keep_weights
from megarlhf.resume.points.point import shown_step
from megarlhf.resume.points.restore import layout_in_words
from megarlhf.trainers.run.failures import POINT, Failure, plain, rank_file, title

log = logging.getLogger(__name__)

WINDOW = 64
"""Gradient norms in the running median."""
MIN_NORMS = 16
"""Gradient norms before the running median is used."""
CHANGING = ("kl_coef", "entropy_coef", "kl_point")
"""Fields of losses that change over a run."""
COLUMNS_AT = "token"
"""Position of per-token numbers in kept micro-batches."""
KEPT = 5
"""Number of skipped steps in `failures/`: the newest, with the weights before them."""


class SkippedTooOften(FloatingPointError):
    """Too many optimizer steps of one role in a row were skipped. Raised on every rank; no weight has changed."""


@dataclass(frozen=True)
class Update:
    """Position of an optimizer step in the run, and its samples."""

    step: int
    """Number of steps done before it."""
    update: int | None
    """Number of updates done before it in its step; None if a step has only one."""
    samples: Sequence[int]
    """Samples of the mini-batch, by their number in the data (sft, rm, dpo) or in the step (rl)."""

    @property
    def name(self) -> str:
        """Name of a folder. Its step counts from 1 and its update from 0."""
        return f"step_{shown_step(self.step):06d}" + ("" if self.update is None else f"_update_{self.update:04d}")


class StepGuard:
    """Decides which optimizer steps of one role are skipped."""

    def __init__(self, cfg: SkipConfig, failures: Failures, phases: Phases) -> None:
        self._cfg, self._failures, self._phases = cfg, failures, phases
        self._in_a_row = 0
        self._norms: deque[float] = deque(maxlen=WINDOW)
        """Gradient norms of the last steps that were not skipped."""

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row, "norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_a_row, self._norms = int(state["in_a_row"]), deque(state["norms"], maxlen=WINDOW)

    def reason_to_skip(self, sums: dict[str, float], norm: float) -> str:
        """Reason to skip a step with this loss and gradient norm; empty if it is not skipped."""
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

    def apply(
        self, role: Role, sums: dict[str, float], update: Update, batches: Sequence[MicroBatch], loss: Loss
    ) -> StepResult:
        """Make the optimizer step after `role.accumulate(batches, loss)` returned `sums`, or skip and keep it.
        Collective.

        Raises: SkippedTooOften after `train.max_skipped_in_a_row` skipped steps.
        """
        with self._phases(f"optimizer/{role.name}"):
            result = role.optimizer_step(sums, self.reason_to_skip)
        if not result.skipped:
            self._in_a_row = 0
            self._norms.append(result.grad_norm)
            return result
        self._in_a_row += 1
        limit = self._cfg.max_skipped_in_a_row
        with self._phases("checkpoint"):  # a phase of its own, with the time limit of a write
            kept = self._failures.keep(role, result, update, batches, loss)
        skipped = f"{title(shown_step(update.step), update.update, role.name)}: {result.skipped}"
        log.info(
            "optimizer step skipped on all ranks (%d in a row, %d end the run): %s", self._in_a_row, limit, skipped
        )
        if self._in_a_row >= limit:
            raise SkippedTooOften(
                f"{skipped}. {self._in_a_row} optimizer step(s) in a row were skipped, and train.max_skipped_in_a_row "
                f"= {limit}; the weights are those before them. The batch is kept in {kept}; `megarlhf replay {kept}` "
                "repeats the step and names the first tensor that is not finite. Look at the last losses, lower the "
                "learning rate, or check the data of this step"
            )
        return result


class Failures:
    """Folder with the newest `KEPT` skipped steps of a run, for all its roles."""

    def __init__(self, directory: Path, command: str, config: str) -> None:
        """config: text of the run's `config.yaml`"""
        self._directory, self._command, self._config = directory, command, config
        self._weights: dict[str, KeptWeights] = {}
        """Weights that were kept last, by role."""

    @classmethod
    def of(cls, cfg: TrainingConfig, command: str) -> Failures:
        """Folder of a run of this command."""
        return cls(cfg.run.dir / "failures", command, CONFIG_HEADER.format(command=command) + dump_config(cfg))

    def keep(self, role: Role, result: StepResult, update: Update, batches: Sequence[MicroBatch], loss: Loss) -> Path:
        """Keep a skipped step: batch, numbers, and the weights before it. Collective; returns the folder.

        An error while writing is logged and does not end the run.
        """
        directory, is_main = self._directory / f"{update.name}_{role.name}", role.mesh.runtime.is_main
        if is_main:  # an earlier start may have skipped the same step, on more ranks
            shutil.rmtree(directory, ignore_errors=True)
        from_first_rank(None)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _keep_batches(directory, role, batches)
            if is_main:
                (directory / CONFIG_FILE).write_text(self._config, encoding="utf-8")
                self._describe(role, result, update, loss).write(directory)
        except OSError as error:
            log.warning("the batch of the skipped step could not be kept in %s: %s", directory, error)
        self._keep_weights(role, update, directory)
        if is_main:
            self._prune()
        return directory

    def _describe(self, role: Role, result: StepResult, update: Update, loss: Loss) -> Failure:
        return Failure(
            command=self._command,
            role=role.name,
            step=shown_step(update.step),
            update=update.update,
            samples=list(update.samples),
            reason=result.skipped,
            sums=result.sums,
            gradient_norm=result.grad_norm,
            denominators={name: value for name, value in vars(loss).items() if type(value) is int},
            coefficients={name: value for name, value in vars(loss).items() if name in CHANGING},
            counters=sharded_state.counters(role),
            layout=layout_in_words(role),
            world_size=role.mesh.runtime.world_size,
        )

    def _keep_weights(self, role: Role, update: Update, directory: Path) -> None:
        body = {"command": self._command, "step": update.step, "update": update.update or 0}
        newest = self._weights.get(role.name)
        kept, problem = keep_weights(role, directory / POINT, body, newest)
        if kept is not None:
            self._weights[role.name] = kept
        elif role.mesh.runtime.is_main:
            log.warning(
                "the weights before the skipped step could not be kept in %s: %s. `megarlhf replay` needs them, or a "
                "resume point after as many optimizer steps",
                directory / POINT,
                problem,
            )

    def _prune(self) -> None:
        kept = [path for path in self._directory.glob("step_[0-9]*") if path.is_dir()]
        for old in sorted(kept, key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _keep_batches(directory: Path, role: Role, batches: Sequence[MicroBatch]) -> None:
    """Write this rank's micro-batches and the norms of its gradients."""
    tensors = [
        {
            "tokens_BS": batch.tokens_BS.cpu(),
            "columns": {name: column.cpu() for name, column in batch.columns.items()},
            "layout": None if batch.layout is None else asdict(batch.layout),
            "columns_at": COLUMNS_AT,
        }
        for batch in batches
    ]
    mesh, rank = role.mesh, role.mesh.runtime.rank
    gradients = {name: _norm(p) for name, p in role.shard.module.named_parameters() if p.requires_grad}
    numbers = {"dp": mesh.coordinates.dp, "last_stage": mesh.is_last_stage, "gradient_norms_of_this_rank": gradients}
    (directory / rank_file(rank, "json")).write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    with atomic_path(directory / rank_file(rank), synced=False) as partial:
        torch.save(tensors, partial)


def load_kept(file: Path) -> list[MicroBatch]:
    """Read the micro-batches of a rank from `rank_RRRRR.pt`.

    Raises: ValueError for a file of an earlier version, whose columns had another position.
    """
    kept = torch.load(file, weights_only=True)
    if any(batch.get("columns_at") != COLUMNS_AT for batch in kept):
        raise ValueError(
            f"{file} was written by an earlier version, which stored a token's values where it is predicted; replay "
            "it with the version that wrote it"
        )
    return [
        MicroBatch(
            tokens_BS=batch["tokens_BS"],
            columns=batch["columns"],
            layout=None if batch["layout"] is None else MicroBatchLayout(**batch["layout"]),
        )
        for batch in kept
    ]


def _norm(parameter: torch.nn.Parameter) -> float | str:
    """Norm of this rank's gradient buffer for JSON; a text if it is not finite or there is no buffer."""
    gradient = getattr(parameter, "main_grad", None)
    return "none" if gradient is None else plain({"": float(norm_of(gradient))})[""]
