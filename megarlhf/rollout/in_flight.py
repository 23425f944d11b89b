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
class Draft:
    """Samples of a step, as far as they are drawn."""

    step: int
    prompts: tuple[int, ...]
    """Number of each prompt in the training data. The samples of a prompt stand together."""
    begun: int
    """Version that drew the first tokens, or 0 if the rule has an earlier one."""
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
        """Whole responses to prompts, which belong to no draft."""
        return cls(list(prompts), list(seeds), [ResponsePart((), max_tokens)] * len(prompts), [])


class InFlight:
    """The drafts of a run, by step."""

    def __init__(self, rule: SliceRule) -> None:
        self.rule = rule
        self._drafts: dict[int, Draft] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._drafts

    @property
    def num_tokens(self) -> int:
        """Tokens of samples that are not trained on yet."""
        return sum(draft.num_tokens for draft in self._drafts.values())

    def begin(self, step: int, prompts: Sequence[int], num_samples: int, version: int) -> bool:
        """Begin the samples of a step.

        Returns: whether an earlier version should have begun it, which is gone: the run was prolonged
        """
        late = version > max(0, self.rule.version(step, 0))
        self._drafts[step] = Draft(step, tuple(prompts), version if late else 0, Rollouts.empty(num_samples))
        return late

    def requests(
        self, version: int, prompt_of: Callable[[int], Tensor], seed_of: Callable[[int, int], int]
    ) -> Requests:
        """Parts that this version has to draw.

        prompt_of: prompt of a number in the training data
        seed_of:   seed of a step's sample
        """
        requests = Requests([], [], [], [])
        for step, draft in sorted(self._drafts.items()):
            until, responses = self.rule.until(step, version), draft.rollouts.responses.rows()
            per_prompt = len(responses) // len(draft.prompts)
            prompts: dict[int, Tensor] = {}
            for n in draft.unfinished(until):
                number = draft.prompts[n // per_prompt]
                prompt = prompts[number] = prompts[number] if number in prompts else prompt_of(number)
                requests.prompts.append(torch.cat([prompt, responses[n]]) if len(responses[n]) else prompt)
                requests.seeds.append(seed_of(step, n))
                requests.parts.append(ResponsePart(responses[n].tolist(), until))
                requests.origins.append((step, n))
        return requests

    def extend(self, requests: Requests, drawn: Rollouts) -> None:
        """Add what was drawn for the requests."""
        if not self.rule.lag and len(self._drafts) == 1:  # drawn whole: they stay on the device
            ((step, draft),) = self._drafts.items()
            self._drafts[step] = replace(draft, rollouts=drawn)
            return
        drawn = drawn.to("cpu")
        for step, draft in self._drafts.items():
            rows = [row for row, (origin, _) in enumerate(requests.origins) if origin == step]
            if rows:
                more = Rollouts.joined([(drawn, rows)])
                samples = [requests.origins[row][1] for row in rows]
                self._drafts[step] = replace(draft, rollouts=draft.rollouts.extended(samples, more))

    def take(self, step: int) -> Draft:
        """The samples of a step, which are whole now.

        Raises: RuntimeError where another version drew a token than the rule says.
        """
        draft = self._drafts.pop(step)
        assert not draft.unfinished(self.rule.max_tokens), f"samples of step {step} are not whole"
        lengths = draft.rollouts.responses.lengths_N.tolist()
        expected = [self.rule.runs(step, length, draft.begun) for length in lengths]
        draft.rollouts.versions.require_runs(VersionRuns.from_rows(expected))
        return draft

    def state_dict(self) -> dict[str, Any]:
        """Drafts as tensors, numbers and mappings; empty where nothing is in flight."""
        return {
            str(step): {"prompts": list(draft.prompts), "begun": draft.begun, **draft.rollouts.state_dict()}
            for step, draft in self._drafts.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drafts = {
            int(step): Draft(int(step), tuple(kept["prompts"]), kept["begun"], Rollouts.from_state_dict(kept).to("cpu"))
            for step, kept in state.items()
        }
