"""Warnings about steps from which nothing can be learnt, with the likely causes and one sample.

Legend: N samples of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.experience import Experience
from megarlhf.observe.records.metrics import Metric
from megarlhf.own_code.failures import short
from megarlhf.rollout.rewards.score import response_texts

_PREFIX = "reward/"
"""Prefix of the columns of single rewards in `Experience.per_sample`."""
CONSTANT_STEPS = 5
"""Steps in a row in which a reward has one value for all samples, before a warning."""
_AGAIN = 5
"""Factor between two warnings about the same thing: after 1, 5, 25, ... times the steps."""
_SHOWN = 200
"""Characters of the sample's texts that a warning shows."""


class SignalWatch:
    """Counts steps in a row without anything to learn, and with a single value of a reward."""

    def __init__(self) -> None:
        self._silent = 0
        self._constant: dict[str, tuple[float, int]] = {}
        """For each reward: its value in the last step, and the steps in a row in which all samples had it."""

    def state_dict(self) -> dict[str, Any]:
        return {"silent": self._silent, "constant": {name: list(pair) for name, pair in self._constant.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._silent = state["silent"]
        self._constant = {name: (value, count) for name, (value, count) in state["constant"].items()}

    def watch(
        self, number: int, rewards: Mapping[str, Tensor], metrics: Mapping[str, Metric], *, grouped: bool = True
    ) -> list[str]:
        """Warnings about step `number`, from 1.

        rewards: values of each reward for the step's samples [N], by name; NaN where it does not apply
        metrics: the step's, from `rl.metrics.describe`
        grouped: responses are compared within their group only
        """
        grouped = grouped and "groups_without_signal" in metrics
        silent = metrics["groups_without_signal"] == 1 if grouped else metrics["reward_std"] == 0
        self._silent = self._silent + 1 if silent else 0
        warnings = []
        if silent and _is_reported(self._silent, 1):
            equal = "in each group all rewards are equal" if grouped else "all rewards are equal"
            again = f", for {self._silent} steps in a row" if self._silent > 1 else ""
            warnings.append(f"nothing can be learnt: {equal}{again} (reward_mean {metrics['reward_mean']:g})")
        for name, values_N in rewards.items():
            values = values_N[~values_N.isnan()]
            if not len(values):
                continue
            value, is_one = float(values[0]), bool((values == values[0]).all())
            before, count = self._constant.get(name, (value, 0))
            count = (count + 1 if value == before else 1) if is_one else 0
            self._constant[name] = (value, count)
            if number == 1 and is_one and value == 0:
                warnings.append(f"reward {name!r} is 0 for every sample of the first step")
            elif _is_reported(count, CONSTANT_STEPS):
                warnings.append(f"reward {name!r} is {value:g} for every sample, for {count} steps in a row")
        return warnings


def rewards_by_name(experience: Experience) -> dict[str, Tensor]:
    """Values of each reward for a step's samples, [N]."""
    columns = experience.per_sample.items()
    return {name.removeprefix(_PREFIX): values_N for name, values_N in columns if name.startswith(_PREFIX)}


def _is_reported(count: int, first: int) -> bool:
    """Whether `count` is `first` times a power of `_AGAIN`."""
    times, rest = divmod(count, first)
    while times and times % _AGAIN == 0:
        times //= _AGAIN
    return times == 1 and not rest


def signal_warning(
    number: int,
    experience: Experience,
    metrics: Mapping[str, Metric],
    watch: SignalWatch,
    prompt_of: Callable[[int], PromptSample],
    tokenizer: Tokenizer,
    *,
    grouped: bool,
) -> str:
    """Warnings of `watch` about step `number`, with the likely causes and the first sample; "" without a warning."""
    rewards = rewards_by_name(experience)
    if experience.num_samples == 1 or not (warnings := watch.watch(number, rewards, metrics, grouped=grouped)):
        return ""
    prompt, finished = prompt_of(int(experience.per_sample["records"][0])), experience.rollouts.finished_N
    texts = response_texts(experience.rollouts, tokenizer)
    first = ", ".join(f"{name} {float(values_N[0]):g}" for name, values_N in rewards.items())
    return (
        f"WARNING step {number}: {'; '.join(warnings)}. Likely causes: {'; '.join(_causes(texts, finished, metrics))}. "
        f"The first sample: prompt ...{prompt.text[-_SHOWN:]!r}, response {_cut(texts[0])!r}, fields "
        f"{short(prompt.fields)}, rewards: {first}"
    )


def _causes(texts: list[str], finished_N: Tensor, metrics: Mapping[str, Metric]) -> list[str]:
    causes = []
    if float(finished_N.float().mean()) < 0.5:
        causes.append("most responses are cut before their end (rollout.max_response_tokens)")
    if len(set(texts)) == 1:
        causes.append("all responses are the same (rollout.temperature, or a model that is sure)")
    if (metrics["reward_mean"] or 0) > 0:
        causes.append("the task is so easy, or the reward so lenient, that every response earns the same")
    causes.append(
        "the reward expects another form of answer, or reads another column, than the responses and records have"
    )
    causes.append("the task is too hard for the model (algo.dynamic_sampling draws other prompts)")
    return causes


def _cut(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} ... {text[-_SHOWN:]}"
