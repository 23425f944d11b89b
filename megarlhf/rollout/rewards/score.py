"""Rewards of a batch of responses: started on each rank for its share, then gathered on all ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.config import RewardConfig
from megarlhf.config.rewards import IN_WORKERS
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.errors import Interrupted, RewardError, WatchdogTimeout
from megarlhf.layout import split_evenly
from megarlhf.own_code.failures import short
from megarlhf.rollout.environments.environment import Environment
from megarlhf.rollout.rewards.batch import DeferredBatch, RewardBatch, RewardResult
from megarlhf.rollout.rewards.calls import call
from megarlhf.rollout.rewards.forms import Form
from megarlhf.rollout.rewards.http import HttpReward, require_plain_token
from megarlhf.rollout.rewards.pool import RewardPool
from megarlhf.rollout.rewards.rules import RULES, bind_rule, rule_form
from megarlhf.rollouts import Rollouts

ShouldStop = Callable[[], bool]


class PendingBatch(Protocol):
    """A batch whose rewards are being computed on this rank."""

    @property
    def done(self) -> int:
        """Number of results that are there."""
        ...

    def wait(self, should_stop: ShouldStop = ...) -> list[RewardResult] | None:
        """All results in the order of the batch; None if `should_stop` returned true first."""
        ...


class RewardSource(Protocol):
    """Source of rewards: a function in this process or in worker processes, a classifier, or a server."""

    def start(self, batch: RewardBatch) -> PendingBatch:
        """Begin to reward a batch, without waiting."""
        ...

    def close(self) -> None:
        """End processes and threads."""
        ...


@dataclass(frozen=True)
class _SomeRows:
    """Results of some rows of a batch; the others have no reward."""

    pending: PendingBatch | None
    rows: Sequence[int]
    size: int

    @property
    def done(self) -> int:
        return self.size - len(self.rows) + (self.pending.done if self.pending is not None else 0)

    def wait(self, should_stop: ShouldStop = lambda: False) -> list[RewardResult] | None:
        results = self.pending.wait(should_stop) if self.pending is not None else []
        if results is None:
            return None
        by_row = dict(zip(self.rows, results, strict=True))
        return [by_row.get(row, RewardResult()) for row in range(self.size)]


def start_rewards(source: RewardSource, batch: RewardBatch) -> PendingBatch:
    """Start the rewards of a batch, without those of conversations whose environment has failed."""
    if batch.failed is None or not any(batch.failed):
        return source.start(batch)
    rows = [row for row, failed in enumerate(batch.failed) if not failed]
    return _SomeRows(source.start(batch.part(rows)) if rows else None, rows, len(batch))


class InThisProcess:
    """A built-in rule, or a user's function with `workers: 0`."""

    def __init__(self, function: Callable[..., Any], form: Form, batch_samples: int | None = None) -> None:
        self._function, self._form, self._batch_samples = function, form, batch_samples

    def start(self, batch: RewardBatch) -> PendingBatch:
        size = self._batch_samples if self._form.batched else 1
        return DeferredBatch(lambda part: call_in_rank(self._function, self._form, part), batch, size)

    def close(self) -> None:
        pass


def call_in_rank(function: Callable[..., Any], form: Form, batch: RewardBatch) -> list[RewardResult]:
    return call(function, form, batch)


def make_source(reward: RewardConfig, device: torch.device) -> RewardSource:
    """The source of a reward that is no model of the run. Raises: ValueError for a reward that cannot be built."""
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
    function, form = bind_rule(name, reward.args), rule_form(name)
    if name in RULES and name not in IN_WORKERS:
        return InThisProcess(function, form)
    if not reward.workers:
        return InThisProcess(function, form, reward.batch_samples)
    return RewardPool(
        f"{RULES[name].__module__}:{name}" if name in RULES else name,
        form,
        args=reward.args,
        workers=reward.workers,
        timeout_seconds=reward.timeout_seconds,
        retries=reward.retries or 0,
        batch_samples=reward.batch_samples,
    )


def response_texts(rollouts: Rollouts, tokenizer: Tokenizer) -> list[str]:
    """Response texts as rules read them; of a conversation the last turn."""
    rows = zip(rollouts.last_turns, rollouts.finished_N.tolist(), strict=True)
    return [response_text(row.tolist(), tokenizer, finished=finished) for row, finished in rows]


