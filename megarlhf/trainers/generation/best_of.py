"""Selection of training data among several responses to a prompt: the best one for sft, or the best and the worst for
rm and dpo (rejection sampling).

Legend: N samples; those of one prompt stand together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megarlhf.data.samples.encoders import PromptSample

Selection = Literal["best", "best_and_worst"]


@dataclass(frozen=True)
class Candidate:
    """A response, and what it earned."""

    response: str
    reward: float


def candidates(
    responses: Sequence[str], finished_N: Tensor, rewards_N: Tensor, per_prompt: int
) -> tuple[list[list[Candidate]], Counter[str]]:
    """By prompt, those that may be chosen, in their order; and how many may not, by reason.

    A response that was cut has no end, and would teach none; of one without a reward nothing is known.
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
            # Sums that are equal on paper are equal: 0.1 + 0.2 and 0.3.
            by_prompt[n // per_prompt].append(Candidate(response, float(f"{float(rewards_N[n]):.12g}")))
    return by_prompt, left_out


def choose(
    by_prompt: Sequence[Sequence[Candidate]], selection: Selection, min_reward: float | None, pairs: int = 1
) -> tuple[list[list[tuple[Candidate, ...]]], Counter[str]]:
    """For each prompt what becomes a record of it: the best candidate, or the best and the worst, and then up to
    `pairs` in all the next best and the next worst, as long as they differ; none for a prompt that is left out, and how
    many are, by reason. Among equals the first drawn is taken, and no candidate is taken twice."""
    chosen: list[list[tuple[Candidate, ...]]] = []
    left_out: Counter[str] = Counter()
    for group in by_prompt:
        reason = _why_left_out(group, selection, min_reward)
        if reason:
            left_out[reason] += 1
            chosen.append([])
            continue
        best = sorted(group, key=lambda each: -each.reward)
        if selection == "best":
            chosen.append([(best[0],)])
            continue
        worst = sorted(group, key=lambda each: each.reward)
        both = list(zip(best, worst, strict=True))[:pairs]
        chosen.append([(better, worse) for better, worse in both if better.reward > worse.reward])
    return chosen, left_out


def _why_left_out(group: Sequence[Candidate], selection: Selection, min_reward: float | None) -> str:
    rewards = [each.reward for each in group]
    if not rewards:
        return "prompts_without_candidate"
    if min_reward is not None and max(rewards) < min_reward:
        return "prompts_below_min_reward"
    if selection == "best_and_worst" and max(rewards) == min(rewards):
        return "prompts_with_equal_rewards"
    return ""


def record_of(prompt: PromptSample, picked: Sequence[Candidate]) -> Mapping[str, Any]:
    """A line of training data: for sft from one candidate, for rm and dpo from two, the better one first; the prompt of
    two is a conversation where it was one."""
    rewards = {"reward": picked[0].reward} if len(picked) == 1 else {"rewards": [each.reward for each in picked]}
    fields = dict(prompt.fields)
    if prompt.messages is not None:
        fields.pop("system", None)  # is the first of the messages
        if len(picked) == 1:
            answer = {"role": "assistant", "content": picked[0].response}
            return {**fields, "messages": [*prompt.messages, answer], **rewards}
    asked = {"prompt": prompt.text if prompt.messages is None else prompt.messages}
    if len(picked) == 1:
        return {**fields, **asked, "response": picked[0].response, **rewards}
    return {**fields, **asked, "chosen": picked[0].response, "rejected": picked[1].response, **rewards}
