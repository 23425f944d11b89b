"""`megarlhf replay`: repeats a skipped optimizer step and names the first tensor that is not finite.

Forward and backward run again on the weights from before the step and on the step's mini-batch. Nothing is written.

Legend: B rows, S columns of a micro-batch, N sequences of the mini-batch.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megarlhf.columns import Ragged
from megarlhf.config import DPOConfig, RMConfig, SFTConfig
from megarlhf.models.role import Role, build_role
from megarlhf.parallel.chunks import split_name
from megarlhf.parallel.loss import Loss
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch, TokenSpans, scatter_to_micro_batch
from megarlhf.parallel.not_finite import MODEL, LossModule, NotFinite, first_not_finite
from megarlhf.resume.claim.config_changes import TrainingConfig, compare
from megarlhf.resume.points.kept_weights import find_weights
from megarlhf.resume.points.restore import layout_in_words
from megarlhf.resume.points.sharded_state import is_tied_copy, layers_of
from megarlhf.runtime import Runtime
from megarlhf.trainers.rl.losses import PolicyLoss, ValueLoss
from megarlhf.trainers.run.failures import POINT, Failure, rank_file
from megarlhf.trainers.run.skipped_steps import load_kept
from megarlhf.trainers.supervised.dpo_loss import PreferenceLoss
from megarlhf.trainers.supervised.rm import PairwiseLoss
from megarlhf.trainers.supervised.sft import NextTokenLoss

LARGEST = 5
"""Number of parameters whose gradients are shown when all are finite, and of ranks that are listed."""


@dataclass(frozen=True)
class RepeatedStep:
    """Results of a repeated step, the same on every rank."""

    loss: float
    gradient_norm: float
    first: tuple[tuple[str, NotFinite], ...]
    """(description of a rank, its first tensor that is not finite), in the order of computation."""
    gradient_norms: Mapping[str, float]
    """Norms by parameter, the largest first. Norms that are not finite come before all others."""


def run(cfg: TrainingConfig, runtime: Runtime, directory: Path) -> None:
    """Repeat the skipped step that was kept in `directory`, and print a report. Collective."""
    failure = Failure.read(directory)
    run_dir = directory.resolve().parent.parent
    weights = find_weights(runtime, directory / POINT, run_dir, failure.role, failure.counters)
    role = build(cfg, runtime, failure, weights / failure.role)
    before = failure.config(directory, [])
    as_kept = layout_in_words(role) == failure.layout and _same_micro_batches(before, cfg)
    batches = load_batches(directory, failure, role, cfg, as_kept=as_kept)
    result = repeat(role, batches, rebuilt_loss(cfg, failure, role))
    if runtime.is_main:
        print(f"{failure.title} was skipped because {failure.reason}")
        print(f"weights: {weights} ({failure.counters['optimizer_steps']} optimizer steps made)")
        cut = "the kept micro-batches" if as_kept else "the kept mini-batch in other micro-batches"
        print(
            f"mini-batch: {len(failure.samples)} samples; {cut}, on {layout_in_words(role)} (kept on {failure.layout})"
        )
        for change in compare(before, cfg).mathematics:
            print(f"changed in what is computed: {change}")
        print("\n".join(report(failure, result)), flush=True)


def build(cfg: TrainingConfig, runtime: Runtime, failure: Failure, weights: Path) -> Role:
    """The role with the weights from the folder `weights`, ready for a backward. Collective."""
    section = failure.section(cfg)
    kept = {"path": weights, "hf": section.model.hf_directory(), "random_init": False, "fresh_head": False}
    return build_role(
        failure.role,
        section.model_copy(update={"model": section.model.model_copy(update=kept)}),
        "lm" if failure.role == "actor" else "scalar",
        GroupCache(runtime),
        seed=cfg.run.seed,
        num_optimizer_steps=1,
    )


def rebuilt_loss(cfg: TrainingConfig, failure: Failure, role: Role) -> Loss:
    """Loss of the whole mini-batch, from the kept denominators and coefficients and the configuration."""
    denominators: Mapping[str, Any] = failure.denominators
    coefficients: Mapping[str, Any] = failure.coefficients
    if isinstance(cfg, SFTConfig):
        return NextTokenLoss(vocabulary=role.shard.vocabulary(), **denominators)
    if isinstance(cfg, RMConfig):
        return PairwiseLoss(kind=cfg.loss, center_coef=cfg.center_coef, margin=cfg.margin, **denominators)
    if isinstance(cfg, DPOConfig):
        return PreferenceLoss(cfg=cfg, vocabulary=role.shard.vocabulary(), **denominators, **coefficients)
    if failure.role == "critic":
        return ValueLoss(clip=cfg.algo.value_clip, **denominators)
    return PolicyLoss(
        algo=cfg.algo,
        temperature=cfg.rollout.temperature,
        vocabulary=role.shard.vocabulary(),
        ptx_coef=0.0 if cfg.ptx is None else cfg.ptx.coef,
        **denominators,
        **coefficients,
    )


def load_batches(
    directory: Path, failure: Failure, role: Role, cfg: TrainingConfig, *, as_kept: bool
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches: as they were, or the mini-batch cut again for this layout."""
    files: dict[int, str] = {}
    """File of each data-parallel rank's last pipeline stage, which has the columns of the loss."""
    for rank in range(failure.world_size):
        numbers = json.loads((directory / rank_file(rank, "json")).read_text(encoding="utf-8"))
        if numbers.get("last_stage", True):
            files.setdefault(numbers["dp"], rank_file(rank))
    if as_kept:
        batches = load_kept(directory / files[role.mesh.coordinates.dp])
    else:
        kept = [batch for dp in sorted(files) for batch in load_kept(directory / files[dp])]
        batches = cut_again(kept, role, cfg, group=2 if isinstance(cfg, RMConfig | DPOConfig) else 1)
    device = role.mesh.runtime.device
    return [
        replace(
            batch,
            tokens_BS=batch.tokens_BS.to(device),
            columns={name: column.to(device) for name, column in batch.columns.items()},
        )
        for batch in batches
    ]


