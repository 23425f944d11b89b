"""`megarlhf generate`: sample responses from a model and score them by rules."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.reward_scaling import weighted_total
from megarlhf.atomic_write import atomic_path
from megarlhf.config import EvaluateConfig, GenerateConfig, RewardConfig
from megarlhf.data.records.conversations import BESIDE_A_CONVERSATION
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.errors import RewardError, WatchdogTimeout
from megarlhf.models.role import build_role
from megarlhf.observe.records.metrics import Metric
from megarlhf.observe.watch.phases import Phases
from megarlhf.observe.watch.watchdog import watched_phases
from megarlhf.parallel.mesh import GroupCache
from megarlhf.resume.claim.on_existing import NO_STEPS_LEFT, finish
from megarlhf.rollout.conversations import draw_samples
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.environments.environment import Environment, environment_of
from megarlhf.rollout.factory import actor_order, sampling_of
from megarlhf.rollout.in_flight import Requests
from megarlhf.rollout.responses import sample_seed
from megarlhf.rollout.rewards.accuracy import accuracy_metrics, find_accuracy
from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollout.rewards.score import (
    RewardSource,
    gather_rewards,
    local_reward_batch,
    make_source,
    response_texts,
    start_rewards,
)
from megarlhf.rollouts import Rollouts
from megarlhf.runtime import Runtime
from megarlhf.trainers.experience.prompts import PromptData, load_prompts, repeat_prompts
from megarlhf.trainers.experience.reward_outputs import RewardOutput, environment_output, without_failures
from megarlhf.trainers.generation.best_of import candidates, choose, record_of
from megarlhf.trainers.rl.metrics import conversation_metrics
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.open_session import open_session

log = logging.getLogger(__name__)

MICRO_BATCH_SAMPLES = 16
"""Rows per forward of the `megatron` engine, which is a reference and not meant to be fast."""


def run(cfg: GenerateConfig, runtime: Runtime, parts: RunFactories = RunFactories()) -> None:  # noqa: B008 -- frozen
    """Write a JSON line per response with prompt, response, finished, rewards by name, and the record's columns."""
    with contextlib.ExitStack() as stack:
        phases = stack.enter_context(watched_phases(cfg.watchdog, cfg.run.dir, runtime))
        with phases("build"):
            data = load_prompts(
                cfg.data,
                cfg.actor.model.tokenizer_place(),
                all_rewards(cfg),
                run_dir=cfg.run.dir,
                environment=cfg.environment,
            )
            engine = build_engine(cfg, runtime, parts)
        session = stack.enter_context(open_session(cfg, cfg.run, runtime, "generate", 1, data.notes, phases=phases))
        generated = _respond(cfg, runtime, engine, data, phases)
        out = cfg.out or cfg.run.dir / "responses.jsonl"
        lines, counts = _chosen_lines(cfg, generated)
        if runtime.is_main:
            write_lines(out, lines)
        session.log(1, {**_summary(cfg, generated.rollouts, generated.scores), **counts})
        session.note(
            f"wrote {len(lines)} lines of {len(generated.prompts)} responses to {out}{_describe_counts(counts)}"
        )
        if runtime.is_main:
            finish(cfg.run.dir, 1, NO_STEPS_LEFT)


@dataclass(frozen=True)
class Generated:
    """Responses with their rewards."""

    prompts: list[PromptSample]
    """Prompt of each response."""
    responses: list[str]
    """Texts; of a conversation the last turn."""
    rollouts: Rollouts
    scores: Mapping[str, RewardOutput]
    environment: Environment | None


def build_engine(
    cfg: GenerateConfig,
    runtime: Runtime,
    parts: RunFactories = RunFactories(),  # noqa: B008 -- frozen
) -> RolloutEngine:
    """Engine with the model's weights, certified to hold them."""
    order = actor_order(cfg.rollout, cfg.actor, runtime)
    actor = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=cfg.run.seed, order=order)
    engine = parts.engine(cfg.rollout, actor, cfg.data.max_prompt_tokens, MICRO_BATCH_SAMPLES)
    engine.update_weights(actor.shard, version=0)
    engine.verify_weights(actor.shard)
    return engine


