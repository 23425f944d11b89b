"""Supervised fine-tuning: the likelihood of responses, given their prompts.

Legend: B rows of a micro-batch, S positions, H hidden.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algo.losses import token_nll
from megarlhf.architectures.architecture import Architecture
from megarlhf.config import MicroBatchConfig, SFTConfig
from megarlhf.data.loader import ShuffledBatches
from megarlhf.data.samples import SFTSample, build_sft, require_budget, require_positions
from megarlhf.data.sources import load_records
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.experience import Ragged
from megarlhf.models.role import Role, build_role
from megarlhf.parallel.batching import Spans, lay_out, mask_of
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.step import MicroBatch
from megarlhf.parallel.vocab import Vocabulary, next_token_logprobs
from megarlhf.runtime import Runtime
from megarlhf.trainers.session import is_due, open_session


def run(cfg: SFTConfig, runtime: Runtime) -> None:
    """Train the actor on prompt-response pairs."""
    train, heldout, notes = load_data(cfg)
    order = ShuffledBatches(len(train), cfg.train.mini_batch_samples, cfg.run.seed)
    actor = build_role(
        "actor", cfg.actor, "lm", GroupCache(runtime), seed=cfg.run.seed, num_optimizer_steps=cfg.train.num_steps
    )
    with open_session(cfg, cfg.run, cfg.checkpoint, runtime, "sft", cfg.train.num_steps, notes) as session:
        session.log(0, evaluate(actor, heldout, cfg))
        for step in range(cfg.train.num_steps):
            started = time.perf_counter()
            samples = [train[n] for n in order.indices(step)]
            metrics = train_on(actor, samples, cfg.train)
            metrics["seconds"] = time.perf_counter() - started
            last = step + 1 == cfg.train.num_steps
            if last or is_due(step + 1, cfg.eval.every):
                metrics |= evaluate(actor, heldout, cfg)
            session.log(step + 1, metrics)
            session.maybe_save(step + 1, [actor], last=last)


def load_data(cfg: SFTConfig) -> tuple[list[SFTSample], list[SFTSample], list[str]]:
    """Training and held-out samples, on every rank, and what was skipped in words."""
    tokenizer = load_tokenizer(cfg.actor.model.described_by())
    found: list[list[SFTSample]] = []
    notes = []
    for path, split in ((cfg.data.train, cfg.data.train_split), (cfg.data.heldout, cfg.data.heldout_split)):
        if path is None:
            found.append([])
            continue
        samples, skipped = build_sft(
            load_records(
                path, fields=("prompt", "response") if cfg.data.template == "plain" else ("messages",), split=split
            ),
            tokenizer,
            max_prompt_tokens=cfg.data.max_prompt_tokens,
            max_response_tokens=cfg.data.max_response_tokens,
            template=cfg.data.template,
        )
        longest = max(len(sample.tokens) for sample in samples)
        require_positions(
            longest, Architecture.from_hf(cfg.actor.model.described_by()).max_positions, str(cfg.actor.model.path)
        )
        tokens = [len(sample.tokens) for sample in samples]
        require_budget(tokens, cfg.train.max_tokens_per_micro_batch, str(path), "prompt and response")
        notes.append(f"{path}: {skipped.describe()}")
        found.append(samples)
    return found[0], found[1][: cfg.eval.max_samples], notes


@dataclass(frozen=True)
class NextTokenLoss:
    """Negative log-likelihood; denominator: response tokens of the mini-batch."""

    denominator: int
    vocabulary: Vocabulary
    names: tuple[str, ...] = ()

    def __call__(self, hidden_SBH: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        mask_BS = batch.columns["response_mask"]
        logprobs_BS, _ = next_token_logprobs(
            self.vocabulary, hidden_SBH, batch.tokens_BS, mask_BS, return_entropy=False
        )
        loss = token_nll(logprobs_BS, mask_BS, denominator=self.denominator)
        return loss, loss.new_zeros(0)


def train_on(actor: Role, samples: Sequence[SFTSample], micro: MicroBatchConfig) -> dict[str, float | int | None]:
    """One optimizer step on one mini-batch, the same list on every rank."""
    tokens = num_response_tokens(samples)
    loss = NextTokenLoss(denominator=tokens, vocabulary=actor.part.vocabulary())
    assert actor.trainer is not None
    learning_rate = actor.trainer.learning_rate
    result = actor.train_step(micro_batches(actor, samples, micro), loss)
    return {
        "loss": result.sums["loss"],
        "grad_norm": result.grad_norm,
        "learning_rate": learning_rate,
        "tokens": sum(len(sample.tokens) for sample in samples),
    }


def evaluate(actor: Role, samples: Sequence[SFTSample], cfg: SFTConfig) -> dict[str, float]:
    """Held-out loss (mean over response tokens, nats) and perplexity; nothing without held-out data."""
    if not samples:
        return {}
    batches = micro_batches(actor, samples, cfg.train)
    loss = NextTokenLoss(denominator=num_response_tokens(samples), vocabulary=actor.part.vocabulary())
    parts = actor.forward(batches, lambda hidden_SBH, batch: loss(hidden_SBH, batch)[0].double())
    total = torch.zeros((), dtype=torch.float64, device=actor.mesh.runtime.device)
    if actor.mesh.owns_outputs:
        total += torch.stack(parts).sum()
    dist.all_reduce(total)
    return {"eval_loss": total.item(), "eval_perplexity": math.exp(min(total.item(), 700.0))}


def num_response_tokens(samples: Sequence[SFTSample]) -> int:
    """The denominator of the loss."""
    return sum(len(sample.tokens) - sample.prompt_length for sample in samples)


def micro_batches(actor: Role, samples: Sequence[SFTSample], micro: MicroBatchConfig) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of the samples."""
    device = actor.mesh.runtime.device
    tokens = Ragged.from_rows([torch.tensor(sample.tokens) for sample in samples], torch.int64)
    prompts_N = torch.tensor([sample.prompt_length for sample in samples])
    responses = Spans.predicting(prompts_N, tokens.lengths_N - prompts_N)
    return [
        MicroBatch(
            tokens_BS=lay_out(sheet, tokens, Spans.whole(tokens.lengths_N)).to(device),
            columns={"response_mask": mask_of(sheet, responses, device)},
            sheet=sheet,
        )
        for sheet in actor.batching(micro).sheets([(n,) for n in range(len(samples))], tokens.lengths_N)
    ]
