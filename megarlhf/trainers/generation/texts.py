"""Measurements of `eval` on given texts: perplexity, and the ranking of pairs by a reward model.

Legend: P texts or pairs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megarlhf.architectures.hf_config import architecture_from_hf, read_config, score_of_config
from megarlhf.config import EvaluateConfig, RMConfig, SFTConfig, TrainConfig, describe_sources
from megarlhf.data.sample_types import Encoder
from megarlhf.data.samples.encoders import PairSample, SFTSample
from megarlhf.data.samples.texts import Text
from megarlhf.data.tokenize.load import SetLoader
from megarlhf.models.role import Role
from megarlhf.planning.data.encoders import text_encoder
from megarlhf.trainers.generation.figures import Figures, pair_figures, text_figures
from megarlhf.trainers.supervised.dpo_loss import response_totals
from megarlhf.trainers.supervised.loop import load_samples
from megarlhf.trainers.supervised.objective import Objective, Sample
from megarlhf.trainers.supervised.rm import RewardModelling, pair_scores
from megarlhf.trainers.supervised.sft import SupervisedFineTuning


def perplexity_objective(cfg: EvaluateConfig) -> SupervisedFineTuning:
    """Objective that reads and measures texts as `sft` does held-out samples."""
    assert cfg.actor is not None, "checked with the configuration"
    return SupervisedFineTuning(SFTConfig(run=cfg.run, actor=cfg.actor, data=cfg.data, train=_limits(cfg)))


def pairs_objective(cfg: EvaluateConfig) -> RewardModelling:
    """Objective that reads and measures pairs as `rm` does held-out ones, with the score of the model's training."""
    assert cfg.reward_model is not None, "checked with the configuration"
    directory = cfg.reward_model.model.hf_directory()
    score_of = score_of_config(read_config(directory), directory)
    return RewardModelling(
        RMConfig(run=cfg.run, reward_model=cfg.reward_model, data=cfg.data, train=_limits(cfg), loss=score_of)
    )


def _limits(cfg: EvaluateConfig) -> TrainConfig:
    return TrainConfig(num_steps=1, mini_batch_samples=1, **cfg.forward.model_dump())


def read_texts(cfg: EvaluateConfig) -> tuple[Sequence[SFTSample], str]:
    """Texts for the perplexity, and a note about skipped records. Raises: ValueError."""
    objective = perplexity_objective(cfg)
    if cfg.eval.perplexity_of == "response":
        return _read(objective, cfg.max_samples)
    encoder: Encoder[Any] = text_encoder(cfg)
    pieces, _, notes = SetLoader(cfg.data, encoder, Text, ("text",), cfg.run.dir).train_and_validation()
    texts = [SFTSample.of_response(piece.tokens, 1) for piece in pieces[: cfg.max_samples]]
    max_positions = architecture_from_hf(objective.section.model.hf_directory()).longest_sequence
    with _keys_of_eval():
        objective.require_fitting(texts, max_positions, describe_sources(cfg.data.train))
    return texts, "; ".join(notes)


def read_pairs(cfg: EvaluateConfig) -> tuple[Sequence[PairSample], str]:
    """Pairs for the ranking, and a note about skipped records. Raises: ValueError."""
    return _read(pairs_objective(cfg), cfg.max_samples)


def _read(objective: Objective[Sample], max_samples: int | None) -> tuple[Sequence[Sample], str]:
    with _keys_of_eval():
        samples, _, notes = load_samples(objective)
    return samples[:max_samples], "; ".join(notes)


@contextlib.contextmanager
def _keys_of_eval() -> Iterator[None]:
    """Replace keys of `sft` and `rm` in error messages by the keys of `eval`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("train.max_tokens", "forward.max_tokens")) from None


def perplexity(cfg: EvaluateConfig, actor: Role, texts: Sequence[SFTSample]) -> Figures:
    """Figures of the texts under the actor. Collective."""
    actor.parts.to_compute()
    batches = perplexity_objective(cfg).micro_batches(actor, texts)
    tokens_P = torch.tensor([text.num_learnt for text in texts], dtype=torch.float64)
    unit = "responses" if cfg.eval.perplexity_of == "response" else "pieces"
    return text_figures(response_totals(actor, [batches], len(texts)).cpu(), tokens_P, unit)


def ranking(cfg: EvaluateConfig, reward_model: Role, pairs: Sequence[PairSample]) -> tuple[Figures, dict[str, Any]]:
    """Figures of the reward model, and its calibration. Collective."""
    lengths_P2 = torch.tensor([[len(pair.chosen_tokens), len(pair.rejected_tokens)] for pair in pairs])
    return pair_figures(pair_scores(pairs_objective(cfg), reward_model, pairs), lengths_P2)
