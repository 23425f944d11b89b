"""Selection of training data among several responses to a prompt (rejection sampling): the best one for sft, or the
best and the worst for rm and dpo.

Legend: N samples, in the order of their prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megarlhf.data.samples.encoders import PromptSample
from megarlhf.rollout.environments.transcript import Transcript

Selection = Literal["best", "best_and_worst"]


@dataclass(frozen=True)
class Candidate:
    """A response and its reward."""

    response: str
    reward: float
    transcript: Transcript | None = None
    """The whole conversation, if an environment has answered the model."""


def candidates(
    responses: Sequence[str],
    finished_N: Tensor,
    rewards_N: Tensor,
    per_prompt: int,
    transcripts: Sequence[Transcript] | None = None,
) -> tuple[list[list[Candidate]], Counter[str]]:
    """Responses of each prompt that may be chosen, in their order, and the number of others by reason.

    Responses without a reward, without text, or cut before their end are left out: a cut one would teach no end.
    """
    left_out: Counter[str] = Counter()
    by_prompt: list[list[Candidate]] = [[] for _ in range(len(responses) // per_prompt)]
    for n, response in enumerate(responses):
        reason = ""
        if bool(rewards_N[n].isnan()):
            reason = "responses_without_reward"
        elif not bool(finished_N[n]):
            reason = "responses_cut"
        elif not response.strip():
            reason = "responses_empty"
        if reason:
            left_out[reason] += 1
        else:
            # Rounded, so that sums that are equal on paper are equal: 0.1 + 0.2 and 0.3.
            whole = None if transcripts is None else transcripts[n]
            by_prompt[n // per_prompt].append(Candidate(response, float(f"{float(rewards_N[n]):.12g}"), whole))
    return by_prompt, left_out


def choose(
    by_prompt: Sequence[Sequence[Candidate]], selection: Selection, min_reward: float | None, pairs: int = 1
) -> tuple[list[list[tuple[Candidate, ...]]], Counter[str]]:
    """Choose the candidates of each prompt's records; returns the number of prompts that are left out, by reason, too.

    `best`: one record with the best candidate. `best_and_worst`: up to `pairs` records, the best with the worst, then
    the next best with the next worst, as long as their rewards differ. Among equals the first drawn is taken. No
    candidate is taken twice. A prompt that is left out has no records.
    """
    chosen: list[list[tuple[Candidate, ...]]] = []
    left_out: Counter[str] = Counter()
    for group in by_prompt:
        reason = _why_left_out(group, selection, min_reward)
        if reason:
            left_out[reason] += 1
            chosen.append([])
            continue
        best = sorted(group, key=lambda candidate: -candidate.reward)
        if selection == "best":
            chosen.append([(best[0],)])
            continue
        worst = sorted(group, key=lambda candidate: candidate.reward)
        matched = list(zip(best, worst, strict=True))[:pairs]
        chosen.append([(better, worse) for better, worse in matched if better.reward > worse.reward])
    return chosen, left_out


def _why_left_out(group: Sequence[Candidate], selection: Selection, min_reward: float | None) -> str:
    rewards = [candidate.reward for candidate in group]
    if not rewards:
        return "prompts_without_candidate"
    if min_reward is not None and max(rewards) < min_reward:
        return "prompts_below_min_reward"
    if selection == "best_and_worst" and max(rewards) == min(rewards):
        return "prompts_with_equal_rewards"
    return ""


def record_of(prompt: PromptSample, picked: Sequence[Candidate]) -> Mapping[str, Any]:
    """Record of training data: for sft from one candidate, for rm and dpo from two, the better one first. A prompt that
    was a conversation stays one."""
    fields, responses = dict(prompt.fields), [candidate.response for candidate in picked]
    if prompt.messages is not None:
        fields.pop("system", None)  # is the first of the messages
    question = {"prompt": prompt.text if prompt.messages is None else prompt.messages}
    if len(picked) == 2:
        rewards = [candidate.reward for candidate in picked]
        return {**fields, **question, "chosen": responses[0], "rejected": responses[1], "rewards": rewards}
    if (transcript := picked[0].transcript) is not None:
        texts = {"prompt": transcript.before, "response": transcript.turns[-1]}
        spoken = texts if transcript.whole is None else {"messages": transcript.whole}
        return {**fields, **spoken, "reward": picked[0].reward}
    if prompt.messages is not None:
        answer = {"role": "assistant", "content": responses[0]}
        return {**fields, "messages": [*prompt.messages, answer], "reward": picked[0].reward}
    return {**fields, **question, "response": responses[0], "reward": picked[0].reward}
