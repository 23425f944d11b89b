"""Samples of coming steps whose responses are not whole yet, where responses are drawn in slices (`slices.py`).

Every rank has them, on the CPU. A resume point holds them: older weights drew them, so they could not be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megarlhf.rollout.responses import Response, ResponsePart, responses_of
from megarlhf.rollout.slices import SliceRule
from megarlhf.rollouts import Rollouts, VersionRuns


@dataclass(frozen=True)
class PartialSamples:
    """Samples of a step, as far as they are drawn."""

    prompts: tuple[int, ...]
    """Number of each prompt in the training data. The samples of a prompt stand together."""
    first_version: int
    """Version that drew the first tokens, if that is another than by the rule; otherwise 0."""
    rollouts: Rollouts

    def unfinished(self, until: int) -> list[int]:
        """Samples that go on, up to `until` tokens."""
        over_N = self.rollouts.finished_N
        if self.rollouts.dialogues:
            over_N = torch.tensor([talk.is_over for talk in self.rollouts.dialogues])
        goes_on_N = ~over_N & (self.rollouts.positions_N < until)
        return goes_on_N.nonzero().flatten().tolist()

    @property
    def num_tokens(self) -> int:
        return self.rollouts.responses.num_tokens


@dataclass(frozen=True)
class Requests:
    """Parts of responses that one version of the weights draws, as an engine takes them."""

    prompts: list[Tensor]
    """Prompt of each row, and the tokens that its response has."""
    seeds: list[int]
    parts: list[ResponsePart]
    origins: list[tuple[int, int]]
    """Step and number of each row's sample."""
    numbers: list[int] = field(default_factory=list)
    """Number of each row's prompt in the training data."""
    begun: list[Response] = field(default_factory=list)
    """Conversations with an environment, as far as they are drawn; empty where there is no environment."""

    @classmethod
    def whole(cls, prompts: Sequence[Tensor], seeds: Sequence[int], max_tokens: int) -> Requests:
        """Whole responses to prompts, which no later part follows."""
        return cls(list(prompts), list(seeds), [ResponsePart((), max_tokens)] * len(prompts), [])


class InFlight:
    """The samples of coming steps, by step."""

    def __init__(self, rule: SliceRule, *, conversations: bool = False) -> None:
        """conversations: samples are conversations with an environment"""
        self.rule, self._conversations = rule, conversations
        self._by_step: dict[int, PartialSamples] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._by_step

    @property
    def num_tokens(self) -> int:
        """Tokens of samples that are not trained on yet."""
        return sum(samples.num_tokens for samples in self._by_step.values())

    def prompts_of(self, step: int) -> tuple[int, ...]:
        """Numbers of a step's prompts in the training data."""
        return self._by_step[step].prompts

    def drop_from(self, num_steps: int) -> int:
        """Drop samples of steps after the last of a run, and return the number of their tokens."""
        dropped = [self._by_step.pop(step) for step in list(self._by_step) if step >= num_steps]
        return sum(samples.num_tokens for samples in dropped)

    def begin(self, step: int, prompts: Sequence[int], per_prompt: int, version: int) -> bool:
        """Begin `per_prompt` samples of each prompt of a step.

        Returns: whether an earlier version should have begun them, which is gone: the run was prolonged
        """
        late = version > max(0, self.rule.version(step, 0))
        nothing = Rollouts.empty(len(prompts) * per_prompt, conversations=self._conversations)
        self._by_step[step] = PartialSamples(tuple(prompts), version if late else 0, nothing)
        return late

    def requests(
        self, version: int, prompt_of: Callable[[int], Tensor], seed_of: Callable[[int, int], int]
    ) -> Requests:
        """Parts that this version has to draw.

        prompt_of: prompt of a number in the training data
        seed_of:   seed of a step's sample
        """
        requests = Requests([], [], [], [])
        for step, samples in sorted(self._by_step.items()):
            until, unfinished = self.rule.until(step, version), samples.unfinished(self.rule.until(step, version))
            rollouts = Rollouts.joined([(samples.rollouts, unfinished)]) if unfinished else None
            if rollouts is None:
                continue
            per_prompt = len(samples.rollouts.finished_N) // len(samples.prompts)
            prompts: dict[int, Tensor] = {}
            for n, written, opening in zip(unfinished, rollouts.written.rows(), rollouts.openings, strict=True):
                number = samples.prompts[n // per_prompt]
                prompt = prompts[number] = prompts[number] if number in prompts else prompt_of(number)
                row = torch.cat([prompt if opening is None else opening, written]) if len(written) else prompt
                requests.prompts.append(row)
                requests.seeds.append(seed_of(step, n))
                requests.parts.append(ResponsePart(row[len(prompt) :].numpy(), until))
                requests.origins.append((step, n))
                requests.numbers.append(number)
            if rollouts.dialogues:
                requests.begun.extend(responses_of(rollouts))
        return requests

    def extend(self, requests: Requests, drawn: Rollouts) -> None:
        """Add what was drawn for the requests."""
        if not self.rule.lag and len(self._by_step) == 1:  # drawn whole: they stay on the device
            ((step, samples),) = self._by_step.items()
            self._by_step[step] = replace(samples, rollouts=drawn)
            return
        drawn = drawn.to("cpu")
        for step, samples in self._by_step.items():
            rows = [row for row, (origin, _) in enumerate(requests.origins) if origin == step]
            if rows:
                more = Rollouts.joined([(drawn, rows)])
                numbers, so_far = [requests.origins[row][1] for row in rows], samples.rollouts
                whole = so_far.replaced(numbers, more) if more.dialogues else so_far.extended(numbers, more)
                self._by_step[step] = replace(samples, rollouts=whole)

    def take(self, step: int) -> PartialSamples:
        """The samples of a step, which are whole now.

        Raises: RuntimeError where another version drew a token than the rule says.
        """
        samples = self._by_step.pop(step)
        assert not samples.unfinished(self.rule.max_tokens), f"samples of step {step} are not whole"
        samples.rollouts.versions.require_runs(VersionRuns.from_rows(self._expected_runs(step, samples)))
        return samples

    def _expected_runs(self, step: int, samples: PartialSamples) -> list[list[tuple[int, int]]]:
        """Versions that draw each token of a step's samples by the rule."""
        rollouts, begun = samples.rollouts, samples.first_version
        lengths = rollouts.responses.lengths_N.tolist()
        if rollouts.stretches is None:
            return [self.rule.runs(step, length, begun) for length in lengths]
        positions = rollouts.stretches.positions_T.split(lengths)
        return [
            self.rule.runs_at(step, row + talk.added, max(begun, talk.begun))
            for row, talk in zip(positions, rollouts.dialogues, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Samples as tensors, numbers and mappings; empty where nothing is in flight."""
        return {
            str(step): {
                "prompts": list(samples.prompts),
                "first_version": samples.first_version,
                **samples.rollouts.state_dict(),
            }
            for step, samples in self._by_step.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._by_step = {
            int(step): PartialSamples(
                tuple(kept["prompts"]), kept["first_version"], Rollouts.from_state_dict(kept).to("cpu")
            )
            for step, kept in state.items()
        }
