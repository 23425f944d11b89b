"""Rewards of a batch of responses, shared out over the ranks of the run: begun, then gathered on all of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.config import RewardConfig
from megarlhf.config.rewards import IN_WORKERS
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.errors import Interrupted, RewardError, WatchdogTimeout
from megarlhf.experience import Rollouts
from megarlhf.layout import split_evenly
from megarlhf.rollout.rewards.batch import RewardBatch, RewardResult, short
from megarlhf.rollout.rewards.calls import call
from megarlhf.rollout.rewards.forms import Form
from megarlhf.rollout.rewards.http import HttpReward, require_plain_token
from megarlhf.rollout.rewards.pool import RewardPool
from megarlhf.rollout.rewards.rules import RULES, form_of_rule, rule_with

ShouldStop = Callable[[], bool]


class PendingBatch(Protocol):
    """A batch whose rewards are under way on this rank."""

    def wait(self, should_stop: ShouldStop = ...) -> list[RewardResult] | None:
        """All outcomes, in the order of the batch; None where `should_stop` said so first."""
        ...


class RewardSource(Protocol):
    """What gives rewards: a function in this process or in others, or a server."""

    def start(self, batch: RewardBatch) -> PendingBatch:
        """Begin; nothing is waited for."""
        ...

    def close(self) -> None:
        """End processes and threads."""
        ...


class InThisProcess:
    """A rule of the registry, or a user's function that wants to run in the rank."""

    def __init__(self, function: Callable[..., Any], form: Form, batch_samples: int | None = None) -> None:
        self._function, self._form, self._batch_samples = function, form, batch_samples

    def start(self, batch: RewardBatch) -> PendingBatch:
        at_once = self._batch_samples or len(batch) if self._form.batched else 1
        return _Later(self._function, self._form, batch, max(at_once, 1))

    def close(self) -> None:
        pass


class _Later:
    """Calls when it is waited for."""

    def __init__(self, function: Callable[..., Any], form: Form, batch: RewardBatch, at_once: int) -> None:
        self._function, self._form, self._batch, self._at_once = function, form, batch, at_once

    def wait(self, should_stop: ShouldStop = lambda: False) -> list[RewardResult] | None:
        found: list[RewardResult] = []
        for start in range(0, len(self._batch), self._at_once):
            if should_stop():
                return None
            rows = range(start, min(start + self._at_once, len(self._batch)))
            found += outcomes_here(self._function, self._form, self._batch.part(rows))
        return found


def outcomes_here(function: Callable[..., Any], form: Form, batch: RewardBatch) -> list[RewardResult]:
    """Of a call in this process."""
    return call(function, form, batch)


def make_source(reward: RewardConfig, device: torch.device) -> RewardSource:
    """For a reward that is no model of the run. Raises: ValueError, which says what is wrong with it."""
    if reward.kind == "classifier":
        from megarlhf.rollout.rewards.classifier import Classifier

        assert reward.path is not None
        return Classifier(
            reward.path,
            device,
            label=reward.classifier_label,
            output=reward.output,
            form=reward.form,
            append_eos=reward.append_eos,
            dtype=reward.dtype,
            batch_samples=reward.batch_samples or 32,
        )
    if reward.kind == "http":
        token = None
        if reward.token_env is not None and not (token := os.environ.get(reward.token_env)):
            raise ValueError(
                f"reward {reward.label!r}: the environment variable {reward.token_env} that token_env names is not "
                "set; export it on every node"
            )
        require_plain_token(reward.token_env, token)
        return HttpReward(
            str(reward.url),
            token=token,
            timeout_seconds=reward.timeout_seconds,
            retries=4 if reward.retries is None else reward.retries,
            workers=reward.workers,
            batch_samples=reward.batch_samples,
        )
    name = str(reward.rule)
    function, form = rule_with(name, reward.args), form_of_rule(name)
    if name in RULES and name not in IN_WORKERS:
        return InThisProcess(function, form)
    if not reward.workers:
        return InThisProcess(function, form, reward.batch_samples)
    return _pool(f"{RULES[name].__module__}:{name}" if name in RULES else name, form, reward)


