"""Responses in `eval`: drawn from one model after the other, and judged by the rewards.

Legend: N responses, in the order of the prompts, `num_samples_per_prompt` to each.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarlhf.config import EvaluateConfig, RewardConfig, RolloutConfig, describe_sources
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.experience import Rollouts
from megarlhf.models.role import Role
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.device_memory import DeviceMemory, OnDevice
from megarlhf.rollout.engine import sample_seed
from megarlhf.rollout.engines import engine_of
from megarlhf.rollout.factory import sampling_of
from megarlhf.rollout.rewards.accuracy import accuracy_metrics, find_accuracy
from megarlhf.trainers.experience.prompts import load_prompts, make_experience
from megarlhf.trainers.experience.rewards import Rewarder, RewardOutput, totals_of
from megarlhf.trainers.generation.figures import Figure, Figures, of_comparison, of_right, of_values
from megarlhf.trainers.run.factories import RunFactories

_SAMPLED = ("temperature", "top_p", "top_k", "min_p")
SEED_OF = {"actor": 0, "against": 1}
"""Samples of the two models do not depend on each other: a model compared with itself draws other samples."""


@dataclass(frozen=True)
class Answers:
    """Responses of a model to all prompts, and their rewards."""

    prompts: Sequence[PromptSample]
    """One for each prompt."""
    rollouts: Rollouts
    said: Sequence[RewardOutput] = ()
    """Values of each reward, and of the rule that is the accuracy where it is none of them."""


def scored_by(cfg: EvaluateConfig) -> list[RewardConfig]:
    """The rewards, and the rule that `eval.accuracy` names where it is none of them."""
    judge = find_accuracy(cfg.eval.accuracy, cfg.rewards).judge
    return [*cfg.rewards, *([judge] if judge is not None else [])]


@dataclass(frozen=True)
class Prompts:
    """Prompts as a model's tokenizer reads them."""

    prompts: Sequence[PromptSample]
    tokenizer: Tokenizer
    notes: Sequence[str]
    """Sentences about records that were skipped."""


def drawn(cfg: EvaluateConfig) -> dict[str, Any]:
    """How responses are drawn, for `eval.json`; None for what a greedy engine does not read."""
    names = ["num_samples_per_prompt", "max_response_tokens", "stop", "stop_token_ids", "engine", "dtype"]
    sampled = {name: None if cfg.greedy else getattr(cfg.rollout, name) for name in _SAMPLED}
    dtype = {} if engine_of(cfg.rollout).has_own_weights else {"dtype": None}
    return {"greedy": cfg.greedy, **sampled, **{name: getattr(cfg.rollout, name) for name in names}, **dtype}


def drawn_in_words(cfg: EvaluateConfig) -> str:
    """The same, without what stands at its default."""
    how, known = ["greedy" if cfg.greedy else f"drawn at temperature {cfg.rollout.temperature:g}"], drawn(cfg)
    for name in ("top_p", "top_k", "min_p", "stop", "stop_token_ids"):
        if known[name] not in (None, RolloutConfig.model_fields[name].default):
            value = known[name]
            how.append(f"{name} {', '.join(map(repr, value)) if isinstance(value, tuple) else f'{value:g}'}")
    engine = cfg.rollout.engine + (f" in {known['dtype']}" if known["dtype"] not in (None, "auto") else "")
    return ", ".join([*how, f"at most {cfg.rollout.max_response_tokens} tokens, by {engine}"])


def read_prompts(cfg: EvaluateConfig) -> dict[str, Prompts]:
    """By model; of two models the prompts that both can take. Raises: ValueError."""
    read = {
        name: load_prompts(cfg.data, section.model.tokenizer_place(), scored_by(cfg), run_dir=cfg.run.dir)
        for name, section in cfg.roles().items()
        if name == "actor" or (name == "against" and "comparison" in cfg.tasks())
    }
    records = {name: data.train.records().tolist() for name, data in read.items()}
    common = set.intersection(*map(set, records.values()))
    if not common:
        raise ValueError(
            f"data.train = {describe_sources(cfg.data.train)}: no prompt is short enough for both models; raise the "
            "limits"
        )
    places = {name: [n for n, record in enumerate(each) if record in common] for name, each in records.items()}
    return {
        name: Prompts([data.train[n] for n in places[name][: cfg.max_samples]], data.tokenizer, data.notes)
        for name, data in read.items()
    }


