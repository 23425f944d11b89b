"""`megarlhf generate`: sample responses from a model and score them by rules."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarlhf.algo.reward_scaling import weighted_total
from megarlhf.atomic_write import atomic_path
from megarlhf.config import GenerateConfig, RewardConfig
from megarlhf.data.records.conversations import BESIDE_A_CONVERSATION
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.errors import RewardError, WatchdogTimeout
from megarlhf.experience import Rollouts
from megarlhf.models.role import build_role
from megarlhf.observe.records.metrics import Metric
from megarlhf.observe.watch.phases import Phases
from megarlhf.observe.watch.watchdog import watched_phases
from megarlhf.parallel.mesh import GroupCache
from megarlhf.resume.claim.on_existing import NO_STEPS_LEFT, finish
from megarlhf.rollout.engine import RolloutEngine, sample_seed
from megarlhf.rollout.factory import actor_order, make_engine, sampling_of
from megarlhf.rollout.rewards.accuracy import accuracy_metrics, find_accuracy
from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollout.rewards.score import RewardSource, gather_rewards, local_reward_batch, make_source, response_texts
from megarlhf.runtime import Runtime
from megarlhf.trainers.experience.prompts import PromptData, load_prompts
from megarlhf.trainers.generation.best_of import candidates, choose, record_of
from megarlhf.trainers.run.session import open_session

log = logging.getLogger(__name__)

MICRO_BATCH_SAMPLES = 16
"""Rows per forward of the `megatron` engine, which is an oracle and not meant to be fast."""


def run(cfg: GenerateConfig, runtime: Runtime) -> None:
    """Write a JSON line per response: prompt, response, finished, rewards by name, and the record's columns."""
    with contextlib.ExitStack() as stack:
        phases = stack.enter_context(watched_phases(cfg.watchdog, cfg.run.dir, runtime))
        with phases("build"):
            data = load_prompts(cfg.data, cfg.actor.model.tokenizer_place(), _scored_by(cfg), run_dir=cfg.run.dir)
            engine = engine_of(cfg, runtime)
        session = stack.enter_context(open_session(cfg, cfg.run, runtime, "generate", 1, data.notes, phases=phases))
        prompts, responses, rollouts, scores = _respond(cfg, runtime, engine, data, phases)
        out = cfg.out or cfg.run.dir / "responses.jsonl"
        lines, counts = _chosen_lines(cfg, prompts, responses, rollouts, scores)
        if runtime.is_main:
            write_lines(out, lines)
        session.log(1, {**_summary(cfg, rollouts, scores), **counts})
        session.note(f"wrote {len(lines)} lines of {len(prompts)} responses to {out}{_in_words(counts)}")
        if runtime.is_main:
            finish(cfg.run.dir, 1, NO_STEPS_LEFT)


def engine_of(cfg: GenerateConfig, runtime: Runtime) -> RolloutEngine:
    """The engine with the model's weights, certified."""
    order = actor_order(cfg.rollout, cfg.actor, runtime)
    actor = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=cfg.run.seed, order=order)
    engine = make_engine(cfg.rollout, actor, cfg.data.max_prompt_tokens, MICRO_BATCH_SAMPLES)
    engine.update_weights(actor.shard, version=0)
    engine.verify_weights(actor.shard)
    return engine


class _Scores(NamedTuple):
    """Values of a reward for each response."""

    values_N: Tensor
    """fp64, as the reward says it; NaN where it does not apply, or has failed."""
    failed_N: Tensor
    """bool."""


def _respond(
    cfg: GenerateConfig, runtime: Runtime, engine: RolloutEngine, data: PromptData, phases: Phases
) -> tuple[list[PromptSample], list[str], Rollouts, dict[str, _Scores]]:
    """Raises: RewardError or WatchdogTimeout for a reward that fails; the responses are kept without rewards then."""
    prompts = [p for p in data.train[: cfg.max_samples] for _ in range(cfg.rollout.num_samples_per_prompt)]
    with contextlib.ExitStack() as stack:
        sources = [  # what is wrong with one is said before anything is drawn
            (reward, stack.enter_context(contextlib.closing(make_source(reward, runtime.device))))
            for reward in _scored_by(cfg)
        ]
        with phases("rollout"):
            rollouts = engine.generate(
                [torch.tensor(prompt.tokens) for prompt in prompts],
                [sample_seed(cfg.run.seed, 0, n) for n in range(len(prompts))],
                sampling_of(cfg.rollout, cfg.actor, data.tokenizer, greedy=cfg.greedy, data=cfg.data),
            )
        responses = response_texts(rollouts, data.tokenizer)
        batch = local_reward_batch(prompts, rollouts, data.tokenizer)
        try:
            with phases("reward"):
                scores = {reward.label: _scores(reward, source, batch, phases) for reward, source in sources}
        except (RewardError, WatchdogTimeout):
            if runtime.is_main:
                unscored = cfg.run.dir / "responses_without_rewards.jsonl"
                write_lines(unscored, lines_of(prompts, responses, rollouts, {}))
                log.info("the responses are kept, without rewards, in %s", unscored)
            raise
    engine.close()
    return prompts, responses, rollouts, scores