def _pool(function: str, form: Form, reward: RewardConfig) -> RewardPool:
    return RewardPool(
        function,
        form,
        args=reward.args,
        workers=reward.workers,
        timeout_seconds=reward.timeout_seconds,
        retries=reward.retries or 0,
        batch_samples=reward.batch_samples,
    )


def response_texts(rollouts: Rollouts, tokenizer: Tokenizer) -> list[str]:
    """The responses as rules read them."""
    rows = zip(rollouts.responses.rows(), rollouts.finished_N.tolist(), strict=True)
    return [text_of(row.tolist(), tokenizer, finished=finished) for row, finished in rows]


def text_of(tokens: Sequence[int], tokenizer: Tokenizer, *, finished: bool) -> str:
    """A response's text. Tokens of bytes may be cut inside a character, which leaves a mark of what is no text: of a
    response that was cut it is left out."""
    text = tokenizer.decode(tokens, continuation=True)
    return text if finished else text.removesuffix("\N{REPLACEMENT CHARACTER}")


def share_of_rank(prompts: Sequence[PromptSample], rollouts: Rollouts, tokenizer: Tokenizer) -> RewardBatch:
    """The samples that this rank's rewards are for; `prompts` are one for each sample."""
    share = split_evenly(len(prompts), dist.get_world_size())[dist.get_rank()]
    rows, finished = rollouts.responses.rows(), rollouts.finished_N.tolist()
    mine = [prompts[n] for n in share]
    responses = [rows[n].tolist() for n in share]
    spoken = any(prompt.messages is not None for prompt in mine)
    names = _token_names(tokenizer) if spoken else None  # type: ignore[arg-type]
    return RewardBatch(
        prompts=[prompt.text for prompt in mine],
        responses=[
            text_of(tokens, tokenizer, finished=finished[n]) for n, tokens in zip(share, responses, strict=True)
        ],
        prompt_tokens=[prompt.tokens for prompt in mine],
        response_tokens=responses,
        finished=[finished[n] for n in share],
        fields=[prompt.fields for prompt in mine],
        messages=[prompt.messages for prompt in mine],
        samples=list(share),
        ends=names and [names[row[-1]] if finished[n] else "" for n, row in zip(share, responses, strict=True)],
    )


@functools.lru_cache(maxsize=2)
def _token_names(tokenizer: Tokenizer) -> list[str]:
    return tokenizer.tokens()


def gather(
    name: str,
    waiting: PendingBatch,
    mine: RewardBatch,
    *,
    drop_failures: bool = False,
    local: Callable[[], AbstractContextManager[None]] = nullcontext,
    should_stop: ShouldStop = lambda: False,
) -> list[RewardResult]:
    """The outcomes of all ranks' shares, in the order of the samples, on every rank. Collective.

    local: entered while this rank waits for its own share (`Phases.local`)
    should_stop: asked on this rank while it waits
    drop_failures: what has failed is returned as it is

    Raises: RewardError, on every rank, for the first failure, unless they are dropped; WatchdogTimeout, on every rank,
    where that was a process or a server that did not answer in time, or where the watchdog ends the wait on one;
    Interrupted, on every rank, when outcomes are missing because `should_stop` said so on one.
    """
    found: list[RewardResult] = []
    with raise_on_all_ranks(lambda reasons: RewardError(reasons[0])), local():
        found = waiting.wait(should_stop) or []
    found = [replace(o, error=f"{_where(name, mine, n)} {o.error}") if o.error else o for n, o in enumerate(found)]
    parts: list[tuple[list[RewardResult], int]] = [([], 0)] * dist.get_world_size()
    dist.all_gather_object(parts, (found, len(mine)))
    every = [outcome for part, _ in parts for outcome in part]
    if len(every) < (expected := sum(count for _, count in parts)):
        raise Interrupted(f"a reward was asked to stop with {len(every)} of {expected} samples done")
    failed = next((outcome for outcome in every if outcome.error), None)
    if failed is not None and not drop_failures:
        if failed.late:
            raise WatchdogTimeout(
                f"{failed.error}; rewards[].on_failure = drop goes on without such samples", agreed=True
            )
        raise RewardError(failed.error)
    return every


def _where(name: str, batch: RewardBatch, n: int) -> str:
    return (
        f"reward {name!r} on sample {batch.samples[n]} (prompt {short(batch.prompts[n])}, response "
        f"{short(batch.responses[n])})"
    )
