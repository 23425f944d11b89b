"""Rows of the tables of samples, from the table of experience.

Legend: N samples of the step or held-out prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megarlhf.config import SamplesConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.experience import Experience, Rollouts
from megarlhf.observe.records.sample_tables import Row, spread
from megarlhf.rollout.rewards.score import response_text
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
) -> list[Row]:
    """A row of step `number` for each of the samples `shown`; `prompts` are one for each sample of the rollouts.

    rewards: values of each reward [N], by name, before shift, clip and weight; NaN where it does not apply
    kl_N: KL to the reference, the mean over each response's tokens
    """
    responses = rollouts.single_responses().rows()
    rows: list[Row] = []
    for n in shown:
        prompt = prompts[n]
        row: dict[str, Any] = {"step": number, "sample": n, "prompt": prompt.text}
        if prompt.fields.get("answer") is not None:
            row["answer"] = str(prompt.fields["answer"])
        row |= {
            "response": response_text(responses[n].tolist(), tokenizer, finished=bool(rollouts.finished_N[n])),
            "length": len(responses[n]),
            "finished": bool(rollouts.finished_N[n]),
            "reward": _or_none(total_N[n]),
            "rewards": {name: _or_none(values_N[n]) for name, values_N in rewards.items()},
            "kl": _or_none(kl_N[n]),
        }
        rows.append(row)
    return rows


def training_rows(
    cfg: SamplesConfig,
    number: int,
    experience: Experience,
    prompts: Sequence[PromptSample],
    tokenizer: Tokenizer,
    kl_N: Tensor,
) -> list[Row]:
    """Rows of the samples that step `number` was trained on; `prompts` are one for each sample, `kl_N` comes
    from `rl.metrics.kl_by_sample`."""
    total_N = total_rewards(experience)
    if (rewarded_N := experience.per_sample.get("rewarded")) is not None:
        total_N = total_N.masked_fill(~rewarded_N, math.nan)  # no reward applies
    rewards = rewards_by_name(experience)
    shown = spread(cfg.count, experience.num_samples)
    return rows_of(number, shown, prompts, experience.rollouts, total_N, rewards, tokenizer, kl_N)


def step_samples(run: RLRun, experience: Experience) -> StepSamples:
    """Samples of a step, whole on every rank, for the user's own metrics and observers. Collective."""
    whole = experience.replicated()
    prompts = list(map(run.data.prompt_of, whole.per_sample["records"].tolist()))
    rollouts, tokenizer = whole.rollouts, run.data.tokenizer
    responses = rollouts.single_responses().rows()
    columns = {**whole.columns, "rollout_logprobs": rollouts.logprobs}
    per_sample = {**whole.per_sample, "rewards": total_rewards(whole), "groups": whole.prompt_numbers_N}
    return StepSamples(
        prompts=[prompt.text for prompt in prompts],
        fields=[prompt.fields for prompt in prompts],
        responses=[
            response_text(tokens.tolist(), tokenizer, finished=finished)
            for tokens, finished in zip(responses, rollouts.finished_N.tolist(), strict=True)
        ],
        response_tokens=[tokens.cpu() for tokens in responses],
        per_sample={name: values_N.cpu() for name, values_N in per_sample.items()},
        per_token={name: [row.cpu() for row in column.rows()] for name, column in columns.items()},
    )


def _or_none(value: Tensor) -> float | None:
    """A number; None for NaN and infinity, which JSON does not have."""
    number = float(value)
    return number if math.isfinite(number) else None
