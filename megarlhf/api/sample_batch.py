"""Samples of a user's own loop: prompts, responses, and which of them belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megarlhf.experience import Experience
from megarlhf.rollouts import Rollouts


@dataclass(frozen=True)
class SampleBatch:
    """Responses of the model, the same on every rank. `Loop.generate` makes them.

    Example: with 2 prompts and 2 samples of each, `groups` is [0, 0, 1, 1].
    """

    texts: list[str]
    """Text of each response."""
    prompts: list[str]
    """Text of each sample's prompt: prompts are repeated for their samples."""
    experience: Experience = field(repr=False)
    """Tokens, log-probs and lengths as the trainer reads them. Private."""

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def groups(self) -> Tensor:
        """Number of each sample's prompt, [N] int64: what `group_relative` and `leave_one_out` take."""
        return self.experience.groups_N.clone()

    @property
    def prompt_tokens(self) -> list[list[int]]:
        """Token ids of each sample's prompt."""
        return [prompt.tolist() for prompt in self.experience.prompts]

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids of each response, with its end token if it has one."""
        return [row.tolist() for row in self.experience.rollouts.responses.rows()]

    @property
    def logprobs(self) -> list[Tensor]:
        """The engine's log-prob of each token, in nats, [T] for each response."""
        return [row.clone() for row in self.experience.rollouts.logprobs.rows()]

    @property
    def finished(self) -> list[bool]:
        """Whether each response has ended by itself, not by `rollout.max_response_tokens`."""
        return [bool(value) for value in self.experience.rollouts.finished_N]

    def select(self, numbers: Sequence[int]) -> SampleBatch:
        """Keep some samples, in this order, such as the best of each prompt. Raises: ValueError for an empty list, and
        for a number that is there twice or outside."""
        numbers = [int(n) for n in numbers]
        if not numbers or len(set(numbers)) != len(numbers) or not all(0 <= n < len(self) for n in numbers):
            raise ValueError(f"select got {numbers[:20]}; give each of some numbers from 0 to {len(self) - 1} once")
        experience = self.experience
        chosen = Experience(
            prompts=tuple(experience.prompts[n] for n in numbers),
            groups_N=experience.groups_N[numbers],
            rollouts=Rollouts.joined([(experience.rollouts, numbers)]),
        )
        return SampleBatch([self.texts[n] for n in numbers], [self.prompts[n] for n in numbers], chosen)
