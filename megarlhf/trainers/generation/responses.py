"""Responses of `eval`: draws them from one model after the other, and computes rewards and figures.

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

from megarlhf.config import EvaluateConfig, RolloutConfig, describe_sources
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.models.role import Role
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.device_memory import DeviceMemory, OnDevice
from megarlhf.rollout.conversations import draw_samples
from megarlhf.rollout.engines import engine_of
from megarlhf.rollout.environments.environment import Environment
from megarlhf.rollout.factory import sampling_of
from megarlhf.rollout.in_flight import Requests
from megarlhf.rollout.responses import Sampling, sample_seed
from megarlhf.rollout.rewards.accuracy import accuracy_metrics, find_accuracy
from megarlhf.rollouts import Rollouts
from megarlhf.trainers.experience.prompts import load_prompts, make_experience, repeat_prompts
from megarlhf.trainers.experience.reward_outputs import RewardOutput, totals_of
from megarlhf.trainers.experience.rewards import Rewarder
from megarlhf.trainers.generation.figures import Figure, Figures, comparison_figures, mean_figure, pass_figures
from megarlhf.trainers.generation.generate import all_rewards
from megarlhf.trainers.run.factories import RunFactories

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
SEED_OF = {"actor": 0, "against": 1}
"""Step in the seed of the samples, by model: a model compared with itself draws other samples."""


@dataclass(frozen=True)
class Answers:
    """Responses of a model to all prompts, and their rewards."""

    prompts: Sequence[PromptSample]
    """Prompts, each once."""
    rollouts: Rollouts
    outputs: Sequence[RewardOutput] = ()
    """Outputs of `generate.all_rewards`."""


@dataclass(frozen=True)
class Prompts:
    """Prompts as a model's tokenizer reads them."""

    prompts: Sequence[PromptSample]
    tokenizer: Tokenizer
    notes: Sequence[str]
    """Sentences about records that were skipped."""


def sampling_settings(cfg: EvaluateConfig) -> dict[str, Any]:
    """Settings of the sampling for `eval.json`; None for settings that a greedy engine does not read."""
    names = ["num_samples_per_prompt", "max_response_tokens", "stop", "stop_token_ids", "engine", "dtype"]
    sampled = {name: None if cfg.greedy else getattr(cfg.rollout, name) for name in _SAMPLING_KEYS}
    dtype = {} if engine_of(cfg.rollout).has_own_weights else {"dtype": None}
    return {"greedy": cfg.greedy, **sampled, **{name: getattr(cfg.rollout, name) for name in names}, **dtype}


def describe_sampling(cfg: EvaluateConfig) -> str:
    """Sampling settings in a sentence, without those at their default."""
    parts = ["greedy" if cfg.greedy else f"drawn at temperature {cfg.rollout.temperature:g}"]
    settings = sampling_settings(cfg)
    for name in ("top_p", "top_k", "min_p", "stop", "stop_token_ids"):
        if (value := settings[name]) not in (None, RolloutConfig.model_fields[name].default):
            parts.append(f"{name} {', '.join(map(repr, value)) if isinstance(value, tuple) else f'{value:g}'}")
    engine = cfg.rollout.engine + (f" in {settings['dtype']}" if settings["dtype"] not in (None, "auto") else "")
    return ", ".join([*parts, f"at most {cfg.rollout.max_response_tokens} tokens, by {engine}"])


def read_prompts(cfg: EvaluateConfig) -> dict[str, Prompts]:
    """Prompts by model; with two models, only prompts that are short enough for both. Raises: ValueError."""
    by_model = {
        name: load_prompts(
            cfg.data,
            section.model.tokenizer_place(),
            all_rewards(cfg),
            run_dir=cfg.run.dir,
            environment=cfg.environment,
        )
        for name, section in cfg.roles().items()
        if name == "actor" or (name == "against" and "comparison" in cfg.tasks())
    }
    records = {name: data.train.records().tolist() for name, data in by_model.items()}
    common = set.intersection(*map(set, records.values()))
    if not common:
        raise ValueError(
            f"data.train = {describe_sources(cfg.data.train)}: no prompt is short enough for both models; raise the "
            "limits"
        )
    samples = {name: [n for n, record in enumerate(numbers) if record in common] for name, numbers in records.items()}
    return {
        name: Prompts([data.train[n] for n in samples[name][: cfg.max_samples]], data.tokenizer, data.notes)
        for name, data in by_model.items()
    }


def sampling_for(cfg: EvaluateConfig, role: Role, data: Prompts) -> Sampling:
    """Settings with which a model's responses are drawn."""
    return sampling_of(cfg.rollout, role.section, data.tokenizer, greedy=cfg.greedy, data=cfg.data)


