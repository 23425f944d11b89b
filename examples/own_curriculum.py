"""An own sampler of prompts: those first that are solved about half of the time, from which most is learnt.

It keeps the mean reward of each prompt, so it is a class whose state goes into resume points. After `make demo`:

    PYTHONPATH=examples megarlhf rl -c configs/demo/grpo.yaml run.dir=runs/curriculum \
        run.on_existing=resume checkpoint.every=1 \
        train.sampler=own_curriculum:HalfSolved "observe.metrics=['own_curriculum:hardest']"
"""

import random
from collections.abc import Sequence
from typing import Any

import megarlhf


class HalfSolved:
    """Prompts by the distance of their mean reward from 0.5; new prompts come before those that were tried."""

    def __init__(self, prompts: Sequence[Any], seed: int) -> None:
        self.count, self.seed = len(prompts), seed
        self.rewards: dict[str, float] = {}  # by number of the prompt, as text: JSON keeps no numbers as keys

    def choose(self, step: int, count: int) -> list[int]:
        """Numbers of the step's prompts. Ties are broken by chance that depends on seed and step only."""
        chance = random.Random(f"{self.seed}/{step}")
        order = [(abs(self.rewards.get(str(n), 0.5) - 0.5), str(n) in self.rewards, chance.random(), n)
                 for n in range(self.count)]  # fmt: skip
        return [number for *_, number in sorted(order)[:count]]

    def learn(self, chosen: Sequence[int], rewards: Sequence[float | None]) -> None:
        """Take over the mean rewards of the prompts of a step; half of the old mean stays."""
        for number, reward in zip(chosen, rewards, strict=True):
            if reward is not None:
                before = self.rewards.get(str(number), reward)
                self.rewards[str(number)] = (before + reward) / 2

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": self.rewards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards = dict(state["rewards"])


def hardest(step: megarlhf.Step) -> dict[str, float]:
    """A metric: the lowest reward of the step, and the length of that response."""
    samples = step.samples
    lowest = int(samples.per_sample["rewards"].argmin())
    return {"lowest_reward": float(samples.per_sample["rewards"][lowest]),
            "length_of_lowest": len(samples.response_tokens[lowest])}  # fmt: skip
