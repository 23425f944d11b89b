"""Reward model: a scalar head learns which of two responses people prefer.

A sample is a pair: two rows of a micro-batch, the chosen one before the rejected one.

Legend: B rows, P pairs of a micro-batch, S positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algo.losses import centering, pairwise_aligned_span, pairwise_last_token
from megarlhf.config import RMConfig
from megarlhf.data.loader import ShuffledBatches
from megarlhf.data.samples import PairSample, build_pairs, require_positions
from megarlhf.data.sources import load_records
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.models.role import Role, build_role
from megarlhf.parallel.batching import FILLER, deal, grid_length, lay_out
from megarlhf.parallel.mesh import GroupCache, Mesh
from megarlhf.parallel.step import MicroBatch
from megarlhf.runtime import Runtime
from megarlhf.trainers.session import is_due, open_session
from megarlhf.weights.architecture import Architecture


def run(cfg: RMConfig, runtime: Runtime) -> None:
    """Train the reward model on preference pairs."""
    train, heldout, notes = load_data(cfg)
    order = ShuffledBatches(len(train), cfg.train.mini_batch_samples, cfg.run.seed)
    with open_session(cfg, cfg.run, cfg.checkpoint, runtime, "rm", cfg.train.num_steps, notes) as session:
        model = build_role(
            "reward_model",
            cfg.reward_model,
            "scalar",
            GroupCache(runtime),
            seed=cfg.run.seed,
            num_optimizer_steps=cfg.train.num_steps,
        )
        session.log(0, evaluate(model, heldout, cfg))
        for step in range(cfg.train.num_steps):
            started = time.perf_counter()
            pairs = [train[n] for n in order.indices(step)]
            metrics = train_on(model, pairs, cfg)
            metrics["seconds"] = time.perf_counter() - started
            last = step + 1 == cfg.train.num_steps
            if last or is_due(step + 1, cfg.eval.every):
                metrics |= evaluate(model, heldout, cfg)
            session.log(step + 1, metrics)
            if last and cfg.unit_variance:
                deviation = scale_to_unit_variance(model, heldout, cfg)
                session.note(f"divided the head by {deviation:.4g}, the standard deviation of the held-out scores")
            session.maybe_save(step + 1, [model], last=last)


def load_data(cfg: RMConfig) -> tuple[list[PairSample], list[PairSample], list[str]]:
    """Training and held-out pairs, on every rank, and what was skipped in words."""
    tokenizer = load_tokenizer(cfg.reward_model.model.described_by())
    found: list[list[PairSample]] = []
    notes = []
    for path in (cfg.data.train, cfg.data.heldout):
        if path is None:
            found.append([])
            continue
        pairs, skipped = build_pairs(
            load_records(path, fields=("prompt", "chosen", "rejected")),
            tokenizer,
            max_prompt_tokens=cfg.data.max_prompt_tokens,
            max_response_tokens=cfg.data.max_response_tokens,
            template=cfg.data.template,
        )
        longest = max(len(p.prompt_tokens) + max(len(p.chosen_tokens), len(p.rejected_tokens)) for p in pairs)
        model = cfg.reward_model.model.described_by()
        require_positions(longest, Architecture.from_hf(model).max_positions, str(model))
        notes.append(f"{path}: {skipped.describe()}")
        found.append(pairs)
    return found[0], found[1][: cfg.eval.max_samples], notes


@dataclass(frozen=True)
class PairwiseLoss:
    """Ranking loss; denominator: pairs of the mini-batch. Reports sums over pairs."""

    kind: Literal["last_token", "aligned_span"]
    denominator: int
    center_coef: float = 0.0
    names: tuple[str, ...] = ("correct", "chosen_score", "rejected_score", "squared_score")

    def __call__(self, scores_BS1: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        scores_BS = scores_BS1[..., 0]
        lengths_B, kept_P = batch.columns["lengths"], batch.columns["kept"]
        ends_B = scores_BS.gather(1, lengths_B[:, None] - 1)[:, 0]
        chosen_P, rejected_P = ends_B[0::2][kept_P], ends_B[1::2][kept_P]
        if self.kind == "last_token":
            loss = pairwise_last_token(chosen_P, rejected_P, denominator=self.denominator)
        else:
            loss = pairwise_aligned_span(
                scores_BS[0::2][kept_P],
                scores_BS[1::2][kept_P],
                batch.tokens_BS[0::2][kept_P],
                batch.tokens_BS[1::2][kept_P],
                lengths_B[0::2][kept_P],
                lengths_B[1::2][kept_P],
                denominator=self.denominator,
            )
        if self.center_coef > 0:
            loss = loss + self.center_coef * centering(chosen_P, rejected_P, denominator=self.denominator)
        with torch.no_grad():
            correct = (chosen_P > rejected_P).sum().to(scores_BS.dtype)
            squares = chosen_P.square().sum() + rejected_P.square().sum()
            return loss, torch.stack([correct, chosen_P.sum(), rejected_P.sum(), squares])


def train_on(model: Role, pairs: Sequence[PairSample], cfg: RMConfig) -> dict[str, float | int | None]:
    """One optimizer step on one mini-batch, the same list on every rank."""
    assert model.trainer is not None
    learning_rate = model.trainer.learning_rate
    loss = PairwiseLoss(kind=cfg.loss, denominator=len(pairs), center_coef=cfg.center_coef)
    result = model.train_step(micro_batches(pairs, model.mesh, cfg.train.micro_batch_samples), loss)
    return {
        "loss": result.sums["loss"],
        "grad_norm": result.grad_norm,
        "learning_rate": learning_rate,
        "pair_accuracy": result.sums["correct"] / len(pairs),
        "tokens": sum(2 * len(p.prompt_tokens) + len(p.chosen_tokens) + len(p.rejected_tokens) for p in pairs),
    }


def evaluate(model: Role, pairs: Sequence[PairSample], cfg: RMConfig) -> dict[str, float]:
    """Held-out loss, share of pairs ranked rightly, and mean scores; nothing without held-out data."""
    if not pairs:
        return {}
    sums = _heldout_sums(model, pairs, cfg)
    return {
        "eval_loss": sums["loss"],
        "eval_pair_accuracy": sums["correct"] / len(pairs),
        "eval_chosen_score": sums["chosen_score"] / len(pairs),
        "eval_rejected_score": sums["rejected_score"] / len(pairs),
    }


def scale_to_unit_variance(model: Role, pairs: Sequence[PairSample], cfg: RMConfig) -> float:
    """Divide the head by the standard deviation of the held-out scores. The ranking stays; rewards and a critic that
    starts from this model get a known scale. Returns what it divided by. Collective; the optimizer must not be used
    afterwards."""
    sums, count = _heldout_sums(model, pairs, cfg), 2 * len(pairs)
    mean = (sums["chosen_score"] + sums["rejected_score"]) / count
    deviation = math.sqrt(sums["squared_score"] / count - mean**2)
    if not deviation > 0:
        raise ValueError(
            f"all {count} held-out scores are {mean:.4g}: nothing to scale; the reward model has learnt nothing; "
            "train longer or set unit_variance to false"
        )
    if model.mesh.is_last_stage:
        with torch.no_grad():
            model.part.parameters()["output_layer.weight"].div_(deviation)
    return deviation


def _heldout_sums(model: Role, pairs: Sequence[PairSample], cfg: RMConfig) -> dict[str, float]:
    """The ranking loss (a mean over pairs) and its sums over pairs, on every rank."""
    loss = PairwiseLoss(kind=cfg.loss, denominator=len(pairs))

    def score(output: Tensor, batch: MicroBatch) -> Tensor:
        value, sums = loss(output, batch)
        return torch.cat([value.reshape(1).double(), sums.double()])

    parts = model.forward(micro_batches(pairs, model.mesh, cfg.train.micro_batch_samples), score)
    total = torch.zeros(1 + len(loss.names), dtype=torch.float64, device=model.mesh.runtime.device)
    if model.mesh.owns_outputs:
        total += torch.stack(parts).sum(0)
    dist.all_reduce(total)
    return dict(zip(("loss", *loss.names), total.tolist(), strict=True))


def micro_batches(pairs: Sequence[PairSample], mesh: Mesh, micro_batch_samples: int) -> list[MicroBatch]:
    """This data-parallel rank's share of the pairs, two rows each."""
    device = mesh.runtime.device
    rows = [
        torch.tensor(pair.prompt_tokens + response)
        for pair in pairs
        for response in (pair.chosen_tokens, pair.rejected_tokens)
    ]
    length = grid_length(max(map(len, rows)), mesh)
    batches = []
    for dealt in deal(range(len(pairs)), mesh, micro_batch_samples):
        chosen = [None if n == FILLER else rows[2 * n + side] for n in dealt for side in (0, 1)]
        placed = [None if row is None else (0, row) for row in chosen]
        lengths = [1 if row is None else len(row) for row in chosen]
        batches.append(
            MicroBatch(
                tokens_BS=lay_out(placed, length, torch.int64, device),
                columns={
                    "lengths": torch.tensor(lengths, device=device),
                    "kept": torch.tensor([n != FILLER for n in dealt], device=device),
                },
            )
        )
    return batches