def _respond(
    cfg: GenerateConfig, runtime: Runtime, engine: RolloutEngine, data: PromptData, phases: Phases
) -> Generated:
    """Draw and score responses. Raises: RewardError or WatchdogTimeout for a reward that fails; the responses are then
    kept without rewards."""
    prompts = repeat_prompts(data.train[: cfg.max_samples], cfg.rollout.num_samples_per_prompt)
    with contextlib.ExitStack() as stack:
        sources = [  # their errors are raised before anything is drawn
            (reward, stack.enter_context(contextlib.closing(make_source(reward, runtime.device))))
            for reward in all_rewards(cfg)
            if reward.kind != "environment"
        ]
        sampling = sampling_of(cfg.rollout, cfg.actor, data.tokenizer, greedy=cfg.greedy, data=cfg.data)
        environment = environment_of(cfg, data.tokenizer, sampling)
        if environment is not None:
            stack.enter_context(contextlib.closing(environment))
        with phases("rollout"):
            rows = [torch.tensor(prompt.tokens) for prompt in prompts]
            seeds = [sample_seed(cfg.run.seed, 0, n) for n in range(len(prompts))]
            requests = Requests.whole(rows, seeds, sampling.max_tokens)
            rollouts = draw_samples(engine, environment, prompts, requests, sampling)
        responses = response_texts(rollouts, data.tokenizer)
        batch = local_reward_batch(prompts, rollouts, data.tokenizer, environment)
        try:
            with phases("reward"):
                scores = {
                    reward.label: _scores(reward, source, batch, len(prompts), phases) for reward, source in sources
                }
                scores |= {
                    reward.label: environment_output(rollouts, torch.device("cpu"))
                    for reward in cfg.rewards
                    if reward.kind == "environment"
                }
                scores = {reward.label: without_failures(scores[reward.label], rollouts) for reward in all_rewards(cfg)}
        except (RewardError, WatchdogTimeout):
            if runtime.is_main:
                unscored = cfg.run.dir / "responses_without_rewards.jsonl"
                write_lines(unscored, lines_of(prompts, responses, rollouts, {}, environment))
                log.info("the responses are kept, without rewards, in %s", unscored)
            raise
    engine.close()
    return Generated(prompts, responses, rollouts, scores, environment)


def all_rewards(cfg: GenerateConfig | EvaluateConfig) -> list[RewardConfig]:
    """The rewards, and the rule that `eval.accuracy` names if it is not among them."""
    judge = find_accuracy(cfg.eval.accuracy, cfg.rewards).judge
    return [*cfg.rewards, *([judge] if judge is not None else [])]


def _scores(
    reward: RewardConfig, source: RewardSource, batch: RewardBatch, num_samples: int, phases: Phases
) -> RewardOutput:
    """Values of this rank's batch and of the others', `num_samples` together. Collective."""
    drop, pending = reward.on_failure == "drop", start_rewards(source, batch)
    results = gather_rewards(reward.label, pending, batch, num_samples, drop_failures=drop, local=phases.local)
    values = [math.nan if result.value is None else result.value for result in results]
    failed_N = torch.tensor([bool(result.error) for result in results])
    return RewardOutput(torch.tensor(values, dtype=torch.float64), failed_N)


def _summary(cfg: GenerateConfig, rollouts: Rollouts, scores: Mapping[str, RewardOutput]) -> dict[str, Metric]:
    """Mean of each reward over the responses to which it applies, and the numbers of the others and of failures."""
    summary: dict[str, Metric] = {}
    for name, output in scores.items():
        not_applicable, failed = output.count_missing()
        summary |= {f"eval_{name}": float(output.values_N.nanmean()), f"eval_{name}_none": not_applicable}
        if failed:
            summary[f"eval_{name}_failed"] = failed
    accuracy = find_accuracy(cfg.eval.accuracy, cfg.rewards)
    if accuracy.label is not None:
        summary |= accuracy_metrics(accuracy, scores[accuracy.label].values_N)
    return {
        **summary,
        "response_length_mean": float(rollouts.responses.lengths_N.float().mean()),
        "finished_fraction": float(rollouts.finished_N.float().mean()),
        **conversation_metrics(rollouts),
    }


