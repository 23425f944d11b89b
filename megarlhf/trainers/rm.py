"""Reward model: a scalar head learns which of two responses people prefer.

A sample is a pair: two sequences of a micro-batch, the chosen one before the rejected one.

Legend: B rows and S columns of a micro-batch, X = B x S; P pairs, K = 2 P sequences, L longest of them.
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
from megarlhf.architectures.architecture import Architecture
from megarlhf.config import MicroBatchConfig, RMConfig
from megarlhf.data.loader import ShuffledBatches
from megarlhf.data.samples import PairSample, build_pairs, require_budget, require_positions
from megarlhf.data.sources import load_records
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.experience import Ragged
from megarlhf.models.role import Role, build_role
from megarlhf.parallel.batching import Sheet, Spans, lay_out
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.step import MicroBatch
from megarlhf.runtime import Runtime
from megarlhf.trainers.session import is_due, open_session


def run(cfg: RMConfig, runtime: Runtime) -> None:
    """Train the reward model on preference pairs."""
    train, heldout, notes = load_data(cfg)
    order = ShuffledBatches(len(train), cfg.train.mini_batch_samples, cfg.run.seed)
    model = build_role(
        "reward_model",
        cfg.reward_model,
        "scalar",
        GroupCache(runtime),
        seed=cfg.run.seed,
        num_optimizer_steps=cfg.train.num_steps,
        new_head=True,
    )
    with open_session(cfg, cfg.run, cfg.checkpoint, runtime, "rm", cfg.train.num_steps, notes) as session:
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
    for path, split in ((cfg.data.train, cfg.data.train_split), (cfg.data.heldout, cfg.data.heldout_split)):
        if path is None:
            found.append([])
            continue
        pairs, skipped = build_pairs(
            load_records(path, fields=("prompt", "chosen", "rejected"), split=split),
            tokenizer,
            max_prompt_tokens=cfg.data.max_prompt_tokens,
            max_response_tokens=cfg.data.max_response_tokens,
            template=cfg.data.template,
        )
        longest = max(len(p.prompt_tokens) + max(len(p.chosen_tokens), len(p.rejected_tokens)) for p in pairs)
        model = cfg.reward_model.model.described_by()
        require_positions(longest, Architecture.from_hf(model).max_positions, str(model))
        require_budget(
            [num_tokens(pair) for pair in pairs],
            cfg.train.max_tokens_per_micro_batch,
            str(path),
            "prompt and response, chosen and rejected together: a pair stays in one micro-batch",
        )
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
        assert batch.sheet is not None
        scores_X = scores_BS1.flatten()
        ends_K = scores_X[batch.sheet.ends_K.to(scores_X.device)]
        chosen_P, rejected_P = ends_K[0::2], ends_K[1::2]
        if self.kind == "last_token":
            loss = pairwise_last_token(chosen_P, rejected_P, denominator=self.denominator)
        else:
            loss = self._aligned_span(scores_X, batch.tokens_BS.flatten(), batch.sheet)
        if self.center_coef > 0:
            loss = loss + self.center_coef * centering(chosen_P, rejected_P, denominator=self.denominator)
        with torch.no_grad():
            correct = (chosen_P > rejected_P).sum().to(scores_X.dtype)
            squares = chosen_P.square().sum() + rejected_P.square().sum()
            return loss, torch.stack([correct, chosen_P.sum(), rejected_P.sum(), squares])

    def _aligned_span(self, scores_X: Tensor, tokens_X: Tensor, sheet: Sheet) -> Tensor:
        """Each sequence as a row of its own again, [P, L] for either side; what stands behind its end is not read."""
        lengths_K, starts_K = (torch.tensor(numbers, dtype=torch.int64) for numbers in (sheet.lengths, sheet.starts))
        steps_L = torch.arange(max(sheet.lengths, default=1))
        index_KL = starts_K[:, None] + torch.minimum(steps_L, lengths_K[:, None] - 1)
        index_KL, lengths_K = index_KL.to(scores_X.device), lengths_K.to(scores_X.device)
        scores_KL, tokens_KL = scores_X[index_KL], tokens_X[index_KL]
        rows = [side[start::2] for side in (scores_KL, tokens_KL, lengths_K) for start in (0, 1)]
        return pairwise_aligned_span(*rows, denominator=self.denominator)


def train_on(model: Role, pairs: Sequence[PairSample], cfg: RMConfig) -> dict[str, float | int | None]:
    """One optimizer step on one mini-batch, the same list on every rank."""
    assert model.trainer is not None
    learning_rate = model.trainer.learning_rate
    loss = PairwiseLoss(kind=cfg.loss, denominator=len(pairs), center_coef=cfg.center_coef)
    result = model.train_step(micro_batches(model, pairs, cfg.train), loss)
    return {
        "loss": result.sums["loss"],
        "grad_norm": result.grad_norm,
        "learning_rate": learning_rate,
        "pair_accuracy": result.sums["correct"] / len(pairs),
        "tokens": sum(map(num_tokens, pairs)),
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

    parts = model.forward(micro_batches(model, pairs, cfg.train), score)
    total = torch.zeros(1 + len(loss.names), dtype=torch.float64, device=model.mesh.runtime.device)
    if model.mesh.owns_outputs:
        total += torch.stack(parts).sum(0)
    dist.all_reduce(total)
    return dict(zip(("loss", *loss.names), total.tolist(), strict=True))


def num_tokens(pair: PairSample) -> int:
    """Of its two sequences, each with the prompt."""
    return 2 * len(pair.prompt_tokens) + len(pair.chosen_tokens) + len(pair.rejected_tokens)


def micro_batches(model: Role, pairs: Sequence[PairSample], micro: MicroBatchConfig) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of the pairs: two sequences each, the chosen one first."""
    device = model.mesh.runtime.device
    rows = [
        torch.tensor(pair.prompt_tokens + response)
        for pair in pairs
        for response in (pair.chosen_tokens, pair.rejected_tokens)
    ]
    tokens = Ragged.from_rows(rows, torch.int64)
    groups = [(2 * n, 2 * n + 1) for n in range(len(pairs))]
    return [
        MicroBatch(lay_out(sheet, tokens, Spans.whole(tokens.lengths_N)).to(device), {}, sheet)
        for sheet in model.batching(micro).sheets(groups, tokens.lengths_N)
    ]
