"""Interface of rollout engines, and functions that all engines use.

Every call is collective: all ranks call it with the same arguments and get the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.columns import redistribute
from megarlhf.errors import Interrupted
from megarlhf.experience import Rollouts, VersionRuns
from megarlhf.models.build import ModelShard
from megarlhf.parallel.device_memory import Offloadable
from megarlhf.weights.checks.certificate import Certificate


@dataclass(frozen=True)
class StopStrings:
    """Texts that end a response."""

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str] = field(compare=False, repr=False)
    """Decodes a part of a response, as a continuation."""

    def complete_in(self, tokens: Sequence[int], before: Sequence[int] | np.ndarray = ()) -> bool:
        """Whether the response contains one of the texts. Called after each token, it decodes only the end.

        before: tokens of the response before `tokens`
        """
        longest = max(len(text.encode()) for text in self.texts)
        count = longest + 1
        while True:  # a token may be no text, or a part of a character
            missing = max(0, min(count - len(tokens), len(before)))
            earlier = [int(token) for token in before[len(before) - missing :]]
            tail = self.decode([*earlier, *tokens[-count:]])
            if any(text in tail for text in self.texts):
                return True
            if count >= len(before) + len(tokens) or len(tail.encode()) > longest:
                return False
            count *= 2


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings with which responses are drawn."""

    max_tokens: int
    """Maximum tokens of a response; a longer one is truncated."""
    temperature: float = 1.0
    greedy: bool = False
    """Take the most likely token; log-probs are then at temperature 1."""
    end_ids: tuple[int, ...]
    """Tokens that end a response and are part of it: `model_directory.end_tokens`."""
    stop: StopStrings | None = None
    """Texts that end a response."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Filters of the logits, with `top_p` and `top_k`: `algo.sampling.filtered_logits`."""

    def ends(self, tokens: Sequence[int], before: Sequence[int] | np.ndarray = ()) -> bool:
        """Whether a response that did not end before its last token ends with it.

        before: tokens of the response before `tokens`
        """
        if not tokens:
            return False
        return tokens[-1] in self.end_ids or (self.stop is not None and self.stop.complete_in(tokens, before))

    def identity(self) -> dict[str, Any]:
        """Settings that responses depend on, for JSON."""
        stop = {} if self.stop is None else {"stop": list(self.stop.texts)}
        plain = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("end_ids", "stop")
            # Keys of later versions are left out at their default, so that earlier identities stay valid.
            and (field.name not in ("top_p", "top_k", "min_p") or getattr(self, field.name) != field.default)
        }
        return {**plain, "end_ids": list(self.end_ids), **stop}


@dataclass(frozen=True)
class Response:
    """Tokens that were drawn for one row: a response, or the part of it that was asked for."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    versions: VersionRow
    """Weights that drew the tokens."""

    @property
    def index(self) -> IndexEntry:
        """Facts that every rank knows of the response."""
        return len(self.tokens), self.finished, self.versions


@dataclass(frozen=True)
class ResponsePart:
    """Part of a response that one call draws, where a response is drawn in slices (`slices.py`)."""

    so_far: Sequence[int] | np.ndarray
    """Tokens of earlier parts. The row of `prompts` is the prompt and these."""
    until: int
    """Length of the response, earlier parts included, at which this part ends at the latest."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that are drawn now."""
        return self.until - len(self.so_far)

    def ends(self, sampling: Sampling, tokens: Sequence[int]) -> bool:
        """Whether the response ends with the last of the `tokens` that are drawn now."""
        return sampling.ends(tokens, self.so_far)


def parts_of(parts: Sequence[ResponsePart] | None, num_rows: int, sampling: Sampling) -> Sequence[ResponsePart]:
    """The part of each row; whole responses where none are given."""
    return [ResponsePart((), sampling.max_tokens)] * num_rows if parts is None else parts


VersionRow = tuple[tuple[int, int], ...]
"""Runs (version of the weights, number of tokens that it drew) over the tokens of a response, in their order."""
IndexEntry = tuple[int, bool, VersionRow]
"""Number of tokens of a response, whether it is finished, and its versions."""
Index = dict[int, IndexEntry]
"""Entries by row."""


class FinishedResponses:
    """Finished responses of a rollout in progress, which are not drawn again. Each row is on one rank only."""

    def __init__(self, held: Mapping[int, Response] | None = None) -> None:
        self.held: dict[int, Response] = dict(held or {})
        """This rank's responses, by row."""

    def add(self, row: int, response: Response) -> None:
        self.held[row] = response


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
    ) -> Rollouts:
        """Draw one response for each prompt; row n is drawn with seeds[n] on whatever engine.

        With `parts` only a part of each response is drawn. Parts of a response that the same weights draw one after
        the other are the response that they draw at once.

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


def sample_seed(run_seed: int, step: int, sample: int, refill: int = 0) -> int:
    """Seed of a sample: a function of run seed, step and global sample index, never of a rank.

    refill: number of the round of dynamic sampling; 0 is the step's first
    """
    text = f"{run_seed}/{step}/{sample}" + (f"/{refill}" if refill else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


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
    lengths_N = torch.tensor([length for length, _, _ in entries], dtype=torch.int64)
    owners = [sorted(rank_index) for rank_index in index]
    tokens = {n: torch.tensor(r.tokens, dtype=torch.int64) for n, r in mine.items()}
    logprobs = {n: torch.tensor(r.logprobs, dtype=torch.float32) for n, r in mine.items()}
    return Rollouts(
        responses=redistribute(tokens, lengths_N, torch.empty(0, dtype=torch.int64, device=device), owners),
        logprobs=redistribute(logprobs, lengths_N, torch.empty(0, dtype=torch.float32, device=device), owners),
        finished_N=torch.tensor([finished for _, finished, _ in entries]),
        versions=VersionRuns.from_rows([versions for _, _, versions in entries]),
    )
