"""Measurements of `eval` on given texts: perplexity, and how a reward model ranks pairs.

Legend: P texts or pairs; B, S, H rows, positions and hidden width of a micro-batch, K its sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.architectures.hf_config import architecture_from_hf, read_config, score_of_config
from megarlhf.config import EvaluateConfig, RMConfig, SFTConfig, TrainConfig, describe_sources
from megarlhf.data.sample_types import Encoder
from megarlhf.data.samples.encoders import PairSample, SFTSample
from megarlhf.data.samples.texts import Text
from megarlhf.data.tokenize.load import SetLoader
from megarlhf.models.role import Role
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.planning.data.encoders import text_encoder
from megarlhf.trainers.generation.figures import Figures, of_pairs, of_texts
from megarlhf.trainers.supervised.dpo_loss import response_logprobs, sequence_sums
from megarlhf.trainers.supervised.loop import load_samples
from megarlhf.trainers.supervised.objective import Objective, Sample
from megarlhf.trainers.supervised.rm import RewardModelling, pair_scores
from megarlhf.trainers.supervised.sft import SupervisedFineTuning


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


def read_texts(cfg: EvaluateConfig) -> tuple[Sequence[SFTSample], str]:
    """Texts for the perplexity, and sentences about what was skipped. Raises: ValueError."""
    objective, limits = perplexity_objective(cfg), cfg.data
    if cfg.eval.perplexity_of == "response":
        return _read(objective, cfg.max_samples)
    encoder: Encoder[Any] = text_encoder(cfg)
    pieces, _, notes = SetLoader(cfg.data, encoder, Text, ("text",), cfg.run.dir).train_and_validation()
    texts = [SFTSample.of_response(piece.tokens, 1) for piece in pieces[: cfg.max_samples]]
    max_positions = architecture_from_hf(objective.section.model.hf_directory()).longest_sequence
    with _said_of_eval():
        objective.require_fitting(texts, max_positions, describe_sources(limits.train))
    return texts, "; ".join(notes)


def read_pairs(cfg: EvaluateConfig) -> tuple[Sequence[PairSample], str]:
    """The pairs, and what was skipped in words. Raises: ValueError."""
    return _read(pairs_objective(cfg), cfg.max_samples)


def _read(objective: Objective[Sample], most: int | None) -> tuple[Sequence[Sample], str]:
    with _said_of_eval():
        samples, _, notes = load_samples(objective)
    return samples[:most], "; ".join(notes)


@contextlib.contextmanager
def _said_of_eval() -> Iterator[None]:
    """Put the keys of `eval` in place of those of `sft` and `rm` in a message."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("train.max_tokens", "forward.max_tokens")) from None


def perplexity(cfg: EvaluateConfig, actor: Role, texts: Sequence[SFTSample]) -> Figures:
    """Collective."""
    logprobs_P, tokens_P = text_logprobs(perplexity_objective(cfg), actor, texts)
    return of_texts(logprobs_P, tokens_P, "responses" if cfg.eval.perplexity_of == "response" else "pieces")


def text_logprobs(objective: SupervisedFineTuning, role: Role, texts: Sequence[SFTSample]) -> tuple[Tensor, Tensor]:
    """[P] fp64 each, on the CPU, the same on every rank and at every layout up to rounding: the log-prob of each text's
    learnt tokens in nats, and how many these are. Collective."""
    role.parts.to_compute()
    vocabulary = role.shard.vocabulary()
    total_2P = torch.zeros(2, len(texts), dtype=torch.float64, device=role.mesh.runtime.device)

    def score(hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
        assert batch.layout is not None
        grids = response_logprobs(vocabulary, hidden_SBH, batch), batch.columns["response_mask"]
        sums_2K = torch.stack([sequence_sums(batch.layout, grid_BS) for grid_BS in grids])
        if role.mesh.owns_outputs:
            total_2P[:, batch.layout.sequences_K.to(total_2P.device)] = sums_2K
        return sums_2K

    role.forward(objective.micro_batches(role, texts), score)
    dist.all_reduce(total_2P)
    logprobs_P, tokens_P = total_2P.cpu().unbind()
    return logprobs_P, tokens_P


def ranking(cfg: EvaluateConfig, reward_model: Role, pairs: Sequence[PairSample]) -> tuple[Figures, dict[str, Any]]:
    """Figures of the reward model, and its calibration. Collective."""
    lengths_P2 = torch.tensor([[len(pair.chosen_tokens), len(pair.rejected_tokens)] for pair in pairs])
    return of_pairs(pair_scores(pairs_objective(cfg), reward_model, pairs), lengths_P2)
