"""The rule of `rollout.slices` and `rollout.steps_ahead`: which version of the weights draws which token.

Steps count from 0, and version v is the actor after v steps. A response is drawn in P slices of at most B tokens, B =
ceil(max_tokens / P). Slice i of the samples of step k is drawn with version max(0, k - A - (P - 1) + i), where A is
`steps_ahead`. Before its update, step v draws what version v has to draw: with P = 3 and A = 0, the last slice of its
own samples, the second of those of step v + 1, and the first of those of step v + 2.

So the tokens of a sample follow from the configuration alone, never from the time that something takes. With P = 1 and
A = 0 each step draws its own samples whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarlhf.config import RolloutConfig


@dataclass(frozen=True)
class SliceRule:
    """Slices of the responses of a run."""

    slices: int
    """P."""
    steps_ahead: int
    """A."""
    max_tokens: int
    """Longest response."""

    @classmethod
    def of(cls, rollout: RolloutConfig) -> SliceRule:
        """The rule of a configuration."""
        return cls(rollout.slices, rollout.steps_ahead, rollout.max_response_tokens)

    @property
    def slice_tokens(self) -> int:
        """B, the most tokens of a slice."""
        return -(-self.max_tokens // self.slices)

    @property
    def lag(self) -> int:
        """Steps between the first slice of a response and the training on it."""
        return self.steps_ahead + self.slices - 1

    def version(self, step: int, token: int, begun: int = 0) -> int:
        """Version that draws token number `token` (0 is the first) of the samples of `step`.

        begun: version at which the samples could first be drawn; above 0 only in a run that was prolonged
        """
        return max(begun, step - self.lag + token // self.slice_tokens)

    def steps(self, version: int, num_steps: int) -> range:
        """Steps whose samples are not whole when `version` begins to draw. The first is the step that trains then."""
        return range(version, min(version + self.lag + 1, num_steps))

    def until(self, step: int, version: int) -> int:
        """Length up to which the responses of `step` are drawn when `version` has drawn."""
        slices_drawn = version - step + self.lag + 1
        return min(self.max_tokens, max(0, slices_drawn) * self.slice_tokens)

    def runs(self, step: int, length: int, begun: int = 0) -> list[tuple[int, int]]:
        """Runs (version, number of tokens) of a response of `length` tokens of a step's samples."""
        runs: list[tuple[int, int]] = []
        for start in range(0, length, self.slice_tokens):
            version, count = self.version(step, start, begun), min(self.slice_tokens, length - start)
            if runs and runs[-1][0] == version:
                count += runs.pop()[1]
            runs.append((version, count))
        return runs

    def runs_at(self, step: int, positions: Tensor, begun: int = 0) -> list[tuple[int, int]]:
        """Runs of a sample whose sampled tokens stand at these positions after its prompt, such as a conversation's."""
        versions = (step - self.lag + positions // self.slice_tokens).clamp(min=begun)
        values, counts = versions.unique_consecutive(return_counts=True)
        return list(zip(values.tolist(), counts.tolist(), strict=True))


def describe_rounds(rule: SliceRule, num_samples: int, num_engines: int, cache_tokens: int | None, longest: int) -> str:
    """Sentence about the responses that one step draws from, and how many of them wait for room in an engine's cache.

    num_samples:  samples of a step
    cache_tokens: tokens of an engine's cache; None where it has none
    longest:      tokens of the longest prompt and response
    """
    most = -(-rule.slices * num_samples // num_engines)
    drawn = (
        f"rollout.slices = {rule.slices}, rollout.steps_ahead = {rule.steps_ahead}: a step draws up to "
        f"{rule.slice_tokens} tokens of each of up to {rule.slices * num_samples} responses, {most} an engine (in the "
        f"first step more); tokens are up to {rule.lag} steps old when they are trained on"
    )
    if cache_tokens is None:
        return drawn
    at_once = cache_tokens // longest
    if at_once >= most:
        return f"{drawn}. All fit an engine's cache of {cache_tokens:,} tokens at once"
    return (
        f"{drawn}. An engine's cache of {cache_tokens:,} tokens holds {at_once} of the longest ({longest:,} tokens): "
        f"up to {most - at_once} of {most} wait for room, which more slices make longer"
    )