def _chosen_lines(cfg: GenerateConfig, generated: Generated) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Lines to write, and how many were selected and left out.

    Raises: ValueError when nothing is selected; see `best_of.record_of`.
    """
    prompts, responses, rollouts = generated.prompts, generated.responses, generated.rollouts
    scores, environment = generated.scores, generated.environment
    if cfg.select == "all":
        values = {name: output.values_N for name, output in scores.items()}
        every = list(lines_of(prompts, responses, rollouts, values, environment))
        lines = [line for line in every if line.get("ended_by") != "failure"]
        if not lines:
            raise ValueError(f"the environment has failed in all {len(every)} conversations, and nothing is written")
        return lines, {"conversations_failed": len(every) - len(lines)} if environment is not None else {}
    values_KN = torch.stack([scores[reward.label].values_N for reward in cfg.rewards])
    failed_KN = torch.stack([scores[reward.label].failed_N for reward in cfg.rewards])
    total_N = weighted_total(values_KN, [reward.weight for reward in cfg.rewards], failed_KN)
    per_prompt = cfg.rollout.num_samples_per_prompt
    transcripts = None
    if environment is not None:
        transcripts = [environment.transcript(prompt, rollouts, n) for n, prompt in enumerate(prompts)]
    by_prompt, cut = candidates(responses, rollouts.finished_N, total_N, per_prompt, transcripts)
    chosen, left_out = choose(by_prompt, cfg.select, cfg.min_reward, cfg.pairs_per_prompt)
    lines = [dict(record_of(prompts[n * per_prompt], picked)) for n, records in enumerate(chosen) for picked in records]
    counts: dict[str, float] = {"prompts_selected": sum(map(bool, chosen)), **cut, **left_out}
    if not lines:
        raise ValueError(
            f"select = {cfg.select} chose nothing{_describe_counts(counts)}, and nothing is written; see rewards"
        )
    if cfg.select == "best_and_worst":
        counts["pairs_selected"] = len(lines)
    counts["selected_reward_mean"] = sum(picked[0].reward for records in chosen for picked in records) / len(lines)
    return lines, counts


def _describe_counts(counts: Mapping[str, float]) -> str:
    parts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if name != "selected_reward_mean"]
    return f" ({', '.join(parts)})" if parts else ""


def lines_of(
    prompts: Sequence[PromptSample],
    responses: Sequence[str],
    rollouts: Rollouts,
    values: Mapping[str, Tensor],
    environment: Environment | None = None,
) -> Iterable[dict[str, Any]]:
    """A JSON object per response. `values`: values of each reward, [N]; NaN, where it does not apply, becomes null. The
    columns for system message and tools of a conversation are left out, since the prompt's text has them. With an
    environment the object has the whole conversation, as `sft` reads it with `loss_on: all`."""
    for n, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        in_text: Sequence[str] = () if prompt.messages is None else BESIDE_A_CONVERSATION
        rewards = {name: float(values_N[n]) for name, values_N in values.items()}
        spoken: dict[str, Any] = {"prompt": prompt.text, "response": response}
        if environment is not None:
            spoken, in_text = conversation_columns(environment, prompt, rollouts, n), ("system",)
        yield {
            **{name: value for name, value in prompt.fields.items() if name not in in_text},
            **spoken,
            "finished": bool(rollouts.finished_N[n]),
            "rewards": {name: None if math.isnan(value) else value for name, value in rewards.items()},
        }


def conversation_columns(
    environment: Environment, prompt: PromptSample, rollouts: Rollouts, sample: int
) -> dict[str, Any]:
    """Columns about a conversation: its messages, or texts where prompts are texts, each turn's reward, and its
    end."""
    transcript, dialogue = environment.transcript(prompt, rollouts, sample), rollouts.dialogues[sample]
    texts = {"prompt": transcript.before, "response": transcript.turns[-1], "turns": transcript.turns}
    spoken = texts if transcript.whole is None else {"messages": transcript.whole}
    error = {"error": dialogue.error} if dialogue.error else {}
    return {**spoken, "turn_rewards": list(dialogue.rewards), "ended_by": dialogue.ended_by, **error}


def write_lines(out: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines: all of them, or no file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(out) as partial, partial.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