def responses(
    cfg: EvaluateConfig, role: Role, data: Prompts, device_memory: DeviceMemory, phases: Phases, parts: RunFactories
) -> Rollouts:
    """Draw responses of the model `role`, by an engine that is certified to hold its weights and closed afterwards.
    Collective."""
    limits, longest = cfg.data, cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    with phases("build"):
        device_memory.keep_only()  # vLLM measures what is free
        engine = parts.engine(cfg.rollout, role, limits.max_prompt_tokens, cfg.forward.rows(longest))
    phases.before["rollout"] = OnDevice(device_memory, partial(engine.needs, to_generate=True))
    for phase in ("reshard", "certificate"):
        phases.before[phase] = OnDevice(device_memory, partial(engine.needs, to_generate=False))
    with phases("reshard"):
        engine.update_weights(role.shard, version=0)
    with phases("certificate"):
        engine.verify_weights(role.shard)
    rows = [torch.tensor(p.tokens) for p in data.prompts for _ in range(cfg.rollout.num_samples_per_prompt)]
    with phases("rollout"):
        sampling = sampling_of(cfg.rollout, role.section, data.tokenizer, greedy=cfg.greedy, data=cfg.data)
        seeds = [sample_seed(cfg.run.seed, SEED_OF[role.name], n) for n in range(len(rows))]
        rollouts = engine.generate(rows, seeds, sampling)
    for phase in ("rollout", "reshard", "certificate"):
        phases.before.pop(phase)
    engine.close()
    del engine
    gc.collect()  # before the next one is built
    return rollouts


def scored(cfg: EvaluateConfig, rewarder: Rewarder, prompts: Sequence[PromptSample], rollouts: Rollouts) -> Answers:
    """Collective. Raises: RewardError, WatchdogTimeout, FloatingPointError: see `Rewarder`."""
    per_prompt = cfg.rollout.num_samples_per_prompt
    experience = make_experience(prompts, rollouts, per_prompt)
    return Answers(
        prompts, rollouts, rewarder.start(experience, [p for p in prompts for _ in range(per_prompt)]).said()
    )


def figures_of(cfg: EvaluateConfig, answers: Answers) -> Figures:
    """Figures of a model's answers."""
    per_prompt, rewards = cfg.rollout.num_samples_per_prompt, scored_by(cfg)
    said = {reward.label: each for reward, each in zip(rewards, answers.said, strict=True)}
    figures: Figures = {}
    for label, each in said.items():
        missing, failed = int(each.values_N.isnan().sum()), int(each.failed_N.sum())
        figures |= {
            f"eval_{label}": of_values(each.values_N, per_prompt),
            f"eval_{label}_none": Figure(missing - failed),
        }
        if failed:
            figures[f"eval_{label}_failed"] = Figure(failed)
    if len(cfg.rewards) > 1 or "comparison" in cfg.tasks():
        figures["eval_reward_mean"] = of_values(totals(cfg, answers), per_prompt)
    accuracy = find_accuracy(cfg.eval.accuracy, cfg.rewards)
    if accuracy.label is not None:
        values_N = said[accuracy.label].values_N
        metrics = accuracy_metrics(accuracy, values_N)
        whole = of_values(values_N, per_prompt)
        figures["eval_accuracy"] = whole if metrics["eval_accuracy"] is not None else Figure(None)
        figures["eval_accuracy_none"] = Figure(metrics["eval_accuracy_none"])
        figures |= of_right(values_N, per_prompt, cfg.eval.pass_at)
    figures["response_length_mean"] = of_values(answers.rollouts.responses.lengths_N.double(), per_prompt)
    figures["finished_fraction"] = of_values(answers.rollouts.finished_N.double(), per_prompt)
    counts = {"num_prompts": len(answers.prompts), "num_samples": len(answers.prompts) * per_prompt}
    return figures | {name: Figure(count) for name, count in counts.items()}


def totals(cfg: EvaluateConfig, answers: Answers) -> Tensor:
    """The weighted sum of the rewards, [N]; NaN where none applies or one has failed."""
    return totals_of(cfg.rewards, answers.said[: len(cfg.rewards)])


def compared(cfg: EvaluateConfig, ours: Answers, theirs: Answers) -> Figures:
    """How the actor's answers do against those of the other model."""
    return of_comparison(totals(cfg, ours), totals(cfg, theirs), cfg.rollout.num_samples_per_prompt)


def figures_against(cfg: EvaluateConfig, answers: Answers) -> Figures:
    """The other model's own figures."""
    return {
        f"against_{name.removeprefix('eval_')}": figure
        for name, figure in figures_of(cfg, answers).items()
        if name not in ("num_prompts", "num_samples")
    }
