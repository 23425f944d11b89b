"""The table of a step: prompts, rollouts, and the columns computed from them.

A sample is a sequence: the prompt, then stretches of tokens that the model sampled and stretches that it did not, such
as the messages of an environment (`rollouts.py`). A sample has the same global index, its row, everywhere: sample n
answers prompt n // num_samples_per_prompt. The engine's responses and the small index (lengths, groups, rewards, weight
versions) are on every rank. Token columns are ragged, with one value for each sampled token and for nothing else.
`redistribute` moves a role's outputs to the ranks that read them (`ColumnSharding`), where each row is either whole or
empty. Statistics of the whole batch come from one number per sample (`Experience.gather_per_sample`).

Legend: N samples of the step, T tokens of the samples end to end, W ranks of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.columns import ColumnSharding, Ragged, redistribute, replicate
from megarlhf.rollouts import Rollouts


@dataclass(frozen=True)
class Experience:
    """Samples of a step with the columns computed so far."""

    prompts: tuple[Tensor, ...]
    """N prompts (repeated for the samples of one prompt), int64."""
    groups_N: Tensor
    """int64: samples of one prompt share a number."""
    rollouts: Rollouts
    columns: Mapping[str, Ragged] = field(default_factory=dict)
    """Columns with a value per sampled token: old_logprobs, ref_logprobs, values, advantages, returns, ..."""
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns with a value per sample, [N]: rewards, ..."""
    holding: ColumnSharding | None = None
    """Placement of the rows of `columns` on ranks; None: every rank has all."""
    given_prompt_numbers_N: Tensor | None = None
    """`prompt_numbers_N`, if samples have left their group."""

    @property
    def num_samples(self) -> int:
        return len(self.prompts)

    @property
    def prompt_numbers_N(self) -> Tensor:
        """int64, on the CPU: samples of one prompt share a number, including samples that have left their group."""
        return self.groups_N if self.given_prompt_numbers_N is None else self.given_prompt_numbers_N

    @property
    def response_lengths_N(self) -> Tensor:
        """Number of sampled tokens of each sample, int64 on the CPU: the lengths of the columns' rows."""
        return self.rollouts.responses.lengths_N

    @property
    def trained_lengths_N(self) -> Tensor:
        """Number of tokens of each sample that count in the losses, int64 on the CPU: all sampled ones, or none."""
        trained_N = self.per_sample.get("trained")
        return self.response_lengths_N if trained_N is None else self.response_lengths_N * trained_N.cpu().long()

    @cached_property
    def prompt_lengths_N(self) -> Tensor:
        """int64, on the CPU."""
        return torch.tensor([len(prompt) for prompt in self.prompts], dtype=torch.int64)

    @cached_property
    def sequences(self) -> Ragged:
        """All tokens of each sample, prompt and what follows it: int64, on the device of the responses."""
        written = self.rollouts.written
        rows = zip(self.prompts, written.rows(), strict=True)
        tokens_T = torch.cat([part for prompt, row in rows for part in (prompt.to(row), row)])
        return Ragged(tokens_T, self.prompt_lengths_N + written.lengths_N)

    @cached_property
    def sampled_stretches(self) -> tuple[Tensor, Ragged]:
        """Positions of the sampled tokens in `sequences`: (position of each stretch's first token, tokens of each
        stretch by sample), int64 on the CPU. All stretches of a sample together are a row of a column.

        Example: a prompt of 4 tokens and stretches of 2, 3 and 1, of which the second was not sampled: [4, 9], [2, 1].
        """
        stretches = self.rollouts.stretches
        if stretches is None:
            return self.prompt_lengths_N, Ragged(self.response_lengths_N, torch.ones_like(self.response_lengths_N))
        rows = stretches.lengths.rows()
        starts = [start + row.cumsum(0) - row for start, row in zip(self.prompt_lengths_N, rows, strict=True)]
        return torch.cat([row[::2] for row in starts]), stretches.sampled

    @cached_property
    def rollout_logprobs(self) -> Ragged:
        """The engine's log-probs, for samples whose columns are on this rank."""
        return self.held(self.rollouts.logprobs)

    def held(self, column: Ragged) -> Ragged:
        """Keep the rows of a whole column whose samples are on this rank."""
        return column if self.holding is None else column.only(self.holding.local_N)

    def gather_per_sample(self, values_N: Tensor) -> Tensor:
        """Gather one value, or K values, per sample onto every rank, [N] or [N, K]. Collective.

        The first rank that has a sample's columns provides its value; values of other ranks are ignored. The result is
        bit-equal wherever the columns are.
        """
        if self.holding is None:
            return values_N
        is_sender_N = self.holding.is_sender_N.to(values_N.device)
        gathered_N = torch.where(is_sender_N.view(-1, *[1] * (values_N.ndim - 1)), values_N, 0)
        dist.all_reduce(gathered_N)
        return gathered_N

    def largest(self, value: Tensor) -> Tensor:
        """Largest of the values of all ranks. Collective."""
        if self.holding is not None:
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value

    def largest_values(self, values_T: Tensor, count: int) -> Tensor:
        """The `count` largest values of a column over all samples, in falling order; NaN is the largest. Collective."""
        if (holding := self.holding) is None:
            return values_T.topk(min(count, len(values_T))).values
        lengths_N = self.response_lengths_N
        sent_T = Ragged(values_T, lengths_N * holding.local_N).only(holding.is_sender_N).values_T
        tokens_W = torch.zeros(len(holding.resident_WN), dtype=torch.int64)
        tokens_W.index_add_(0, holding.senders_N, lengths_N)
        counts = tokens_W.clamp(max=count).tolist()
        largest = replicate(sent_T.topk(counts[dist.get_rank()]).values, counts)
        return largest.topk(min(count, len(largest))).values

    def replicated(self) -> Experience:
        """Experience with every column whole on every rank. Collective."""
        if (holding := self.holding) is None:
            return self
        owners = [(holding.senders_N == rank).nonzero().flatten().tolist() for rank in range(len(holding.resident_WN))]

        def whole(column: Ragged) -> Ragged:
            rows, own = column.rows(), owners[dist.get_rank()]
            return redistribute({n: rows[n] for n in own}, self.response_lengths_N, column.values_T[:0], owners)

        return replace(self, columns={name: whole(column) for name, column in self.columns.items()}, holding=None)

    def with_columns(self, columns: Mapping[str, Ragged]) -> Experience:
        return replace(self, columns={**self.columns, **columns})

    def with_per_sample(self, columns: Mapping[str, Tensor]) -> Experience:
        return replace(self, per_sample={**self.per_sample, **columns})

    def state_dict(self) -> dict[str, Any]:
        """State as tensors, numbers, lists and mappings. The columns must be whole."""
        assert self.holding is None, "columns are spread over ranks: replicate them first"
        return {
            "prompts": list(self.prompts),
            "groups": self.groups_N,
            "prompt_numbers": self.prompt_numbers_N,
            **self.rollouts.state_dict(),
            "columns": {name: column.values_T for name, column in self.columns.items()},
            "per_sample": dict(self.per_sample),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Experience:
        """Experience from a `state_dict`, also from one of earlier versions."""
        rollouts = Rollouts.from_state_dict(state)
        lengths_N = rollouts.responses.lengths_N
        return cls(
            prompts=tuple(prompt.cpu() for prompt in state["prompts"]),
            groups_N=state["groups"].cpu(),
            given_prompt_numbers_N=state.get("prompt_numbers", state["groups"]).cpu(),
            rollouts=rollouts,
            columns={name: Ragged(values_T, lengths_N) for name, values_T in state["columns"].items()},
            per_sample=state["per_sample"],
        )
