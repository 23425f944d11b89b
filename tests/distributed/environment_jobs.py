"""Runs with environments that do not end in order, after which the engine is closed for the next test all the same."""

import contextlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megarlhf.config import ConversationConfig, RoleConfig, RolloutConfig
from megarlhf.config.environment import EnvironmentConfig
from megarlhf.data.sample_types import PromptSample
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.experience import Experience
from megarlhf.models.role import Role, build_role
from megarlhf.models.weights import load_weights
from megarlhf.parallel.mesh import GroupCache
from megarlhf.resume.points.point import find_points
from megarlhf.rollout.bank import StepBank
from megarlhf.rollout.conversations import Conversations, draw_samples
from megarlhf.rollout.engine import EngineFailure
from megarlhf.rollout.environments.environment import Environment
from megarlhf.rollout.in_flight import Requests
from megarlhf.rollout.megatron_engine import MegatronEngine
from megarlhf.rollout.requests import EngineRequest
from megarlhf.rollout.responses import Sampling
from megarlhf.runtime import Runtime
from megarlhf.trainers.rl import loop
from megarlhf.trainers.rl.logprob_gap import LogprobGapError
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


def drawn_by_both_engines(runtime: Runtime, model: str, prompts: list[str], tp: int) -> list[Any]:
    """Greedy conversations with `Chance` by vLLM, and by the actor itself: sampled tokens, all tokens, log-probs."""
    from megarlhf.rollout.vllm.engine import VllmEngine

    section = RoleConfig.model_validate({"model": {"path": model}, "parallel": {"tp": tp}})
    actor, tokenizer = build_role("actor", section, "lm", GroupCache(runtime), seed=0), load_tokenizer(Path(model))
    load_weights(actor.shard, section.model, seed=0)
    rollout = RolloutConfig.model_validate({"max_response_tokens": 20})
    sampling = Sampling(max_tokens=20, greedy=True, end_ids=(1, 2, 5, 7, 9))
    samples = [PromptSample(tokenizer.encode(text), text, {"answer": "3"}, n) for n, text in enumerate(prompts)]
    requests = Requests.whole([torch.tensor(sample.tokens) for sample in samples], [0] * len(samples), 20)
    config = EnvironmentConfig(function="tests.distributed.environments:Chance", max_turns=5, max_turn_tokens=6)
    drawn = []
    engines = VllmEngine(rollout, actor, torch.float32, 32), MegatronEngine(actor.shard, 4, actor.parts)
    for engine in engines:
        engine.update_weights(actor.shard, 0)
        environment = Environment(
            config, ConversationConfig(), tokenizer, end_ids=sampling.end_ids, max_tokens=sampling.max_tokens
        )
        with contextlib.closing(environment):
            rollouts = draw_samples(
                engine, environment, samples, requests, sampling, environment_seeds=range(len(samples))
            )
        columns = rollouts.responses, rollouts.written, rollouts.logprobs
        drawn.append([[row.tolist() for row in column.rows()] for column in columns])
    engines[0].close()
    return drawn


def failing_engine(runtime: Runtime, calls: int, after: str, *argv: str) -> tuple[int, str]:
    """A run whose engine fails when the bank gets its answered turn number `calls`, counted from when there is a resume
    point in `after` if that is no empty text: status, and what was written."""
    real, made = StepBank.add_turn, list[int]()

    def counted(*arguments: Any, **options: Any) -> None:
        made.extend([1] * (not after or bool(find_points(Path(after)))))
        if len(made) == calls:
            made.append(1)
            raise RuntimeError("planted in the engine")
        real(*arguments, **options)

    with mock.patch.object(StepBank, "add_turn", counted):
        try:
            return failing_command(runtime, *argv)
        except EngineFailure as error:
            return 1, str(error)
