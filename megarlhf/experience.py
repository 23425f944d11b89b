"""What a step produces: prompts, rollouts, and the table of columns that grows from them.

A sample's global index is its row everywhere: sample n answers prompt n // num_samples_per_prompt. The small
index (lengths, groups, rewards, weight version) is on every rank. Token columns are ragged, one value per
response token, and move between ranks through `redistribute`.

Legend: N samples of the step, T tokens of all samples end to end, B rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.collective_errors import raise_on_all_ranks


@dataclass(frozen=True)
class Ragged:
    """Rows of different length, end to end."""

    values_T: Tensor
    lengths_N: Tensor
    """int64, on the CPU."""

    @staticmethod
    def from_rows(rows: Sequence[Tensor], dtype: torch.dtype) -> Ragged:
        values = torch.cat([row.to(dtype) for row in rows]) if rows else torch.empty(0, dtype=dtype)
        return Ragged(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))

    @staticmethod
    def joined(parts: Sequence[tuple[Ragged, Sequence[int]]]) -> Ragged:
        """Chosen rows of each, one after the other."""
        rows = [rows[n] for column, chosen in parts for rows in (column.rows(),) for n in chosen]
        return Ragged(torch.cat(rows), torch.cat([column.lengths_N[list(chosen)] for column, chosen in parts]))

    @property
    def num_tokens(self) -> int:
        return self.values_T.numel()

    def rows(self) -> list[Tensor]:
        """Views of the rows."""
        return list(self.values_T.split(self.lengths_N.tolist()))

    @property
    def cu_seqlens(self) -> Tensor:
        """[N + 1] int64, on the CPU: row n is values_T[cu_seqlens[n] : cu_seqlens[n + 1]]."""
        return torch.cat([self.lengths_N.new_zeros(1), self.lengths_N.cumsum(0)])

    def repeat_per_token(self, values_N: Tensor) -> Ragged:
        """Rows as long as these, each with one number at all its tokens."""
        lengths_N = self.lengths_N.to(values_N.device)
        return Ragged(values_N.repeat_interleave(lengths_N, output_size=self.num_tokens), self.lengths_N)


@dataclass(frozen=True)
class Rollouts:
    """What an engine returns, the same on every rank."""

    responses: Ragged
    """int64 tokens, end-of-sequence included where there is one."""
    logprobs: Ragged
    """The engine's, of the distribution that was sampled from."""
    finished_N: Tensor
    """bool: ended by end-of-sequence, not by the token limit."""
    weight_version: int
    """Of the weights that drew the samples."""
    idle_seconds: float = 0.0
    """That an engine waited for the slowest one, the mean over engines; of one drawing, not of joined ones."""

    @staticmethod
    def joined(parts: Sequence[tuple[Rollouts, Sequence[int]]]) -> Rollouts:
        """Chosen samples of each, all drawn with the same weights."""
        versions = {rollouts.weight_version for rollouts, _ in parts}
        assert len(versions) == 1, f"samples of the weights of versions {sorted(versions)} in one step"
        return Rollouts(
            responses=Ragged.joined([(rollouts.responses, chosen) for rollouts, chosen in parts]),
            logprobs=Ragged.joined([(rollouts.logprobs, chosen) for rollouts, chosen in parts]),
            finished_N=torch.cat([rollouts.finished_N[list(chosen)] for rollouts, chosen in parts]),
            weight_version=versions.pop(),
        )