def draw_responses(
    cfg: EvaluateConfig,
    role: Role,
    data: Prompts,
    device_memory: DeviceMemory,
    phases: Phases,
    parts: RunFactories,
    environment: Environment | None = None,
) -> Rollouts:
    """Draw responses of the model `role` with an engine of its own, which is certified and closed again. Collective."""
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    with phases("build"):
        device_memory.keep_only()  # vLLM measures the free memory
        engine = parts.engine(cfg.rollout, role, cfg.data.max_prompt_tokens, cfg.forward.rows(longest))
    phases.before["rollout"] = OnDevice(device_memory, partial(engine.needs, to_generate=True))
    for phase in ("reshard", "certificate"):
        phases.before[phase] = OnDevice(device_memory, partial(engine.needs, to_generate=False))
    with phases("reshard"):
        engine.update_weights(role.shard, version=0)
    with phases("certificate"):
        engine.verify_weights(role.shard)
    repeated = repeat_prompts(data.prompts, cfg.rollout.num_samples_per_prompt)
    rows = [torch.tensor(prompt.tokens) for prompt in repeated]
    with phases("rollout"):
        sampling = sampling_for(cfg, role, data)
        seeds = [sample_seed(cfg.run.seed, SEED_OF[role.name], n) for n in range(len(rows))]
        requests = Requests.whole(rows, seeds, sampling.max_tokens)
        rollouts = draw_samples(engine, environment, repeated, requests, sampling)
        rollouts.versions.require(0)
    for phase in ("rollout", "reshard", "certificate"):
        phases.before.pop(phase)
    engine.close()
    del engine
    gc.collect()  # before the next engine is built
    return rollouts


def score_responses(
    cfg: EvaluateConfig, rewarder: Rewarder, prompts: Sequence[PromptSample], rollouts: Rollouts
) -> Answers:
    """Compute the rewards of responses. Collective. Raises: RewardError, WatchdogTimeout, FloatingPointError: see
    `Rewarder`."""
    per_prompt = cfg.rollout.num_samples_per_prompt
    pending = rewarder.start(make_experience(prompts, rollouts, per_prompt), repeat_prompts(prompts, per_prompt))
    return Answers(prompts, rollouts, pending.wait())


def figures_of(cfg: EvaluateConfig, answers: Answers) -> Figures:
    """Figures of a model's answers."""
    per_prompt = cfg.rollout.num_samples_per_prompt
    outputs = {reward.label: output for reward, output in zip(all_rewards(cfg), answers.outputs, strict=True)}
    figures: Figures = {}
    for label, output in outputs.items():
        not_applicable, failed = output.count_missing()
        figures |= {
            f"eval_{label}": mean_figure(output.values_N, per_prompt),
            f"eval_{label}_none": Figure(not_applicable),
        }
        if failed:
            figures[f"eval_{label}_failed"] = Figure(failed)
    if len(cfg.rewards) > 1 or "comparison" in cfg.tasks():
        figures["eval_reward_mean"] = mean_figure(totals(cfg, answers), per_prompt)
    accuracy = find_accuracy(cfg.eval.accuracy, cfg.rewards)
    if accuracy.label is not None:
        values_N = outputs[accuracy.label].values_N
        metrics = accuracy_metrics(accuracy, values_N)
        is_known = metrics["eval_accuracy"] is not None
        figures["eval_accuracy"] = mean_figure(values_N, per_prompt) if is_known else Figure(None)
        figures["eval_accuracy_none"] = Figure(metrics["eval_accuracy_none"])
        figures |= pass_figures(values_N, per_prompt, cfg.eval.pass_at)
    figures["response_length_mean"] = mean_figure(answers.rollouts.responses.lengths_N.double(), per_prompt)
    figures["finished_fraction"] = mean_figure(answers.rollouts.finished_N.double(), per_prompt)
    if answers.rollouts.stretches is not None:
        turns_N = (answers.rollouts.stretches.lengths.lengths_N.double() + 1) / 2
        figures["turns_mean"] = mean_figure(turns_N, per_prompt)
    counts = {"num_prompts": len(answers.prompts), "num_samples": len(answers.prompts) * per_prompt}
    return figures | {name: Figure(count) for name, count in counts.items()}


def totals(cfg: EvaluateConfig, answers: Answers) -> Tensor:
    """Weighted sum of the rewards, [N]; NaN where none applies or one has failed."""
    return totals_of(cfg.rewards, answers.outputs[: len(cfg.rewards)])


def compare_answers(cfg: EvaluateConfig, ours: Answers, theirs: Answers) -> Figures:
    """Figures that compare the actor's answers with the other model's."""
    return comparison_figures(totals(cfg, ours), totals(cfg, theirs), cfg.rollout.num_samples_per_prompt)


def figures_against(cfg: EvaluateConfig, answers: Answers) -> Figures:
    """Figures of the other model's answers alone."""
    return {
        f"against_{name.removeprefix('eval_')}": figure
        for name, figure in figures_of(cfg, answers).items()
        if name not in ("num_prompts", "num_samples")
    }
