"""Steps from which nothing can be learnt: said on the terminal, with the likely causes and one sample.

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
from megarlhf.rollout.rewards.batch import short
from megarlhf.rollout.rewards.score import response_text

OF_REWARD = "reward/"
"""Prefix of the columns of single rewards in `Experience.per_sample`."""

CONSTANT_STEPS = 5
"""In a row with one value of a reward, after which that is said."""
_AGAIN = 5
"""Factor between two warnings about something that goes on: after 1, 5, 25, ... times the steps."""
_SHOWN = 200


class SignalWatch:
    """Counts steps in a row without anything to learn, and with one value of a reward."""

    def __init__(self) -> None:
        self._silent = 0
        self._constant: dict[str, tuple[float, int]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"silent": self._silent, "constant": {name: list(each) for name, each in self._constant.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._silent = state["silent"]
        self._constant = {name: (value, count) for name, (value, count) in state["constant"].items()}

    def watch(
        self, step: int, said: Mapping[str, Tensor], metrics: Mapping[str, Metric], *, grouped: bool = True
    ) -> list[str]:
        """Sentences about step `step` (1 is the first).

        said: what each reward said of the step's samples [N], by name; NaN: nothing
        metrics: of the step, as `rl.metrics.describe` makes them
        grouped: responses are compared within their group only
        """
        grouped = grouped and "groups_without_signal" in metrics
        silent = metrics["groups_without_signal"] == 1 if grouped else metrics["reward_std"] == 0
        self._silent = self._silent + 1 if silent else 0
        found = []
        if silent and _is_said(self._silent, 1):
            equal = "in each group all rewards are equal" if grouped else "all rewards are equal"
            again = f", for {self._silent} steps in a row" if self._silent > 1 else ""
            found.append(f"nothing can be learnt: {equal}{again} (reward_mean {metrics['reward_mean']:g})")
        for name, values_N in said.items():
            values = values_N[~values_N.isnan()]
            if not len(values):
                continue
            value, is_one = float(values[0]), bool((values == values[0]).all())
            before, count = self._constant.get(name, (value, 0))
            count = (count + 1 if value == before else 1) if is_one else 0
            self._constant[name] = (value, count)
            if step == 1 and is_one and value == 0:
                found.append(f"reward {name!r} is 0 for every sample of the first step")
            elif _is_said(count, CONSTANT_STEPS):
                found.append(f"reward {name!r} is {value:g} for every sample, for {count} steps in a row")
        return found


def _is_said(count: int, first: int) -> bool:
    times, rest = divmod(count, first)
    while times and times % _AGAIN == 0:
        times //= _AGAIN
    return times == 1 and not rest


def alarm(
    step: int,
    experience: Experience,
    metrics: Mapping[str, Metric],
    watch: SignalWatch,
    prompt_of: Callable[[int], PromptSample],
    tokenizer: Tokenizer,
    *,
    grouped: bool,
) -> str:
    """Sentences of `watch` about a step, the likely causes and the first sample; "" where there is nothing to say."""
    said = {n.removeprefix(OF_REWARD): v_N for n, v_N in experience.per_sample.items() if n.startswith(OF_REWARD)}
    if experience.num_samples == 1 or not (sentences := watch.watch(step, said, metrics, grouped=grouped)):
        return ""
    prompt, finished = prompt_of(int(experience.per_sample["records"][0])), experience.rollouts.finished_N
    rows = experience.rollouts.responses.rows()
    texts = [
        response_text(row.tolist(), tokenizer, finished=bool(end)) for row, end in zip(rows, finished, strict=True)
    ]
    gave = ", ".join(f"{name} {float(values_N[0]):g}" for name, values_N in said.items())
    return (
        f"WARNING step {step}: {'; '.join(sentences)}. Likely causes: {'; '.join(_causes(texts, finished, metrics))}. "
        f"The first sample: prompt ...{prompt.text[-_SHOWN:]!r}, response {_cut(texts[0])!r}, fields "
        f"{short(prompt.fields)}, rewards: {gave}"
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
        "the reward looks for another form of answer, or at another column, than the responses and records have"
    )
    causes.append("the task is too hard for the model (algo.dynamic_sampling draws other prompts)")
    return causes


def _cut(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} ... {text[-_SHOWN:]}"
