"""Rows of the tables of samples, from the table of experience.

Legend: N samples of the step or held-out prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from megarlhf.config import SamplesConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.experience import Experience
from megarlhf.observe.records.sample_tables import Row, spread
from megarlhf.rollout.environments.environment import Environment
from megarlhf.rollout.rewards.score import response_text
from megarlhf.rollouts import Rollouts
from megarlhf.trainers.experience.no_signal import rewards_by_name
from megarlhf.trainers.rl.advantages import total_rewards
from megarlhf.trainers.rl.build import RLRun
from megarlhf.trainers.run.observers import StepSamples


def rows_of(
    number: int,
    shown: Sequence[int],
    prompts: Sequence[PromptSample],
    rollouts: Rollouts,
    total_N: Tensor,
    rewards: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    kl_N: Tensor,
    environment: Environment | None = None,
) -> list[Row]:
    """A row of step `number` for each of the samples `shown`; `prompts` are one for each sample of the rollouts.

    rewards: values of each reward [N], by name, before shift, clip and weight; NaN where it does not apply
    kl_N: KL to the reference, the mean over each response's tokens
    """
    last_turns, lengths = rollouts.last_turns, rollouts.responses.lengths_N.tolist()
    rows: list[Row] = []
    for n in shown:
        prompt = prompts[n]
        row: dict[str, Any] = {"step": number, "sample": n, "prompt": prompt.text}
        if prompt.fields.get("answer") is not None:
            row["answer"] = str(prompt.fields["answer"])
        row |= {
            "response": response_text(last_turns[n].tolist(), tokenizer, finished=bool(rollouts.finished_N[n])),
            "length": lengths[n],
            "finished": bool(rollouts.finished_N[n]),
            "reward": _or_none(total_N[n]),
            "rewards": {name: _or_none(values_N[n]) for name, values_N in rewards.items()},
            "kl": _or_none(kl_N[n]),
        }
        if environment is not None:
            row |= conversation_row(prompt, rollouts, n, environment)
        rows.append(row)
    return rows


def conversation_row(prompt: PromptSample, rollouts: Rollouts, sample: int, environment: Environment) -> Row:
    """Columns about a conversation: its turns, each with what it read before and its reward, and how it ended. The
    response is the last turn."""
    transcript, dialogue = environment.transcript(prompt, rollouts, sample), rollouts.dialogues[sample]
    turns = [
        {"observed": observed, "text": text, "reward": reward}
        for observed, text, reward in zip_longest(dialogue.observations, transcript.turns, dialogue.rewards)
    ]
    error = {"error": dialogue.error} if dialogue.error else {}
    return {"response": transcript.turns[-1], "turns": turns, "ended_by": dialogue.ended_by, **error}


def training_rows(
    cfg: SamplesConfig,
    number: int,
    experience: Experience,
    prompts: Sequence[PromptSample],
    tokenizer: Tokenizer,
    kl_N: Tensor,
    environment: Environment | None = None,
) -> list[Row]:
    """Rows of the samples that step `number` was trained on; `prompts` are one for each sample, `kl_N` comes
    from `rl.metrics.kl_by_sample`."""
    total_N = total_rewards(experience)
    if (rewarded_N := experience.per_sample.get("rewarded")) is not None:
        total_N = total_N.masked_fill(~rewarded_N, math.nan)  # no reward applies
    rewards = rewards_by_name(experience)
    shown = spread(cfg.count, experience.num_samples)
    return rows_of(number, shown, prompts, experience.rollouts, total_N, rewards, tokenizer, kl_N, environment)


def step_samples(run: RLRun, experience: Experience) -> StepSamples:
    """Samples of a step, whole on every rank, for the user's own metrics and observers. Collective."""
    whole = experience.replicated()
    prompts = list(map(run.data.prompt_of, whole.per_sample["records"].tolist()))
    rollouts, tokenizer = whole.rollouts, run.data.tokenizer
    last_turns, sampled = rollouts.last_turns, rollouts.responses.rows()
    columns = {**whole.columns, "rollout_logprobs": rollouts.logprobs}
    groups_N = torch.arange(whole.num_samples) // run.cfg.rollout.num_samples_per_prompt
    per_sample = {**whole.per_sample, "rewards": total_rewards(whole), "groups": groups_N}
    return StepSamples(
        prompts=[prompt.text for prompt in prompts],
        fields=[prompt.fields for prompt in prompts],
        responses=[
            response_text(tokens.tolist(), tokenizer, finished=finished)
            for tokens, finished in zip(last_turns, rollouts.finished_N.tolist(), strict=True)
        ],
        response_tokens=[tokens.cpu() for tokens in sampled],
        per_sample={name: values_N.cpu() for name, values_N in per_sample.items()},
        per_token={name: [row.cpu() for row in column.rows()] for name, column in columns.items()},
    )


def _or_none(value: Tensor) -> float | None:
    """A number; None for NaN and infinity, which JSON does not have."""
    number = float(value)
    return number if math.isfinite(number) else None