def cut_again(kept: Sequence[MicroBatch], role: Role, cfg: TrainingConfig, *, group: int) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of all sequences in `kept`; `group` neighbours stay together."""
    tokens_N: list[Tensor] = []
    columns_N: dict[str, list[Tensor]] = defaultdict(list)
    for batch in kept:
        layout = batch.layout
        assert layout is not None
        for positions in layout.tokens_R.split(layout.lengths):
            tokens_N.append(batch.tokens_BS.flatten()[positions])
            for name, column_BS in batch.columns.items():
                columns_N[name].append(column_BS.flatten()[positions])
    tables = {name: Ragged.from_rows(rows, rows[0].dtype) for name, rows in {"tokens": tokens_N, **columns_N}.items()}
    lengths_N = tables["tokens"].lengths_N
    whole = TokenSpans.whole(lengths_N)
    groups = [tuple(range(first, first + group)) for first in range(0, len(tokens_N), group)]
    batches = []
    for layout in role.batching(cfg.train).layouts(groups, lengths_N):
        grids = {name: scatter_to_micro_batch(layout, table, whole) for name, table in tables.items()}
        batches.append(MicroBatch(grids.pop("tokens"), grids, layout))
    return batches


def repeat(role: Role, batches: Sequence[MicroBatch], loss: Loss) -> RepeatedStep:
    """Run forward, backward and the gradient norm, and look for tensors that are not finite. Collective."""
    assert role.trainer is not None
    watched, sums = LossModule(loss), {}
    in_columns = _column_that_is_not_finite(batches)
    in_model = first_not_finite(
        role.shard.module, lambda: sums.update(role.accumulate(batches, watched).sums), loss=watched
    )
    gradient_norm = role.trainer.gradient_norm()
    layers, mesh, runtime = layers_of(role.shard), role.mesh.coordinates, role.mesh.runtime
    where, stage = f"rank {runtime.rank} (tp {mesh.tp}, cp {mesh.cp}, pp {mesh.pp}, dp {mesh.dp})", mesh.pp
    first = in_columns or in_model
    if first is not None:
        stage += split_name(first.module)[0] * role.mesh.layout.pp
        first = replace(first, module=_global_name(first.module, layers) or MODEL)
    squares = {
        _global_name(name, layers): float(gradient.double().square().sum())
        for name, gradient in role.trainer.own_gradients().items()
        if not is_tied_copy(role.shard, name)
        and (mesh.tp == 0 or getattr(role.shard.parameters()[name], "tensor_model_parallel", False))
    }
    by_rank = [(where, stage, first, squares)] * runtime.world_size
    dist.all_gather_object(by_rank, by_rank[0])
    firsts = [(_order(first, stage), where, first) for where, stage, first, _ in by_rank if first is not None]
    total: dict[str, float] = defaultdict(float)
    for *_, squares in by_rank:
        for name, square in squares.items():
            total[name] += square
    norms = {name: math.sqrt(square) for name, square in total.items()}
    return RepeatedStep(
        loss=sums["loss"],
        gradient_norm=gradient_norm,
        first=tuple((where, first) for _, where, first in sorted(firsts, key=lambda item: item[0])),
        gradient_norms=dict(sorted(norms.items(), key=lambda item: -item[1] if math.isfinite(item[1]) else -math.inf)),
    )


def report(failure: Failure, result: RepeatedStep) -> list[str]:
    """Lines of the report for the user."""
    kept, repeated = (failure.sums["loss"], failure.gradient_norm), (result.loss, result.gradient_norm)
    same = "the same, bit for bit" if list(map(str, kept)) == list(map(str, repeated)) else "other bits"
    lines = [
        f"{what}: {then:.9g} then, {now:.9g} now"
        for what, then, now in zip(("loss", "gradient norm"), kept, repeated, strict=True)
    ]
    lines[-1] += f" ({same})"
    if result.first:
        (where, first), *others = result.first
        lines.append(f"the first tensor that is not finite: {first}, on {where}, in {_IN[first.during]}")
        lines += [f"  first on {where}: {other}" for where, other in others[:LARGEST]]
        if len(others) > LARGEST:
            lines.append(f"  and on {len(others) - LARGEST} more rank(s)")
        return lines
    lines.append("all finite: weights, inputs, outputs, loss and gradients")
    if not all(map(math.isfinite, kept)):
        lines.append(
            "so the failure does not repeat: its NaN or infinity came from something that is not kept, such as a "
            "kernel that is not deterministic, another layout's order of sums, or a device that computes wrongly"
        )
    lines.append("largest gradients, by parameter:")
    lines += [f"  {norm:.6g}  {name}" for name, norm in itertools.islice(result.gradient_norms.items(), LARGEST)]
    return lines


_IN = {"forward": "the forward", "backward": "the backward", "sums": "the sum of gradients over ranks"}


def _order(first: NotFinite, stage: int) -> tuple[int, int, int]:
    """Sort key for tensors of different ranks, by the time of their computation: forward through the stages of the
    pipeline, virtual ones too, then backward through them. On one stage: in the order in which they were examined."""
    stage_order = {"forward": stage, "backward": -stage, "sums": 0}[first.during]
    return list(_IN).index(first.during), stage_order, first.number


def _column_that_is_not_finite(batches: Sequence[MicroBatch]) -> NotFinite | None:
    """The first column of the loss that is not finite."""
    for n, batch in enumerate(batches):
        for name, column_BS in batch.columns.items():
            if column_BS.is_floating_point():
                first = NotFinite.of(f"micro-batch {n}", f"column {name}", column_BS, "forward", 0)
                if first is not None:
                    return first
    return None


def _global_name(name: str, layers: Sequence[range]) -> str:
    """Name of a module or parameter with its layer's number in the whole model; `layers` are the layers of each chunk
    on this rank."""
    chunk, inside = split_name(name)
    return re.sub(r"^decoder\.layers\.(\d+)", lambda match: f"decoder.layers.{layers[chunk][int(match[1])]}", inside)


def _same_micro_batches(before: TrainingConfig, after: TrainingConfig) -> bool:
    """Whether both configurations cut a mini-batch into the same micro-batches."""
    sizes = ("micro_batch_samples", "max_tokens_per_micro_batch")
    return all(getattr(before.train, name) == getattr(after.train, name) for name in sizes)
