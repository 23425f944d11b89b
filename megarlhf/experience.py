"""The table of a step: prompts, rollouts, and the columns computed from them.

A sample is a sequence: the prompt, then stretches of tokens that the model sampled and stretches that it did not. Today
each sample has one sampled stretch. A sample has the same global index, its row, everywhere: sample n answers prompt
n // num_samples_per_prompt. The engine's responses and the small index (lengths, groups, rewards, weight versions) are
on every rank. Token columns are ragged, with one value for each sampled token and for nothing else. `redistribute`
moves a role's outputs to the ranks that read them (`ColumnSharding`), where each row is either whole or empty.
Statistics of the whole batch come from one number per sample (`Experience.gather_per_sample`).

Legend: N samples of the step, T tokens of the samples end to end, W ranks of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.columns import ColumnSharding, Ragged, redistribute, replicate


@dataclass(frozen=True)
class VersionRuns:
    """Versions of the weights that drew each sampled token, as runs over the sampled tokens of each sample.

    Example: a sample of 5 tokens, 2 drawn by version 3 and then 3 by version 4: its row of `versions` is [3, 4], its
    row of `lengths` [2, 3].
    """

    versions: Ragged
    """int64, on the CPU."""
    lengths: Ragged
    """Sampled tokens of each run, int64, on the CPU."""

    @staticmethod
    def constant(version: int, lengths_N: Tensor) -> VersionRuns:
        """One run for each sample."""
        ones_N = torch.ones_like(lengths_N)
        return VersionRuns(Ragged(torch.full_like(lengths_N, version), ones_N), Ragged(lengths_N.clone(), ones_N))

    @staticmethod
    def from_rows(rows: Sequence[Sequence[tuple[int, int]]]) -> VersionRuns:
        """Runs (version, number of tokens) of each sample."""
        counts_N = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        versions, lengths = (torch.tensor([run[n] for row in rows for run in row], dtype=torch.int64) for n in (0, 1))
        return VersionRuns(Ragged(versions, counts_N), Ragged(lengths, counts_N))

    @staticmethod
    def joined(parts: Sequence[tuple[VersionRuns, Sequence[int]]]) -> VersionRuns:
        """Runs of chosen samples, one part after the other."""
        return VersionRuns(
            Ragged.joined([(runs.versions, chosen) for runs, chosen in parts]),
            Ragged.joined([(runs.lengths, chosen) for runs, chosen in parts]),
        )

    def extended(self, rows: Sequence[int], more: VersionRuns) -> VersionRuns:
        """Runs of which those of the samples `rows` go on."""
        return VersionRuns(self.versions.extended(rows, more.versions), self.lengths.extended(rows, more.lengths))

    def per_token(self) -> Ragged:
        """Version of each sampled token."""
        return Ragged(self.versions.values_T.repeat_interleave(self.lengths.values_T), self.lengths.sums_N)

    def require(self, version: int) -> None:
        """Raises: RuntimeError where a token was drawn by another version than the configuration promises."""
        self.require_runs(VersionRuns.constant(version, self.lengths.sums_N))

    def require_runs(self, expected: VersionRuns) -> None:
        """Raises: RuntimeError where a token was drawn by another version than is expected."""
        drawn_T, expected_T = self.per_token().values_T, expected.per_token().values_T
        if bool((differ_T := drawn_T != expected_T).any()):
            wrong = torch.stack([drawn_T[differ_T], expected_T[differ_T]], 1).unique(dim=0)[:5].tolist()
            pairs = ", ".join(f"version {drawn}, expected version {right}" for drawn, right in wrong)
            raise RuntimeError(
                f"samples of this step were drawn with other weights than the configuration says ({pairs}): the "
                "rollout engine has missed an update. If they are in the rollout bank, remove the folder `bank` of the "
                "run before it is resumed"
            )


@dataclass(frozen=True)
class Stretches:
    """Tokens after the prompts, where the model and something else, such as a tool, write in turn.

    The first and the last stretch after a prompt are sampled by the model. Between two sampled stretches is an observed
    one, such as the answer of a tool. Example: the model wrote "a b", the tool answered "c d e", and the model wrote
    "f". Then the row of `lengths` is [2, 3, 1], the row of `observed` is "c d e", and the sample's row in
    `Rollouts.responses`, which has only sampled tokens, is "a b f".
    """

    lengths: Ragged
    """Number of tokens of each stretch, for an odd number of stretches per sample: int64, on the CPU."""
    observed: Ragged
    """Tokens that were not sampled, int64."""

    @staticmethod
    def joined(parts: Sequence[tuple[Stretches, Sequence[int]]]) -> Stretches:
        """Stretches of chosen samples, one part after the other."""
        return Stretches(
            Ragged.joined([(stretches.lengths, chosen) for stretches, chosen in parts]),
            Ragged.joined([(stretches.observed, chosen) for stretches, chosen in parts]),
        )

    @property
    def sampled(self) -> Ragged:
        """Number of tokens of each sampled stretch."""
        return Ragged.from_rows([row[::2] for row in self.lengths.rows()], torch.int64)

    def written(self, sampled: Ragged) -> Ragged:
        """All tokens after each prompt: sampled and observed stretches in turn."""
        rows = [
            torch.cat([part for pair in zip_longest(own[::2], own[1::2]) for part in pair if part is not None])
            for own in map(self._in_turn, self.lengths.rows(), sampled.rows(), self.observed.rows())
        ]
        return Ragged.from_rows(rows, sampled.values_T.dtype)

    @staticmethod
    def _in_turn(lengths: Tensor, sampled: Tensor, observed: Tensor) -> list[Tensor]:
        """Stretches of one sample, in their order."""
        stretches: list[Tensor] = [sampled] * len(lengths)
        stretches[::2] = sampled.split(lengths[::2].tolist())
        if len(lengths) > 1:
            stretches[1::2] = observed.to(sampled).split(lengths[1::2].tolist())
        return stretches


@dataclass(frozen=True)
class Rollouts:
    """Responses of an engine, the same on every rank."""

    responses: Ragged
    """Sampled tokens of each sample, int64, including its end token if it has one."""
    logprobs: Ragged
    """The engine's log-probs of the sampled tokens, under the distribution that it sampled from."""
    finished_N: Tensor
    """bool: ended by an end token, not by the token limit."""
    versions: VersionRuns
    """Weights that drew the sampled tokens."""
    stretches: Stretches | None = None
    """Positions of the sampled tokens after the prompt; None: each sample is one sampled stretch."""
    idle_seconds: float = 0.0
    """Seconds that an engine waited for the slowest one, the mean over engines; 0 for joined rollouts."""

    def __post_init__(self) -> None:
        lengths = {"log-probs": self.logprobs.lengths_N, "versions": self.versions.lengths.sums_N}
        if self.stretches is not None:
            lengths["sampled stretches"] = self.stretches.sampled.sums_N
        for name, lengths_N in lengths.items():
            assert torch.equal(lengths_N, self.responses.lengths_N), f"{name} of other lengths than the sampled tokens"
        assert len(self.finished_N) == len(self.responses.lengths_N), "finished_N is of another number of samples"

    @staticmethod
    def joined(parts: Sequence[tuple[Rollouts, Sequence[int]]]) -> Rollouts:
        """Chosen samples of each part, one part after the other."""
        stretches = [(rollouts.stretches, chosen) for rollouts, chosen in parts if rollouts.stretches is not None]
        assert len(stretches) in (0, len(parts)), "only some of the parts have stretches"
        return Rollouts(
            responses=Ragged.joined([(rollouts.responses, chosen) for rollouts, chosen in parts]),
            logprobs=Ragged.joined([(rollouts.logprobs, chosen) for rollouts, chosen in parts]),
            finished_N=torch.cat([rollouts.finished_N[list(chosen)] for rollouts, chosen in parts]),
            versions=VersionRuns.joined([(rollouts.versions, chosen) for rollouts, chosen in parts]),
            stretches=Stretches.joined(stretches) if stretches else None,
        )

    @classmethod
    def empty(cls, num_samples: int) -> Rollouts:
        """Samples without a token, on the CPU."""
        lengths_N = torch.zeros(num_samples, dtype=torch.int64)
        none_N, finished_N = Ragged(torch.empty(0, dtype=torch.int64), lengths_N), torch.zeros(num_samples).bool()
        return cls(none_N, Ragged(torch.empty(0), lengths_N), finished_N, VersionRuns(none_N, none_N))

    def to(self, device: torch.device | str) -> Rollouts:
        """The same with the tokens and log-probs on a device."""
        responses, logprobs = (replace(x, values_T=x.values_T.to(device)) for x in (self.responses, self.logprobs))
        return replace(self, responses=responses, logprobs=logprobs)

    def extended(self, rows: Sequence[int], more: Rollouts) -> Rollouts:
        """Samples of which those in `rows` go on with further sampled tokens."""
        assert self.stretches is None, "samples with observed stretches are not drawn in slices"
        finished_N = self.finished_N.clone()
        finished_N[list(rows)] = more.finished_N
        return Rollouts(
            responses=self.responses.extended(rows, more.responses),
            logprobs=self.logprobs.extended(rows, more.logprobs),
            finished_N=finished_N,
            versions=self.versions.extended(rows, more.versions),
            idle_seconds=more.idle_seconds,
        )

    @property
    def written(self) -> Ragged:
        """All tokens after each prompt, sampled or not."""
        return self.responses if self.stretches is None else self.stretches.written(self.responses)

    def state_dict(self) -> dict[str, Any]:
        """State as tensors and mappings."""
        stretches = self.stretches
        return {
            "lengths": self.responses.lengths_N,
            "responses": self.responses.values_T,
            "logprobs": self.logprobs.values_T,
            "finished": self.finished_N,
            "versions": _ragged_state(self.versions.versions),
            "version_lengths": _ragged_state(self.versions.lengths),
            "stretches": stretches and _ragged_state(stretches.lengths),
            "observed": stretches and _ragged_state(stretches.observed),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Rollouts:
        """Rollouts from a `state_dict`, also from one of earlier versions, which had one weight version per step."""
        lengths_N, stretches = state["lengths"].cpu(), None
        if "weight_version" in state:
            versions = VersionRuns.constant(state["weight_version"], lengths_N)
        else:
            versions = VersionRuns(_ragged_of(state["versions"]), _ragged_of(state["version_lengths"]))
        if state.get("stretches") is not None:
            stretches = Stretches(_ragged_of(state["stretches"]), _ragged_of(state["observed"]))
        return cls(
            responses=Ragged(state["responses"], lengths_N),
            logprobs=Ragged(state["logprobs"], lengths_N),
            finished_N=state["finished"].cpu(),
            versions=versions,
            stretches=stretches,
        )

    def single_responses(self) -> Ragged:
        """The sampled tokens, for readers that take them for one text. Raises: NotImplementedError where a sample has
        several sampled stretches, whose tokens would be run together."""
        if self.stretches is not None:
            raise NotImplementedError(
                "samples with observed stretches are read as one response each, which would run their sampled "
                "stretches together; read Rollouts.written, or each stretch by Rollouts.stretches"
            )
        return self.responses


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


def _ragged_state(table: Ragged) -> dict[str, Tensor]:
    return {"values": table.values_T, "lengths": table.lengths_N}


def _ragged_of(state: Mapping[str, Tensor]) -> Ragged:
    return Ragged(state["values"].cpu(), state["lengths"].cpu())
