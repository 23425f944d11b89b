"""Values of each reward for the samples of a step, as columns, and their weighted sum.

Legend: N samples of the step, K rewards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megarlhf.algo.reward_scaling import weighted_total
from megarlhf.config import RewardConfig
from megarlhf.rollout.rewards.batch import RewardResult
from megarlhf.rollouts import Rollouts

log = logging.getLogger(__name__)

NAN = float("nan")


@dataclass(frozen=True)
class RewardOutput:
    """Values of one reward for the samples of a step."""

    values_N: Tensor
    """fp64, so that sums that are equal on paper are equal. NaN where the reward does not apply or failed."""
    failed_N: Tensor
    """bool."""
    late: bool = False
    """Whether some samples failed because no answer came in time."""
    cut_N: Tensor | None = None
    """bool: the text was too long and was cut. None: the reward never cuts."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """Named components, [N] each. NaN where a sample has none of that name."""
    token_values: Mapping[int, Sequence[float] | Tensor] = field(default_factory=dict)
    """Rewards of the last tokens, by sample. Their sum is the sample's value."""

    @staticmethod
    def joined(parts: Sequence[tuple[RewardOutput, Sequence[int]]]) -> RewardOutput:
        """Values of chosen samples, one part after the other."""
        names = sorted({name for output, _ in parts for name in output.components})
        samples = [(output, n) for output, chosen in parts for n in chosen]
        cut = [output.cut_N[list(chosen)] for output, chosen in parts if output.cut_N is not None]
        return RewardOutput(
            values_N=torch.cat([output.values_N[list(chosen)] for output, chosen in parts]),
            failed_N=torch.cat([output.failed_N[list(chosen)] for output, chosen in parts]),
            components={
                name: torch.cat([output.component(name)[list(chosen)] for output, chosen in parts]) for name in names
            },
            token_values={
                row: output.token_values[n] for row, (output, n) in enumerate(samples) if n in output.token_values
            },
            late=any(output.late for output, _ in parts),
            cut_N=torch.cat(cut) if cut else None,
        )

    def component(self, name: str) -> Tensor:
        """Values of a component; NaN without one of that name."""
        return self.components.get(name, torch.full_like(self.values_N, NAN))

    def count_missing(self) -> tuple[int, int]:
        """Number of samples to which the reward does not apply, and of those for which it failed."""
        missing, failed = int(self.values_N.isnan().sum()), int(self.failed_N.sum())
        return missing - failed, failed


def environment_output(rollouts: Rollouts, device: torch.device) -> RewardOutput:
    """Rewards of the turns, each at its turn's last token. A conversation without any has none."""
    assert rollouts.stretches is not None, "no environment has answered"
    totals: list[float] = []
    token_values: dict[int, Tensor] = {}
    for n, (counts, dialogue) in enumerate(zip(rollouts.stretches.sampled.rows(), rollouts.dialogues, strict=True)):
        given = [(turn, reward) for turn, reward in enumerate(dialogue.rewards) if reward is not None]
        totals.append(math.fsum(reward for _, reward in given) if given else NAN)
        if given:
            last_T = counts.cumsum(0) - 1
            token_values[n] = torch.zeros(int(counts.sum()), dtype=torch.float64)
            for turn, reward in given:
                token_values[n][last_T[turn]] = reward
    values_N = torch.tensor(totals, dtype=torch.float64, device=device)
    failed_N = torch.zeros(len(totals), dtype=torch.bool, device=device)
    return RewardOutput(values_N, failed_N, token_values=token_values)


def without_failures(output: RewardOutput, rollouts: Rollouts) -> RewardOutput:
    """The values with those of conversations whose environment has failed as failures."""
    if not any(failures := [dialogue.ended_by == "failure" for dialogue in rollouts.dialogues]):
        return output
    failed_N = torch.tensor(failures, device=output.values_N.device)
    return replace(output, values_N=output.values_N.masked_fill(failed_N, NAN), failed_N=output.failed_N | failed_N)


def reward_output(results: Sequence[RewardResult], device: torch.device) -> RewardOutput:
    """Results of all samples as columns. Failures are logged once, with their number."""
    failures = [result.error for result in results if result.error]
    if failures:
        log.info("%d of %d samples are dropped: %s", len(failures), len(results), failures[0])
    names = sorted({name for result in results for name in result.components or ()})

    def column(values: Sequence[float | None]) -> Tensor:
        return torch.tensor([NAN if value is None else value for value in values], dtype=torch.float64, device=device)

    return RewardOutput(
        values_N=column([result.value for result in results]),
        failed_N=torch.tensor([bool(result.error) for result in results], device=device),
        late=any(result.late for result in results),
        components={name: column([(result.components or {}).get(name) for result in results]) for name in names},
        token_values={n: result.token_values for n, result in enumerate(results) if result.token_values is not None},
    )


def totals_of(rewards: Sequence[RewardConfig], outputs: Sequence[RewardOutput]) -> Tensor:
    """Weighted sum of the values, less `shift` and clipped, not normalised: [N], fp32 after the sum. NaN where no
    reward applies or one has failed."""
    values_KN = torch.stack([bounded(reward, output.values_N) for reward, output in zip(rewards, outputs, strict=True)])
    failed_KN = torch.stack([output.failed_N for output in outputs])
    return weighted_total(values_KN, [reward.weight for reward in rewards], failed_KN).float()


def bounded(reward: RewardConfig, values_N: Tensor) -> Tensor:
    """Values less `shift`, then clipped to [-clip, clip]."""
    values_N = values_N - reward.shift
    return values_N if reward.clip is None else values_N.clamp(-reward.clip, reward.clip)


def metrics_of(label: str, output: RewardOutput) -> dict[str, float]:
    """`reward/NAME_mean` and `_std` over the samples to which the reward applies, and the mean of each component."""
    values_N = output.values_N[~output.values_N.isnan()]
    metrics: dict[str, float] = {}
    if output.cut_N is not None and (truncated := int(output.cut_N.sum())):
        metrics[f"reward/{label}_truncated"] = truncated
    if len(values_N):
        metrics |= {
            f"reward/{label}_mean": float(values_N.mean()),
            f"reward/{label}_std": float(values_N.std(correction=0)),
        }
    return metrics | {f"reward/{label}/{name}": float(x_N.nanmean()) for name, x_N in output.components.items()}
