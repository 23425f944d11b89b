"""Interface of rollout engines, and functions that all engines use.

Every call is collective: all ranks call it with the same arguments and get the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.columns import Ragged, redistribute
from megarlhf.errors import Interrupted
from megarlhf.models.build import ModelShard
from megarlhf.parallel.device_memory import Offloadable
from megarlhf.rollout.requests import RequestSource
from megarlhf.rollout.responses import FinishedResponses, Index, Response, ResponsePart, Sampling
from megarlhf.rollouts import Rollouts, Stretches, VersionRuns
from megarlhf.weights.checks.certificate import Certificate


class EngineFailure(RuntimeError):
    """The engine failed while it drew responses, and must be rebuilt. Raised on every rank."""


class RolloutInterrupted(Interrupted):
    """The rollout was asked to stop before all responses were finished. Raised on every rank; the engine can go on."""

    def __init__(self, num_finished: int, num_samples: int) -> None:
        super().__init__(f"the rollout was asked to stop with {num_finished} of {num_samples} responses finished")
        self.num_finished, self.num_samples = num_finished, num_samples


class RolloutEngine(Protocol):
    """Samples responses with the weights that it is given."""

    @property
    def rebuilds(self) -> int:
        """Number of times it was rebuilt after a failure, since the process started."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights it holds; -1 before the first update."""
        ...

    @property
    def local_seconds(self) -> float:
        """Seconds of this rank's engine in the last `generate`, without waiting for the others."""
        ...

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that the cache of one engine holds; None where there is no cache."""
        ...

    def needs(self, *, to_generate: bool) -> Sequence[Offloadable]:
        """Parts that must be on the device while it generates, or while it takes over weights."""
        ...

    def update_weights(self, actor: ModelShard, version: int) -> None:
        """Take over the actor's weights."""
        ...

    def verify_weights(self, actor: ModelShard) -> Certificate | None:
        """Check that the engine holds the actor's weights, bit for bit; None if they are the actor's own tensors.

        Raises: CertificateError, naming tensors, ranks and boxes that differ.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Tensor],
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        parts: Sequence[ResponsePart] | None = None,
        bank: FinishedResponses | None = None,
        should_stop: Callable[[], bool] | None = None,
        conversations: RequestSource | None = None,
    ) -> Rollouts:
        """Draw one response for each prompt; row n is drawn with seeds[n] on whatever engine.

        With `parts` only a part of each response is drawn. Parts of a response that the same weights draw one after
        the other are the response that they draw at once. With `conversations` a row is a conversation with an
        environment, which is asked between two turns; its part then counts what the environment writes too.

        Rows that `bank` holds on any rank are not drawn again. Each other row is added to it, on one rank, when it is
        finished. `should_stop` is called on every rank between two tokens; if it returns True on one, at least the
        engine of that rank stops.

        Raises: on every rank, RolloutInterrupted if rows are missing because of `should_stop`, EngineFailure if the
        engine failed.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds, after the last collective of the run.

        It is not called after a failure: leaving a process group may wait for ranks that are stuck in it, and the error
        would not be shown.
        """
        ...


def missing_rows(bank: FinishedResponses, num_samples: int) -> list[int]:
    """Rows that no rank holds. Collective."""
    held_by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(held_by_rank, list(bank.held))
    held = {row for rows in held_by_rank for row in rows}
    return [row for row in range(num_samples) if row not in held]


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank of the run. Collective."""
    flags = [False] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


def gather_rollouts(
    mine: Mapping[int, Response],
    num_samples: int,
    device: torch.device,
    *,
    stopped: bool = False,
    seconds: float | None = None,
) -> Rollouts:
    """Gather the responses of each rank, by row, on every rank.

    seconds: time of this rank's engine; None if all engines take equally long

    Raises: RolloutInterrupted if rows are missing and any rank was `stopped`.
    """
    by_rank: list[tuple[Index, bool, float | None]] = [({}, False, None)] * dist.get_world_size()
    dist.all_gather_object(by_rank, ({n: response.index for n, response in mine.items()}, stopped, seconds))
    index = [rank_index for rank_index, _, _ in by_rank]
    if any(stopped for _, stopped, _ in by_rank) and (finished := sum(map(len, index))) < num_samples:
        raise RolloutInterrupted(finished, num_samples)
    engine_seconds = [seconds for _, _, seconds in by_rank if seconds is not None]
    idle = max(engine_seconds) - sum(engine_seconds) / len(engine_seconds) if engine_seconds else 0.0
    return replace(gather_indexed(mine, index, num_samples, device), idle_seconds=idle)


def gather_indexed(
    mine: Mapping[int, Response], index: Sequence[Index], num_samples: int, device: torch.device
) -> Rollouts:
    """Gather responses when every rank knows the index of each rank: see `gather_rollouts`."""
    index_by_row = {n: entry for rank_index in index for n, entry in rank_index.items()}
    if sorted(index_by_row) != list(range(num_samples)):
        missing = sorted(set(range(num_samples)) - set(index_by_row))[:5]
        raise RuntimeError(f"{len(index_by_row)} responses came back for {num_samples} prompts; missing rows {missing}")
    entries = [index_by_row[n] for n in range(num_samples)]
    owners = [sorted(rank_index) for rank_index in index]
    lengths_N = torch.tensor([entry.length for entry in entries], dtype=torch.int64)
    tokens = {n: torch.tensor(r.tokens, dtype=torch.int64) for n, r in mine.items()}
    logprobs = {n: torch.tensor(r.logprobs, dtype=torch.float32) for n, r in mine.items()}
    no_ids = torch.empty(0, dtype=torch.int64, device=device)
    rollouts = Rollouts(
        responses=redistribute(tokens, lengths_N, no_ids, owners),
        logprobs=redistribute(logprobs, lengths_N, torch.empty(0, dtype=torch.float32, device=device), owners),
        finished_N=torch.tensor([entry.finished for entry in entries]),
        versions=VersionRuns.from_rows([entry.versions for entry in entries]),
    )
    dialogues = tuple(entry.dialogue for entry in entries if entry.dialogue is not None)
    if not dialogues:
        return rollouts
    stretches = Ragged.from_rows([torch.tensor(entry.stretches) for entry in entries], torch.int64)
    observed_N = torch.tensor([sum(entry.stretches[1::2]) for entry in entries], dtype=torch.int64)
    observed = {n: torch.tensor(r.observed, dtype=torch.int64) for n, r in mine.items()}
    moved = redistribute(observed, observed_N, no_ids, owners)
    return replace(rollouts, stretches=Stretches(stretches, moved), dialogues=dialogues)
