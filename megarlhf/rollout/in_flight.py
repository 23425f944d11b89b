"""Samples of coming steps whose responses are not whole yet, where responses are drawn in slices (`slices.py`).

Every rank has them, on the CPU. A resume point holds them: older weights drew them, so they could not be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megarlhf.experience import Rollouts, VersionRuns
from megarlhf.rollout.engine import ResponsePart
from megarlhf.rollout.slices import SliceRule


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
        goes_on_N = ~self.rollouts.finished_N & (self.rollouts.responses.lengths_N < until)
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

    @classmethod
    def whole(cls, prompts: Sequence[Tensor], seeds: Sequence[int], max_tokens: int) -> Requests:
        """Whole responses to prompts, which no later part follows."""
        return cls(list(prompts), list(seeds), [ResponsePart((), max_tokens)] * len(prompts), [])


class InFlight:
    """The samples of coming steps, by step."""

    def __init__(self, rule: SliceRule) -> None:
        self.rule = rule
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
        nothing = Rollouts.empty(len(prompts) * per_prompt)
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
            until, responses = self.rule.until(step, version), samples.rollouts.responses.rows()
            per_prompt = len(responses) // len(samples.prompts)
            prompts: dict[int, Tensor] = {}
            for n in samples.unfinished(until):
                number = samples.prompts[n // per_prompt]
                prompt = prompts[number] = prompts[number] if number in prompts else prompt_of(number)
                requests.prompts.append(torch.cat([prompt, responses[n]]) if len(responses[n]) else prompt)
                requests.seeds.append(seed_of(step, n))
                requests.parts.append(ResponsePart(responses[n].numpy(), until))
                requests.origins.append((step, n))
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
                numbers = [requests.origins[row][1] for row in rows]
                self._by_step[step] = replace(samples, rollouts=samples.rollouts.extended(numbers, more))

    def take(self, step: int) -> PartialSamples:
        """The samples of a step, which are whole now.

        Raises: RuntimeError where another version drew a token than the rule says.
        """
        samples = self._by_step.pop(step)
        assert not samples.unfinished(self.rule.max_tokens), f"samples of step {step} are not whole"
        lengths = samples.rollouts.responses.lengths_N.tolist()
        expected = [self.rule.runs(step, length, samples.first_version) for length in lengths]
        samples.rollouts.versions.require_runs(VersionRuns.from_rows(expected))
        return samples

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