def response_text(tokens: Sequence[int], tokenizer: Tokenizer, *, finished: bool) -> str:
    """Text of a response, as rules read it.

    A response that was cut may end inside a multi-byte character. The replacement character that marks it is removed.
    """
    text = tokenizer.decode(tokens, continuation=True)
    return text if finished else text.removesuffix("\N{REPLACEMENT CHARACTER}")


def local_reward_batch(
    prompts: Sequence[PromptSample], rollouts: Rollouts, tokenizer: Tokenizer, environment: Environment | None = None
) -> RewardBatch:
    """The samples that this rank rewards. `prompts` has one prompt for each sample of the step."""
    share = split_evenly(len(prompts), dist.get_world_size())[dist.get_rank()]
    rows, all_finished = rollouts.last_turns, rollouts.finished_N.tolist()
    local_prompts = [prompts[n] for n in share]
    responses, finished = [rows[n].tolist() for n in share], [all_finished[n] for n in share]
    ended = list(zip(responses, finished, strict=True))
    has_messages = any(prompt.messages is not None for prompt in local_prompts)
    names = _token_names(tokenizer) if has_messages else None  # type: ignore[arg-type]
    batch = RewardBatch(
        prompts=[prompt.text for prompt in local_prompts],
        responses=[response_text(tokens, tokenizer, finished=is_finished) for tokens, is_finished in ended],
        prompt_tokens=[prompt.tokens for prompt in local_prompts],
        response_tokens=responses,
        finished=finished,
        fields=[prompt.fields for prompt in local_prompts],
        messages=[prompt.messages for prompt in local_prompts],
        samples=list(share),
        ends=names and [names[tokens[-1]] if is_finished else "" for tokens, is_finished in ended],
    )
    if not rollouts.dialogues:
        return batch
    assert environment is not None, "conversations without an environment"
    transcripts = [environment.transcript(prompts[n], rollouts, n) for n in share]
    sequences = [rollouts.before_last_turn(n, prompts[n].tokens) for n in share]
    return replace(
        batch,
        prompts=[transcript.before for transcript in transcripts],
        responses=[transcript.turns[-1] for transcript in transcripts],
        prompt_tokens=sequences,
        messages=[transcript.messages for transcript in transcripts],
        turns=[transcript.turns for transcript in transcripts],
        failed=[rollouts.dialogues[n].ended_by == "failure" for n in share],
    )


@functools.lru_cache(maxsize=2)
def _token_names(tokenizer: Tokenizer) -> list[str]:
    return tokenizer.tokens()


def gather_rewards(
    name: str,
    pending: PendingBatch,
    local_batch: RewardBatch,
    num_samples: int,
    *,
    drop_failures: bool = False,
    local: Callable[[], AbstractContextManager[None]] = nullcontext,
    should_stop: ShouldStop = lambda: False,
) -> list[RewardResult]:
    """Results of all samples of the step, on every rank. Collective.

    num_samples: samples of all ranks together
    local: entered while this rank waits for its own share (`Phases.local`)
    should_stop: asked on this rank while it waits
    drop_failures: return failed results instead of raising

    Raises, on every rank: RewardError for the first failure, unless failures are dropped; WatchdogTimeout if that was a
    process or a server that did not answer in time, or if the watchdog ends the wait on a rank; Interrupted if results
    are missing because `should_stop` returned true on a rank.
    """
    local_results: list[RewardResult] = []
    with raise_on_all_ranks(lambda reasons: RewardError(reasons[0])), local():
        local_results = list(pending.wait(should_stop) or ())
    for n, result in enumerate(local_results):
        if result.error:
            local_results[n] = replace(result, error=f"{_describe_sample(name, local_batch, n)} {result.error}")
    parts: list[tuple[list[RewardResult], int]] = [([], 0)] * dist.get_world_size()
    dist.all_gather_object(parts, (local_results, num_samples))
    results = [result for part, _ in parts for result in part]
    if len(results) < num_samples:
        raise Interrupted(f"a reward was asked to stop with {len(results)} of {num_samples} samples done")
    failed = next((result for result in results if result.error), None)
    if failed is not None and not drop_failures:
        if failed.late:
            raise WatchdogTimeout(
                f"{failed.error}; rewards[].on_failure = drop goes on without such samples", agreed=True
            )
        raise RewardError(failed.error)
    return results


def _describe_sample(name: str, batch: RewardBatch, n: int) -> str:
    return (
        f"reward {name!r} on sample {batch.samples[n]} (prompt {short(batch.prompts[n])}, response "
        f"{short(batch.responses[n])})"
    )
