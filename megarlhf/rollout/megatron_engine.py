"""Generation with the Megatron actor itself: a full forward for every token. It is slow, exact, and the reference in
tests.

Legend: B rows of a micro-batch, S positions, H hidden, V vocabulary columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.algo.sampling import filtered_logits
from megarlhf.kernels import token_logprobs
from megarlhf.models.build import ModelShard
from megarlhf.parallel.batching import FILLER, padded_length, split_padded
from megarlhf.parallel.device_memory import Offloadable, RoleParts
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.step import forward_only
from megarlhf.parallel.vocab import logits_at
from megarlhf.rollout.engine import any_rank, gather_rollouts, missing_rows
from megarlhf.rollout.requests import EngineRequest, News, RequestSource
from megarlhf.rollout.responses import FinishedResponses, Response, ResponsePart, Sampling, parts_of, responses_of
from megarlhf.rollouts import Rollouts


class MegatronEngine:
    """Engine without weights of its own: it samples with the actor's live parameters."""

    rebuilds = 0
    """Always 0, since there is nothing to rebuild: a failure is one of the actor's own modules."""
    cache_tokens: int | None = None
    """Always None, since nothing is kept from token to token."""

    def __init__(self, actor: ModelShard, micro_batch_samples: int, parts: RoleParts) -> None:
        self._actor, self._parts = actor, parts
        self._micro_batch_samples = micro_batch_samples
        self._version = -1
        self.local_seconds = 0.0

    @property
    def weight_version(self) -> int:
        return self._version

    def needs(self, *, to_generate: bool) -> Sequence[Offloadable]:
        return (self._parts.parameters,)

    def update_weights(self, actor: ModelShard, version: int) -> None:
        assert actor is self._actor
        self._version = version

    def verify_weights(self, actor: ModelShard) -> None:
        assert actor is self._actor

    def close(self) -> None:
        pass

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
        """Rows are split over data-parallel ranks; all ranks stop at the same token. Conversations are drawn turn by
        turn, all together."""
        self._parts.to_compute()
        bank = FinishedResponses() if bank is None else bank
        rows = missing_rows(bank, len(prompts))
        began = time.monotonic()
        given = parts_of(parts, len(prompts), sampling)
        lengths = [len(prompt) - len(part.so_far) for prompt, part in zip(prompts, given, strict=True)]
        # As wide as for all prompts, whichever are missing: equal shapes give equal bits.
        width = sampling.max_tokens + max(lengths, default=0)
        if conversations is not None:
            conversations.restart(bank, self._version)
            stopped = self._converse(rows, conversations, sampling, bank, should_stop, width)
        else:
            requests = [EngineRequest(*row) for row in zip(prompts, seeds, given, strict=True)]
            stopped = self._draw(rows, requests, sampling, bank, should_stop, width) if rows else False
        self.local_seconds = time.monotonic() - began
        device = self._actor.mesh.runtime.device
        return gather_rollouts(bank.held, len(prompts), device, stopped=stopped)

    def _draw(
        self,
        missing: Sequence[int],
        requests: Sequence[EngineRequest],
        sampling: Sampling,
        bank: FinishedResponses,
        should_stop: Callable[[], bool] | None,
        width: int,
    ) -> bool:
        """Draw the missing rows; returns whether it was stopped. `width`: most tokens of a row"""
        mesh = self._actor.mesh
        rows = [
            n
            for batch in split_padded(missing, mesh.layout.dp, self._micro_batch_samples)[mesh.coordinates.dp]
            for n in batch
        ]
        filled = [requests[0] if row == FILLER else requests[row] for row in rows]
        prompts, own = [request.prompt for request in filled], [request.part for request in filled]
        state = _Decoding(rows, prompts, own, padded_length(width, mesh), mesh.runtime.device)
        seeds = [request.seed for request in requests]
        for _ in range(max(requests[row].part.max_tokens for row in missing)):
            state.extend(self._next_tokens(state, seeds, sampling), sampling)
            if mesh.owns_outputs:
                for row, response in state.ended(self._version).items():
                    if row not in bank.held:
                        bank.add(row, response)
            if should_stop is not None and any_rank(should_stop()):
                return True
        return False

    def _converse(
        self,
        rows: Sequence[int],
        source: RequestSource,
        sampling: Sampling,
        bank: FinishedResponses,
        should_stop: Callable[[], bool] | None,
        width: int,
    ) -> bool:
        """Draw conversations; returns whether it was stopped."""
        world, rank = dist.get_world_size(), dist.get_rank()
        asked = {row: source.begin(row, mine=place % world == rank) for place, row in enumerate(rows)}
        requests = {row: request for row, request in asked.items() if request is not None}
        while requests or source.num_waiting:
            if any_rank(bool(source.failure) or (should_stop is not None and should_stop())):
                return True
            if source.num_waiting:
                by_rank: list[list[News]] = [[] for _ in range(world)]
                dist.all_gather_object(by_rank, source.news())
                news = sorted((item for of_rank in by_rank for item in of_rank), key=lambda item: item.row)
                for item in news:
                    outcome = source.take(item)
                    if isinstance(outcome, EngineRequest):
                        requests[item.row] = outcome
                    elif outcome is not None:
                        bank.add(item.row, outcome)
                if not news:
                    source.wait()
                continue
            turns = FinishedResponses()
            drawn_rows, own = sorted(requests), [requests[row] for row in sorted(requests)]
            if self._draw(range(len(own)), own, sampling, turns, should_stop, width):
                return True
            drawn = gather_rollouts(turns.held, len(own), self._actor.mesh.runtime.device)
            requests = {}
            for row, response in zip(drawn_rows, responses_of(drawn), strict=True):
                if (finished := source.drawn(row, response)) is not None:
                    bank.add(row, finished)
        return False

    def _next_tokens(self, state: _Decoding, seeds: Sequence[int], sampling: Sampling) -> Tensor:
        """Next token of each open row and its log-prob, [rows, 2], on every rank of the model."""
        mesh, vocabulary = self._actor.mesh, self._actor.vocabulary()
        device = mesh.runtime.device
        picked = torch.zeros(len(state.rows), 2, dtype=torch.float64, device=device)
        # Micro-batches without open rows are left out, on all ranks that have these rows. With expert parallelism,
        # ranks with other rows hold some of the experts, so all micro-batches are computed.
        together = mesh.layout.ep > 1
        parts = [part for part in self._micro_batches(len(state.rows)) if together or state.is_open(part)]
        if not parts:
            return picked
        batches = [
            MicroBatch(
                tokens_BS=state.tokens_BS[part],
                columns={"last": state.lengths_B[part] - 1, "row": torch.tensor(state.rows[part])},
            )
            for part in parts
        ]

        def pick(hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
            last_B = batch.columns["last"]
            rows_B = torch.arange(len(last_B), device=last_B.device)
            logits_BV = logits_at(vocabulary, hidden_SBH, rows_B, last_B, share=batch.share)
            temperature = 1.0 if sampling.greedy else sampling.temperature
            logits_BV /= temperature
            logits_BV = filtered_logits(logits_BV, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)
            picked_B = _sample(logits_BV, batch.columns["row"], last_B, None if sampling.greedy else seeds)
            logprobs_B, _ = token_logprobs(logits_BV, picked_B, return_entropy=False, backend=vocabulary.backend)
            return torch.stack([picked_B.double(), logprobs_B.double()], -1)

        outputs = forward_only(self._actor.module, mesh, batches, pick)
        for part, output in zip(parts, outputs, strict=False):  # only the last stage has outputs
            picked[part] = output
        if mesh.layout.pp > 1:
            dist.broadcast(picked, mesh.last_stage_rank, group=mesh.groups.pp)
        return picked

    def _micro_batches(self, num_rows: int) -> list[slice]:
        step = self._micro_batch_samples
        return [slice(start, start + step) for start in range(0, num_rows, step)]


def _sample(logits_BV: Tensor, rows_B: Tensor, last_B: Tensor, seeds: Sequence[int] | None) -> Tensor:
    """Argmax, or a sample by the Gumbel trick with its own generator for each (seed of the row, position)."""
    if seeds is None:
        return logits_BV.argmax(-1)
    noise_BV = torch.zeros_like(logits_BV, device="cpu")
    for i, (row, last) in enumerate(zip(rows_B.tolist(), last_B.tolist(), strict=True)):
        if row != FILLER:
            generator = torch.Generator().manual_seed((seeds[row] + 0x9E3779B97F4A7C15 * last) % 2**63)
            noise_BV[i] = -torch.empty(noise_BV.size(1)).exponential_(generator=generator).log()
    return (logits_BV + noise_BV.to(logits_BV.device)).argmax(-1)


class _Decoding:
    """Rows that grow token by token, on a grid that is wide enough for the longest."""

    def __init__(
        self, rows: list[int], prompts: list[Tensor], parts: list[ResponsePart], width: int, device: torch.device
    ) -> None:
        self.rows, self._parts = rows, parts
        self.lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.tokens_BS = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        for i, prompt in enumerate(prompts):
            self.tokens_BS[i, : len(prompt)] = prompt.to(device)
        self._open_B = torch.tensor([row != FILLER for row in rows], device=device)
        self._sampled: list[list[tuple[int, float]]] = [[] for _ in rows]
        self._finished = [False] * len(rows)

    def extend(self, picked_B2: Tensor, sampling: Sampling) -> None:
        for i, (token, logprob) in enumerate(picked_B2.tolist()):
            if self._open_B[i]:
                self.tokens_BS[i, self.lengths_B[i]] = int(token)
                self.lengths_B[i] += 1
                self._sampled[i].append((int(token), logprob))
                part, tokens = self._parts[i], [sampled for sampled, _ in self._sampled[i]]
                self._finished[i] = part.ends(sampling, tokens)
                self._open_B[i] = not self._finished[i] and len(tokens) < part.max_tokens

    def is_open(self, part: slice) -> bool:
        """Whether any of these rows is unfinished."""
        return bool(self._open_B[part].any())

    def ended(self, version: int) -> dict[int, Response]:
        """Responses by row that are finished, or as long as they may become; all drawn by one version of the
        weights."""
        return {
            row: Response([t for t, _ in sampled], [p for _, p in sampled], finished, ((version, len(sampled)),))
            for row, sampled, finished, is_open in zip(
                self.rows, self._sampled, self._finished, self._open_B.tolist(), strict=True
            )
            if row != FILLER and not is_open
        }
