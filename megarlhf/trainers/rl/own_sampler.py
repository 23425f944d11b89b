"""Prompts of each step as a sampler of the user's own chooses them, such as a curriculum."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from megarlhf.collective_errors import require_same_items, user_code
from megarlhf.config import RLTrainConfig
from megarlhf.data.sample_types import PromptSample
from megarlhf.data.samples.dataset import Samples
from megarlhf.data.samples.order import ShuffledBatches, batches_of
from megarlhf.experience import Experience
from megarlhf.own_code.failures import short
from megarlhf.own_code.guarded import call, plain_state
from megarlhf.own_code.step_code import load_sampler
from megarlhf.trainers.rl.advantages import total_rewards


class _Prompts(Sequence[Any]):
    """The training prompts, of which every reading makes a copy."""

    def __init__(self, prompts: Sequence[PromptSample]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        return copy.deepcopy(self._prompts[number])


class OwnSampler:
    """Order of the prompts by the user's sampler. Every rank asks it, and all must choose alike."""

    name = "sampler"
    """Name of its state in a resume point."""

    def __init__(self, path: str, prompts: Sequence[PromptSample], count: int, seed: int) -> None:
        self._label, self._count, self._seed = f"sampler {path!r}", count, seed
        self._prompts = _Prompts(prompts)
        self._sampler = load_sampler(path)
        self._is_class = inspect.isclass(self._sampler)
        if count > len(prompts):
            raise ValueError(
                f"train.prompts_per_step = {count}, and data.train has {len(prompts)} prompts; lower it, or give more"
            )
        self._object: Any = self._new() if self._is_class else None
        self._chosen: dict[int, list[int]] = {}
        """Prompts by step, of the steps whose rewards are not known yet."""
        self._checks = 2
        """Steps of this process in which the choice is made twice. The second knows what the first has left behind."""

    def _new(self) -> Any:
        return call(self._sampler, self._label, self._prompts, self._seed)

    def take(self, step: int) -> list[int]:
        """Numbers of the prompts of a step that begins. Collective. Raises: OwnCodeError, on every rank."""
        chosen: list[int] = []
        with user_code():
            again = self._again() if self._checks else None
            chosen = self._choose(self._object, step)
            if self._checks and self._choose(again, step) != chosen:
                way = "a new one with its state" if self._is_class else "it"
                raise ValueError(
                    f"{self._label}: when {way} was asked again for step {step + 1}, it chose other prompts; it must "
                    "not depend on time, on chance or on anything that state_dict does not save"
                )
        require_same_items(
            f"prompts that {self._label} chose", chosen, "it must not depend on the rank, on time or on chance"
        )
        self._chosen[step], self._checks = chosen, max(0, self._checks - 1)
        return chosen

    def _again(self) -> Any:
        """Another object with the state of this one, as after a resume."""
        if self._object is None:
            return None
        again = self._new()
        call(again.load_state_dict, self._label, self._state())
        return again

    def _choose(self, sampler: Any, step: int) -> list[int]:
        if sampler is None:
            chosen = call(self._sampler, self._label, self._prompts, step, self._count, self._seed)
        else:
            chosen = call(sampler.choose, self._label, step, self._count)
        chosen = chosen.tolist() if hasattr(chosen, "tolist") else chosen
        size = len(self._prompts)
        valid = isinstance(chosen, Sequence) and all(isinstance(n, Integral) and 0 <= int(n) < size for n in chosen)
        if not valid or len(set(chosen)) != self._count or len(chosen) != self._count:
            raise ValueError(
                f"{self._label} chose {short(chosen)} for step {step + 1}; expected {self._count} different numbers of "
                f"prompts, from 0 to {size - 1}"
            )
        return [int(n) for n in chosen]

    def learn(self, step: int, experience: Experience) -> None:
        """Tell the sampler the mean reward of each prompt of a step, None without any. Collective."""
        chosen = self._chosen.pop(step, None)
        if chosen is None or not hasattr(self._object, "learn"):  # or another sampler chose them, before a resume
            return
        rewards_N, rewarded_N = total_rewards(experience).double().cpu(), experience.per_sample.get("rewarded")
        if rewarded_N is not None:
            rewards_N = rewards_N.masked_fill(~rewarded_N.cpu(), math.nan)
        per_prompt = rewards_N.view(len(chosen), -1)
        means = [None if math.isnan(mean) else mean for mean in per_prompt.nanmean(1).tolist()]
        with user_code():
            call(self._object.learn, self._label, chosen, means)

    def _state(self) -> dict[str, Any]:
        return plain_state(call(self._object.state_dict, self._label), self._label)

    def state_dict(self) -> dict[str, Any]:
        own = None if self._object is None else self._state()
        return {
            "sampler": self._label,
            "chosen": {str(step): chosen for step, chosen in self._chosen.items()},
            "own": own,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the sampler was. Another sampler than the one that was saved begins anew."""
        self._chosen = {int(step): list(chosen) for step, chosen in state["chosen"].items()}
        if self._object is not None and state["sampler"] == self._label:
            call(self._object.load_state_dict, self._label, copy.deepcopy(state["own"]))


PromptOrder = ShuffledBatches | OwnSampler
"""Choice of each step's prompts: by chance, or by the user's own sampler."""


def order_of(train: RLTrainConfig, seed: int, prompts: Samples[PromptSample]) -> PromptOrder:
    """The choice of prompts that the configuration names."""
    if train.sampler is not None:
        return OwnSampler(train.sampler, prompts, train.prompts_per_step, seed)
    return batches_of(prompts, train.prompts_per_step, seed, "train.prompts_per_step")


def tell(order: PromptOrder, step: int, experience: Experience) -> None:
    """Tell a sampler of the user's own the rewards of a step. Collective."""
    if isinstance(order, OwnSampler):
        order.learn(step, experience)
