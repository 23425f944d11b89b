"""Runs with environments that do not end in order, after which the engine is closed for the next test all the same."""

import contextlib
from dataclasses import replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch

from megarlhf.experience import Experience
from megarlhf.models.role import Role
from megarlhf.rollout.conversations import Conversations
from megarlhf.rollout.engine import EngineFailure
from megarlhf.rollout.requests import EngineRequest
from megarlhf.runtime import Runtime
from megarlhf.trainers.rl import loop
from megarlhf.trainers.rl.logprob_gap import LogprobGapError
from tests.distributed.interrupted_jobs import at_call
from tests.distributed.jobs import command, command_status


def failing_command(runtime: Runtime, *argv: str) -> tuple[int, str]:
    """`command_status` of a run that fails."""
    with mock.patch.object(loop, "closed_at_the_end", contextlib.closing):
        return command_status(runtime, *argv)


def command_with_wrong_history(runtime: Runtime, fault: str, *argv: str) -> tuple[int, str]:
    """`failing_command` whose trainer reads other tokens than its engine, or places them otherwise."""
    real_request, real_stretches = Conversations.request, Experience.sampled_stretches.func

    def request(conversations: Any, row: int) -> EngineRequest:
        asked = real_request(conversations, row)
        state = conversations._rows[row]
        if not state.num_answered:
            return asked
        start, end = len(state.start), len(state.start) + state.stretches[0]
        before, first, rest = asked.prompt[:start], asked.prompt[start:end], asked.prompt[end:]
        if fault == "tokenized again":  # the first turn's tokens, one by one the next of the vocabulary
            first = (first + 1) % 16
        elif fault == "a thought dropped":
            first = first[-1:]
        return asked._replace(prompt=torch.cat([before, first, rest]))

    def stretches(experience: Experience) -> Any:
        first_P, counts = real_stretches(experience)
        is_later = [place > 0 for row in counts.rows() for place in range(len(row))]
        shift = torch.tensor(is_later).long() if fault == "off by one" else 0
        return first_P - shift, counts

    place = cached_property(stretches)
    place.__set_name__(Experience, "sampled_stretches")
    with (
        mock.patch.object(Conversations, "request", request),
        mock.patch.object(Experience, "sampled_stretches", place),
    ):
        try:
            return failing_command(runtime, *argv)
        except LogprobGapError as error:
            return 1, str(error)


def gradients_with_changes(runtime: Runtime, *argv: str) -> dict[str, float]:
    """Largest change of the first update's gradient, by what is changed: labels of tokens that were not sampled, the
    label of one sampled token, one observed token as input."""
    real, changes = Role.accumulate, dict[str, float]()

    def noted(role: Role, batches: Any, loss: Any) -> Any:
        def gradient(change: Any = None, batches: Any = batches) -> torch.Tensor:
            def changed(hidden_SBH: Any, batch: Any) -> Any:
                return loss(hidden_SBH, batch if change is None else replace(batch, tokens_BS=change(batch)))

            changed.__dict__["names"] = loss.names
            real(role, batches, changed)
            assert role.trainer is not None
            return torch.cat([buffer.grad_data.flatten().clone() for buffer in role.trainer.buffers])

        def others(batch: Any) -> torch.Tensor:
            return torch.where(batch.columns["response_mask"], batch.tokens_BS, (batch.tokens_BS + 3) % 16)

        def one(batch: Any) -> torch.Tensor:
            tokens_BS, (row, place) = batch.tokens_BS.clone(), batch.columns["response_mask"].nonzero()[0]
            tokens_BS[row, place] = (tokens_BS[row, place] + 3) % 16
            return tokens_BS

        def with_other_input(batch: Any) -> Any:
            """The first token behind a sampled one that a further sampled one of the same sample follows."""
            mask_BS, samples_BS = batch.columns["response_mask"], batch.columns["sample_numbers"]
            tokens_BS = batch.tokens_BS.clone()
            for row, place in mask_BS.nonzero().tolist():
                later = mask_BS[row, place + 2 :] & (samples_BS[row, place + 2 :] == samples_BS[row, place])
                if not mask_BS[row, place + 1] and later.any():
                    tokens_BS[row, place + 1] = (tokens_BS[row, place + 1] + 3) % 16
                    return replace(batch, tokens_BS=tokens_BS)
            return batch

        if not changes:
            plain = gradient()
            gradients = {
                "nothing": gradient(),
                "other labels": gradient(others),
                "one label": gradient(one),
                "one input": gradient(batches=[with_other_input(batch) for batch in batches]),
            }
            changes.update((name, float((changed - plain).abs().max())) for name, changed in gradients.items())
        return real(role, batches, loss)

    with mock.patch.object(Role, "accumulate", noted):
        command(runtime, *argv)
    return changes


def failing_engine(runtime: Runtime, calls: int, owner: str, method: str, *argv: str) -> tuple[int, str]:
    """A run whose engine fails at the call numbered `calls` of a method that it calls: status, and what was written."""
    with at_call(calls, owner, method, _fail):
        try:
            return failing_command(runtime, *argv)
        except EngineFailure as error:
            return 1, str(error)


def _fail() -> None:
    raise RuntimeError("planted in the engine")