@dataclass(frozen=True)
class Experience:
    """One step's samples with every column found so far."""

    prompts: tuple[Tensor, ...]
    """N prompts (repeated for the samples of one prompt), int64."""
    groups_N: Tensor
    """int64: samples of one prompt share a number."""
    rollouts: Rollouts
    columns: Mapping[str, Ragged] = field(default_factory=dict)
    """Per response token: old_logprobs, ref_logprobs, values, advantages, returns, ..."""
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)
    """Per sample [N]: rewards, ..."""

    @property
    def num_samples(self) -> int:
        return len(self.prompts)

    @property
    def response_lengths_N(self) -> Tensor:
        return self.rollouts.responses.lengths_N

    @property
    def trained_lengths_N(self) -> Tensor:
        """Response tokens of each sample that count in the losses, int64 on the CPU: all of them, or none."""
        trained_N = self.per_sample.get("trained")
        return self.response_lengths_N if trained_N is None else self.response_lengths_N * trained_N.cpu().long()

    @cached_property
    def prompt_lengths_N(self) -> Tensor:
        """int64, on the CPU."""
        return torch.tensor([len(prompt) for prompt in self.prompts], dtype=torch.int64)

    @cached_property
    def sequences(self) -> Ragged:
        """Prompt and response of each sample, int64 tokens where the responses are."""
        responses = self.rollouts.responses
        rows = zip(self.prompts, responses.rows(), strict=True)
        tokens_T = torch.cat([part for prompt, response in rows for part in (prompt.to(response), response)])
        return Ragged(tokens_T, self.prompt_lengths_N + responses.lengths_N)

    def with_columns(self, columns: Mapping[str, Ragged]) -> Experience:
        return replace(self, columns={**self.columns, **columns})

    def with_per_sample(self, columns: Mapping[str, Tensor]) -> Experience:
        return replace(self, per_sample={**self.per_sample, **columns})

    def state_dict(self) -> dict[str, Any]:
        """All of it as tensors, numbers, lists and mappings."""
        rollouts = self.rollouts
        return {
            "prompts": list(self.prompts),
            "groups": self.groups_N,
            "lengths": rollouts.responses.lengths_N,
            "responses": rollouts.responses.values_T,
            "logprobs": rollouts.logprobs.values_T,
            "finished": rollouts.finished_N,
            "weight_version": rollouts.weight_version,
            "columns": {name: column.values_T for name, column in self.columns.items()},
            "per_sample": dict(self.per_sample),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Experience:
        """From what `state_dict` returned."""
        lengths_N = state["lengths"].cpu()
        rollouts = Rollouts(
            responses=Ragged(state["responses"], lengths_N),
            logprobs=Ragged(state["logprobs"], lengths_N),
            finished_N=state["finished"].cpu(),
            weight_version=state["weight_version"],
        )
        return cls(
            prompts=tuple(prompt.cpu() for prompt in state["prompts"]),
            groups_N=state["groups"].cpu(),
            rollouts=rollouts,
            columns={name: Ragged(values_T, lengths_N) for name, values_T in state["columns"].items()},
            per_sample=state["per_sample"],
        )


def redistribute(
    mine: Mapping[int, Tensor], lengths_N: Tensor, like: Tensor, owners: Sequence[Sequence[int]]
) -> Ragged:
    """Bring rows that live on different ranks to every rank.

    `owners[r]` are the samples whose rows rank r hands in, by global sample index; together they are all N rows, once
    each. Owners and `lengths_N` are known everywhere, so one all-gather of padded values moves the column. Full
    replication is the simplest carrier: every mesh finds what it needs locally.

    Raises: ValueError, on every rank, when `owners` are not all rows once each, or when a rank does not hand in just
    what it owns, each row as long as the index says.
    """
    assert len(owners) == dist.get_world_size(), f"owners of {len(owners)} ranks, the run has {dist.get_world_size()}"
    _check_owners(owners, len(lengths_N))
    own = list(owners[dist.get_rank()])
    # A rank that raised alone would leave the others waiting.
    with raise_on_all_ranks(lambda reasons: ValueError("; ".join(reasons))) as problems:
        problems += _wrong_rows(mine, own, lengths_N)
    counts = [int(lengths_N[list(samples)].sum()) for samples in owners]
    send = torch.zeros(max(counts), dtype=like.dtype, device=like.device)
    if own:
        send[: counts[dist.get_rank()]] = torch.cat([mine[n].to(like) for n in own])
    received = [torch.empty_like(send) for _ in owners]
    dist.all_gather(received, send)
    rows: dict[int, Tensor] = {}
    for samples, values, count in zip(owners, received, counts, strict=True):
        rows.update(zip(samples, values[:count].split(lengths_N[list(samples)].tolist()), strict=True))
    return Ragged(torch.cat([rows[n] for n in range(len(lengths_N))]), lengths_N)


def _check_owners(owners: Sequence[Sequence[int]], num_samples: int) -> None:
    count = Counter(n for samples in owners for n in samples)
    expected = range(num_samples)
    faults = {
        "missing": [n for n in expected if n not in count],
        "owned twice": sorted(n for n in count if count[n] > 1),
        "unknown": sorted(n for n in count if n not in expected),
    }
    faulty_rows = "; ".join(f"{what}: {rows[:5]}" for what, rows in faults.items() if rows)
    if faulty_rows:
        raise ValueError(f"{count.total()} rows for {len(expected)} samples, expected each once; {faulty_rows}")


def _wrong_rows(mine: Mapping[int, Tensor], own: Sequence[int], lengths_N: Tensor) -> list[str]:
    """What this rank hands in that is not what it owns, in words."""
    if sorted(mine) != sorted(own):
        missing, beside = sorted(set(own) - set(mine))[:5], sorted(set(mine) - set(own))[:5]
        return [f"{len(mine)} rows are handed in, expected {len(own)}; missing: {missing}, beside them: {beside}"]
    return [
        f"row {n} has {row.numel()} values, the index says {int(lengths_N[n])}"
        for n, row in mine.items()
        if row.numel() != int(lengths_N[n])
    ]