def _scored_by(cfg: GenerateConfig) -> list[RewardConfig]:
    """The rewards, and the rule that `eval.accuracy` names where it is none of them."""
    judge = find_accuracy(cfg.eval.accuracy, cfg.rewards).judge
    return [*cfg.rewards, *([judge] if judge is not None else [])]


def _scores(reward: RewardConfig, source: RewardSource, batch: RewardBatch, phases: Phases) -> _Scores:
    """Values of this rank's batch and of the others'. Collective."""
    outcomes = gather_rewards(
        reward.label,
        source.start(batch),
        batch,
        drop_failures=reward.on_failure == "drop",
        local=phases.local,
    )
    values = [math.nan if each.value is None else each.value for each in outcomes]
    return _Scores(torch.tensor(values, dtype=torch.float64), torch.tensor([bool(each.error) for each in outcomes]))


def _summary(cfg: GenerateConfig, rollouts: Rollouts, scores: Mapping[str, _Scores]) -> dict[str, Metric]:
    """Means over the responses to which a reward applies, to how many it does not, and for how many it failed."""
    summary: dict[str, Metric] = {}
    for name, (values_N, failed_N) in scores.items():
        missing, failed = int(values_N.isnan().sum()), int(failed_N.sum())
        summary |= {f"eval_{name}": float(values_N.nanmean()), f"eval_{name}_none": missing - failed}
        if failed:
            summary[f"eval_{name}_failed"] = failed
    accuracy = find_accuracy(cfg.eval.accuracy, cfg.rewards)
    if accuracy.label is not None:
        summary |= accuracy_metrics(accuracy, scores[accuracy.label].values_N)
    return {
        **summary,
        "response_length_mean": float(rollouts.responses.lengths_N.float().mean()),
        "finished_fraction": float(rollouts.finished_N.float().mean()),
    }


def _chosen_lines(
    cfg: GenerateConfig,
    prompts: list[PromptSample],
    responses: list[str],
    rollouts: Rollouts,
    scores: Mapping[str, _Scores],
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Lines to write, and how many were selected and left out.

    Raises: ValueError when nothing is selected; see `best_of.record_of`.
    """
    if cfg.select == "all":
        values = {name: each.values_N for name, each in scores.items()}
        return list(lines_of(prompts, responses, rollouts, values)), {}
    values_KN = torch.stack([scores[reward.label].values_N for reward in cfg.rewards])
    failed_KN = torch.stack([scores[reward.label].failed_N for reward in cfg.rewards])
    total_N = weighted_total(values_KN, [reward.weight for reward in cfg.rewards], failed_KN)
    per_prompt = cfg.rollout.num_samples_per_prompt
    by_prompt, cut = candidates(responses, rollouts.finished_N, total_N, per_prompt)
    chosen, left_out = choose(by_prompt, cfg.select, cfg.min_reward, cfg.pairs_per_prompt)
    lines = [dict(record_of(prompts[n * per_prompt], picked)) for n, of in enumerate(chosen) for picked in of]
    counts: dict[str, float] = {"prompts_selected": sum(map(bool, chosen)), **cut, **left_out}
    if not lines:
        raise ValueError(f"select = {cfg.select} chose nothing{_in_words(counts)}, and nothing is written; see rewards")
    if cfg.select == "best_and_worst":
        counts["pairs_selected"] = len(lines)
    counts["selected_reward_mean"] = sum(picked[0].reward for of in chosen for picked in of) / len(lines)
    return lines, counts


def _in_words(counts: Mapping[str, float]) -> str:
    words = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if name != "selected_reward_mean"]
    return f" ({', '.join(words)})" if words else ""


def lines_of(
    prompts: Sequence[PromptSample], responses: Sequence[str], rollouts: Rollouts, values: Mapping[str, Tensor]
) -> Iterable[dict[str, Any]]:
    """`values`: what each reward says of each response, [N]; NaN where it says nothing. The text of a prompt that was a
    conversation has its system message and its tools: their columns are left out."""
    for n, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        written = () if prompt.messages is None else BESIDE_A_CONVERSATION
        yield {
            **{name: value for name, value in prompt.fields.items() if name not in written},
            "prompt": prompt.text,
            "response": response,
            "finished": bool(rollouts.finished_N[n]),
            "rewards": {name: none_for_nan(float(values_N[n])) for name, values_N in values.items()},
        }


def none_for_nan(value: float) -> float | None:
    """JSON has no NaN; here it stands for a reward that does not apply."""
    return None if math.isnan(value) else value


def write_lines(out: Path, lines: Iterable[dict[str, Any]]) -> None:
    """All lines or no file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(out) as partial, partial.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
