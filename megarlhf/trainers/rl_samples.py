"""Rows of the tables of samples, from the table of experience.

Legend: N samples of the step or held-out prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.kl import kl_estimate
from megarlhf.config import RLConfig
from megarlhf.data.samples import PromptSample
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.experience import Experience, Ragged, Rollouts
from megarlhf.observe.samples import Row, spread
from megarlhf.trainers.rl_advantages import total_rewards

OF_REWARD = "reward/"


def rows_of(
    step: int,
    shown: Sequence[int],
    prompts: Sequence[PromptSample],
    rollouts: Rollouts,
    total_N: Tensor,
    said: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    kl_N: Tensor,
) -> list[Row]:
    """A row for each of the samples `shown`; `prompts` are one for each sample of the rollouts.

    said: what each reward said [N], by name, before shift, clip and weight; NaN: nothing
    kl_N: to the reference, the mean over each response's tokens
    """
    responses = rollouts.responses.rows()
    rows: list[Row] = []
    for n in shown:
        prompt = prompts[n]
        row: dict[str, Any] = {"step": step, "sample": n, "prompt": prompt.text}
        if prompt.fields.get("answer") is not None:
            row["answer"] = str(prompt.fields["answer"])
        row |= {
            "response": tokenizer.decode(responses[n].tolist(), continuation=True),
            "length": len(responses[n]),
            "finished": bool(rollouts.finished_N[n]),
            "reward": _or_none(total_N[n]),
            "rewards": {name: _or_none(values_N[n]) for name, values_N in said.items()},
            "kl": _or_none(kl_N[n]),
        }
        rows.append(row)
    return rows


def training_rows(
    cfg: RLConfig, step: int, experience: Experience, prompts: Sequence[PromptSample], tokenizer: Tokenizer
) -> list[Row]:
    """Of the samples that step `step` (from 1) was trained on. `prompts`: one for each sample. The KL is the mean over
    the response's tokens, by the estimator of the metric `kl`."""
    per_sample, columns = experience.per_sample, experience.columns
    kl_N = torch.full([experience.num_samples], math.nan)
    if (ref := columns.get("ref_logprobs")) is not None:
        kl = cfg.algo.kl
        kl_T = kl_estimate(columns["old_logprobs"].values_T, ref.values_T, kl.estimator, kl.clamp)
        kl_N = torch.stack([row.mean() for row in Ragged(kl_T, ref.lengths_N).rows()])
    total_N = total_rewards(experience)
    if "rewarded" in per_sample:
        total_N = total_N.masked_fill(~per_sample["rewarded"], math.nan)  # no reward applies
    said = {
        name.removeprefix(OF_REWARD): values_N for name, values_N in per_sample.items() if name.startswith(OF_REWARD)
    }
    shown = spread(cfg.samples.count, experience.num_samples)
    return rows_of(step, shown, prompts, experience.rollouts, total_N, said, tokenizer, kl_N)


def _or_none(value: Tensor) -> float | None:
    """JSON has no NaN and no infinity."""
    number = float(value)
    return number if math.isfinite(number) else None
