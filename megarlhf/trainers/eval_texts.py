"""What `eval` measures of texts that are there: perplexity, and how a reward model ranks pairs.

Legend: P texts or pairs; B, S, H rows, positions and hidden width of a micro-batch, K its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.architectures.hf_config import architecture_from_hf, read_config, score_of_config
from megarlhf.config import EvaluateConfig, RMConfig, SFTConfig, TrainConfig
from megarlhf.data.samples import PairSample, Records, SFTSample, Skipped, load_splits
from megarlhf.data.sources import load_records, source_words
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.models.role import Role
from megarlhf.parallel.step import MicroBatch
from megarlhf.trainers.dpo_loss import response_logprobs, sequence_sums
from megarlhf.trainers.eval_figures import Figures, of_pairs, of_texts
from megarlhf.trainers.rl_ptx import pieces
from megarlhf.trainers.rm import RewardModelling, pair_scores
from megarlhf.trainers.sft import SupervisedFineTuning
from megarlhf.trainers.supervised import Objective


def perplexity_objective(cfg: EvaluateConfig) -> SupervisedFineTuning:
    """As `sft` reads and measures held-out samples."""
    assert cfg.actor is not None, "checked with the configuration"
    return SupervisedFineTuning(SFTConfig(run=cfg.run, actor=cfg.actor, data=cfg.data, train=_limits(cfg)))


def pairs_objective(cfg: EvaluateConfig) -> RewardModelling:
    """As `rm` reads and measures held-out pairs, with the score that the model was trained for."""
    assert cfg.reward_model is not None, "checked with the configuration"
    directory = cfg.reward_model.model.hf_directory()
    score_of = score_of_config(read_config(directory), directory)
    return RewardModelling(
        RMConfig(run=cfg.run, reward_model=cfg.reward_model, data=cfg.data, train=_limits(cfg), loss=score_of)
    )


def _limits(cfg: EvaluateConfig) -> TrainConfig:
    return TrainConfig(num_steps=1, mini_batch_samples=1, **cfg.forward.model_dump())


def read_texts(cfg: EvaluateConfig) -> tuple[list[SFTSample], str]:
    """What the perplexity is of, and what was skipped in words. Raises: ValueError."""
    objective, limits = perplexity_objective(cfg), cfg.data
    if cfg.eval.perplexity_of == "response":
        return _read(cfg, objective)
    tokenizer = load_tokenizer(objective.section.model.hf_directory())
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    records = load_records(limits.train, fields=("text",), split=limits.train_split)
    texts = [SFTSample(piece, 1) for each in records for piece in pieces(each["text"], tokenizer, longest)]
    if not texts:
        raise ValueError(f"data.train = {limits.train} has no text of two tokens or more; give other data")
    texts, source = texts[: cfg.max_samples], source_words(limits.train, limits.train_split)
    _require_fitting(objective, texts, source)
    return texts, f"{source}: {len(texts)} pieces of {len(records)} texts"


def read_pairs(cfg: EvaluateConfig) -> tuple[list[PairSample], str]:
    """The pairs, and what was skipped in words. Raises: ValueError."""
    return _read(cfg, pairs_objective(cfg))


def _read(cfg: EvaluateConfig, objective: Objective[Any]) -> tuple[list[Any], str]:
    data, tokenizer = cfg.data, load_tokenizer(objective.section.model.hf_directory())

    def build(records: Records, source: str) -> tuple[list[Any], Skipped]:
        samples, skipped = objective.build_samples(
            records,
            tokenizer,
            max_prompt_tokens=data.max_prompt_tokens,
            max_response_tokens=data.max_response_tokens,
            template=data.template,
        )
        _require_fitting(objective, samples[: cfg.max_samples], source)
        return samples, skipped

    samples, _, notes = load_splits(data, objective.fields, build)
    return samples[: cfg.max_samples], "; ".join(notes)


def _require_fitting(objective: Objective[Any], samples: Sequence[Any], source: str) -> None:
    max_positions = architecture_from_hf(objective.section.model.hf_directory()).max_positions
    try:
        objective.require_fitting(samples, max_positions, source)
    except ValueError as error:
        raise ValueError(str(error).replace("train.max_tokens", "forward.max_tokens")) from None


def perplexity(cfg: EvaluateConfig, actor: Role, texts: Sequence[SFTSample]) -> Figures:
    """Collective."""
    tokens_P = torch.tensor([len(text.tokens) - text.prompt_length for text in texts])
    unit = "responses" if cfg.eval.perplexity_of == "response" else "pieces"
    return of_texts(text_logprobs(perplexity_objective(cfg), actor, texts), tokens_P, unit)


def text_logprobs(objective: SupervisedFineTuning, role: Role, texts: Sequence[SFTSample]) -> Tensor:
    """[P] fp64 on the CPU, the same on every rank and at every layout up to rounding: the log-prob of each text's
    learnt tokens, nats. Collective."""
    vocabulary = role.shard.vocabulary()
    total_P = torch.zeros(len(texts), dtype=torch.float64, device=role.mesh.runtime.device)

    def score(hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
        assert batch.layout is not None
        sums_K = sequence_sums(batch.layout, response_logprobs(vocabulary, hidden_SBH, batch))
        if role.mesh.owns_outputs:
            total_P[batch.layout.sequences_K.to(total_P.device)] = sums_K
        return sums_K

    role.forward(objective.micro_batches(role, texts), score)
    dist.all_reduce(total_P)
    return total_P.cpu()


def ranking(cfg: EvaluateConfig, reward_model: Role, pairs: Sequence[PairSample]) -> tuple[Figures, dict[str, Any]]:
    """Figures of the reward model, and its calibration. Collective."""
    lengths_P2 = torch.tensor([[len(pair.chosen_tokens), len(pair.rejected_tokens)] for pair in pairs])
    return of_pairs(pair_scores(pairs_objective(cfg), reward_model, pairs), lengths_P2)
