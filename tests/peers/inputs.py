"""Ragged inputs on which our functions and those of other projects are compared.

Legend: N responses in groups of three, T columns of the padded grid, R response tokens end to end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

N, T, GROUP = 12, 7, 3


@dataclass(frozen=True)
class Inputs:
    """fp64; what stands on padding is 0, but for `values`, where it is 5: it must not count."""

    lengths_N: Tensor
    groups_N: Tensor
    """Of three."""
    other_groups_N: Tensor
    """Of five, four, two and one."""
    rewards_N: Tensor
    """Those of the second group are equal, in either division into groups."""
    greedy_N: Tensor
    """A reward for each response to compare with."""
    logprobs_NT: Tensor
    old_logprobs_NT: Tensor
    ref_logprobs_NT: Tensor
    rollout_logprobs_NT: Tensor
    values_NT: Tensor
    old_values_NT: Tensor
    returns_NT: Tensor
    advantages_NT: Tensor
    advantages_N: Tensor

    @property
    def mask_NT(self) -> Tensor:
        """fp64: 1 on response tokens."""
        return (torch.arange(T)[None, :] < self.lengths_N[:, None]).double()

    @property
    def eighths_N(self) -> Tensor:
        """The rewards in eighths: means of equal ones are exact in fp32, and give no rounding to be divided by eps."""
        return (self.rewards_N * 8).round() / 8

    def tokens(self, grid_NT: Tensor) -> Tensor:
        """[N, T] -> [R]. Gradients flow."""
        return grid_NT[self.mask_NT.bool()]

    def rewards_at_the_end(self) -> Tensor:
        """[N, T]: the reward at each response's last token."""
        return torch.zeros(N, T, dtype=torch.float64).scatter(1, self.lengths_N[:, None] - 1, self.rewards_N[:, None])

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Inputs:
        tensors = {name: torch.tensor(value) for name, value in tree.items()}
        return cls(**{name: x if x.dtype == torch.int64 else torch.tensor(tree[name], dtype=torch.float64)
                      for name, x in tensors.items()})  # fmt: skip


def draw(seed: int) -> Inputs:
    """Lengths from 1 to T; log-probs of which some have moved far."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, dtype=torch.float64, generator=generator)).round(decimals=4)

    lengths_N = torch.randint(1, T + 1, (N,), generator=generator)
    mask_NT = torch.arange(T)[None, :] < lengths_N[:, None]
    old_NT = (-normal(N, T).abs() - 0.05) * mask_NT
    moved_NT = normal(N, T, scale=0.3) + 2.0 * (torch.rand(N, T, generator=generator) < 0.1)
    rewards_N = normal(N)
    rewards_N[3:9] = rewards_N[3]
    return Inputs(
        lengths_N=lengths_N,
        groups_N=torch.arange(N) // GROUP,
        other_groups_N=torch.tensor([0] * 5 + [1] * 4 + [2] * 2 + [3]),
        rewards_N=rewards_N,
        greedy_N=normal(N),
        logprobs_NT=(old_NT + moved_NT) * mask_NT,
        old_logprobs_NT=old_NT,
        ref_logprobs_NT=(old_NT + normal(N, T, scale=0.5)) * mask_NT,
        rollout_logprobs_NT=(old_NT + normal(N, T, scale=0.4)) * mask_NT,
        values_NT=torch.where(mask_NT, normal(N, T), 5.0),
        old_values_NT=normal(N, T) * mask_NT,
        returns_NT=normal(N, T) * mask_NT,
        advantages_NT=normal(N, T) * mask_NT,
        advantages_N=normal(N),
    )
