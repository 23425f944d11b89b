"""Batch arithmetic: derived numbers with their units. All divisions are checked here, before a model is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

from megarlhf.config import DPOConfig, RLConfig, RLTrainConfig, RMConfig, SFTConfig, TrainConfig, trained_roles


@dataclass(frozen=True)
class BatchNumber:
    """A derived number, and what it counts."""

    unit: str
    value: float


ConfigT = TypeVar("ConfigT", bound=SFTConfig | RMConfig | DPOConfig | RLConfig)


def with_counted_steps(cfg: ConfigT, num_records: int, records_per_step: int) -> ConfigT:
    """The configuration with `train.num_steps` in place of `train.num_epochs`, if that is given.

    Raises: ValueError where the steps contradict other keys.
    """
    if cfg.train.num_epochs is None:
        return cfg
    steps = max(1, math.ceil(cfg.train.num_epochs * num_records / records_per_step - 1e-9))
    tree: dict[str, Any] = cfg.model_dump()
    counted: Any = type(cfg).model_validate(
        {**tree, "train": {**tree["train"], "num_steps": steps, "num_epochs": None}}
    )
    schedule_notes(counted)
    return counted


def require_prompts(cfg: RLConfig, num_prompts: int) -> None:
    """Raises: ValueError for steps that draw from more different prompts than there are."""
    if (surplus := cfg.algo.dynamic_sampling.surplus) and cfg.prompts_drawn > num_prompts:
        own = cfg.train.prompts_per_step
        raise ValueError(
            f"train.prompts_per_step + algo.dynamic_sampling.surplus = {own} + {surplus}: a step draws from "
            f"{cfg.prompts_drawn} different prompts, and data.train has {num_prompts}; lower one of them, or give more "
            "data"
        )


def passes_note(num_steps: int, records_per_step: int, num_records: int) -> str:
    """Sentence on how often a run sees each record."""
    passes = num_steps * records_per_step / num_records
    return f"{num_steps:,} steps of {records_per_step:,} of {num_records:,} records: {passes:.3g} passes over the data"


def _num_steps(unit: str, train: TrainConfig | RLTrainConfig) -> BatchNumber:
    """The length of the run; in passes where the records are counted at its start."""
    if train.num_epochs is None:
        return BatchNumber(unit, train.num_steps)
    return BatchNumber("passes over the data of the run", train.num_epochs)


def _divided(total: int, by: int, name: str, per: str, advice: str) -> int:
    quotient, remainder = divmod(total, by)
    if remainder or not quotient:
        near = sorted({max(total // by, 1) * by, -(-total // by) * by})
        raise ValueError(
            f"{name} = {total} is not a multiple of {per} = {by}; use {' or '.join(str(n) for n in near)}, or {advice}"
        )
    return quotient


def micro_batches_per_rank(train: TrainConfig | RLTrainConfig, dp: int, role: str) -> int | None:
    """Padded micro-batches per mini-batch on one data-parallel rank of `role`; None for packed ones.

    Raises: ValueError if the mini-batch does not divide.
    """
    size = train.micro_batch_samples
    if size is None:
        return None
    return _divided(
        train.mini_batch_samples,
        dp * size,
        "train.mini_batch_samples",
        f"data-parallel ranks of {role} x train.micro_batch_samples = {dp} x {size}",
        f"change train.micro_batch_samples or {role}.parallel",
    )


def _micro_batch_size(train: TrainConfig | RLTrainConfig, sample: str) -> BatchNumber:
    if train.max_tokens_per_micro_batch is not None:
        unit = "tokens per forward (packed micro-batch) of one data-parallel rank, at most"
        return BatchNumber(unit, train.max_tokens_per_micro_batch)
    assert train.micro_batch_samples is not None
    return BatchNumber(f"{sample} per forward (micro-batch) of one data-parallel rank", train.micro_batch_samples)


def supervised_batch_numbers(train: TrainConfig, dp: int, role: str, sample: str) -> list[BatchNumber]:
    """Numbers of sft, rm and dpo. `sample` is the word for their samples, in the plural."""
    numbers = [
        _num_steps("optimizer steps of the run", train),
        BatchNumber(f"{sample} per optimizer step (mini-batch), over all ranks", train.mini_batch_samples),
        BatchNumber(f"data-parallel ranks of {role}", dp),
    ]
    per_rank, size = micro_batches_per_rank(train, dp, role), _micro_batch_size(train, sample)
    if per_rank is None:
        return [*numbers, size]
    return [
        *numbers,
        BatchNumber(f"{sample} per optimizer step on one data-parallel rank", train.mini_batch_samples // dp),
        size,
        BatchNumber("micro-batches per optimizer step on one data-parallel rank", per_rank),
    ]


def dpo_batch_numbers(cfg: DPOConfig, world_size: int) -> list[BatchNumber]:
    """Numbers of dpo, whose reference may have its own layout.

    Raises: ValueError if the mini-batch does not divide; it names the keys.
    """
    dp = cfg.actor.parallel.layout(world_size, "actor").dp
    numbers = supervised_batch_numbers(cfg.train, dp, "actor", "preference pairs (two sequences each)")
    if not cfg.needs_reference:
        return numbers
    reference_dp = cfg.roles()["reference"].parallel.layout(world_size, "reference").dp
    per_rank = micro_batches_per_rank(cfg.train, reference_dp, "reference")
    forwards = 2 if cfg.loss == "kto" else 1  # kto: also on prompts with the responses of another pair
    numbers.append(BatchNumber("passes of the frozen reference over the pairs of an optimizer step", forwards))
    if per_rank is not None and reference_dp != dp:
        unit = f"micro-batches of each on one of reference's {reference_dp} data-parallel ranks"
        numbers.append(BatchNumber(unit, per_rank))
    return numbers


def rl_batch_numbers(cfg: RLConfig, world_size: int) -> list[BatchNumber]:
    """Numbers of a rollout-and-train step.

    Raises: ValueError if samples, mini-batches or micro-batches do not divide; it names the keys.
    """
    train, rollout = cfg.train, cfg.rollout
    samples = train.prompts_per_step * rollout.num_samples_per_prompt
    mini_batches = _divided(
        samples,
        train.mini_batch_samples,
        f"samples per step = train.prompts_per_step x rollout.num_samples_per_prompt = "
        f"{train.prompts_per_step} x {rollout.num_samples_per_prompt}",
        "train.mini_batch_samples",
        "change train.mini_batch_samples",
    )
    surplus = cfg.algo.dynamic_sampling.surplus
    further = [
        BatchNumber("further prompts drawn per step (algo.dynamic_sampling.surplus)", surplus),
        BatchNumber("samples drawn per step, over all ranks", cfg.prompts_drawn * rollout.num_samples_per_prompt),
    ]
    numbers = [
        _num_steps("rollout-and-train steps of the run", train),
        BatchNumber("prompts per step, over all ranks", train.prompts_per_step),
        BatchNumber("samples per prompt", rollout.num_samples_per_prompt),
        BatchNumber("samples (sequences) per step, over all ranks", samples),
        *(further if surplus else ()),
        BatchNumber("passes over the samples of a step", train.epochs_per_step),
        BatchNumber("samples per optimizer step (mini-batch), over all ranks", train.mini_batch_samples),
        BatchNumber("optimizer steps per rollout-and-train step", mini_batches * train.epochs_per_step),
        _micro_batch_size(train, "samples"),
    ]
    for role, section in cfg.roles().items():
        dp = section.parallel.layout(world_size, role).dp
        per_rank = micro_batches_per_rank(train, dp, role)
        if per_rank is not None:
            numbers.append(
                BatchNumber(f"micro-batches per mini-batch on one of {role}'s {dp} data-parallel ranks", per_rank)
            )
    tp = rollout.tp(cfg.actor)
    engines, remainder = divmod(world_size, tp)
    if remainder:
        raise ValueError(f"{world_size} ranks do not divide into engines of rollout.parallel.tp = {tp} ranks")
    numbers.append(BatchNumber(f"rollout engines of {tp} rank(s)", engines))
    numbers.append(BatchNumber("prompts per rollout engine and step, at most", -(-cfg.prompts_drawn // engines)))
    return numbers


def schedule_notes(cfg: SFTConfig | RMConfig | DPOConfig | RLConfig) -> list[str]:
    """Notes on surprising schedules, in sentences. Raises: ValueError for a warm-up that is longer than the run."""
    notes = []
    roles = {role: section for role, section in cfg.roles().items() if role in trained_roles(cfg)}
    if isinstance(cfg, RLConfig) and "critic" in roles and 0 < cfg.train.num_steps <= cfg.train.critic_warmup_steps:
        notes.append(
            f"actor: never trained, as train.critic_warmup_steps = {cfg.train.critic_warmup_steps} of train.num_steps "
            f"= {cfg.train.num_steps} train the critic only"
        )
    for role, section in roles.items():
        steps = cfg.optimizer_steps(role) if isinstance(cfg, RLConfig) else cfg.train.num_steps
        if 0 < steps < section.optim.warmup_steps:
            raise ValueError(
                f"{role}.optim.warmup_steps = {section.optim.warmup_steps}, but the run has {steps} optimizer steps of "
                f"{role}: it would end before the learning rate reaches {role}.optim.lr; set warmup_steps to at most "
                f"{steps}, or make the run longer"
            )
    return notes
