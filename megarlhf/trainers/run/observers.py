"""The user's own metrics and observers: called on rank 0 after each step, with copies."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megarlhf.collective_errors import from_first_rank, on_first_rank, user_code
from megarlhf.config.observe import ObserveConfig
from megarlhf.observe.records.metrics import Metric
from megarlhf.own_code.guarded import call, plain_metrics, plain_state
from megarlhf.own_code.step_code import load_observer


@dataclass(frozen=True)
class StepSamples:
    """Samples of a step of rl, as an observer sees them. Axis N: samples; those of one prompt stand together."""

    prompts: list[str]
    fields: list[Mapping[str, Any]]
    """Other columns of each prompt's record."""
    responses: list[str]
    response_tokens: list[Tensor]
    """Sampled tokens of each sample."""
    per_sample: Mapping[str, Tensor]
    """Numbers of each sample [N]: `rewards`, `groups` and others."""
    per_token: Mapping[str, list[Tensor]]
    """Numbers of each sampled token, a tensor for each sample: `advantages`, `old_logprobs`, `rollout_logprobs` and
    others."""


@dataclass(frozen=True)
class Step:
    """A finished step, as metrics and observers see it."""

    command: str
    number: int
    """Number of the step; the first is 1."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    samples: StepSamples | None = None
    """Only in rl."""


class Observers:
    """Metrics and observers of a run, on every rank. Only rank 0 makes and calls them."""

    def __init__(self, cfg: ObserveConfig, command: str, *, is_main: bool) -> None:
        self._command, self._is_main, self._is_first = command, is_main, True
        self._labels: list[str] = []
        self._calls: list[Callable[[Step], Any]] = []
        self._objects: dict[str, Any] = {}
        """Observers that keep state, by import path."""
        self._states: dict[str, Any] = {}
        """Last good state of each, by import path."""
        on_first_rank(lambda: self._load(cfg))
        self._warnings: list[str] = []

    def _load(self, cfg: ObserveConfig) -> None:
        for what, paths in (("metric", cfg.metrics), ("observer", cfg.observers)):
            for path in paths:
                label = f"{what} {path!r}"
                function = load_observer(path, what)
                if inspect.isclass(function):
                    made = call(function, label)
                    if hasattr(made, "state_dict"):
                        self._objects[path] = made
                    function = made.after_step
                self._labels.append(label)
                self._calls.append(function)

    def after_step(self, number: int, metrics: Mapping[str, Metric], samples: StepSamples | None) -> dict[str, Metric]:
        """Metrics of the user's functions, the same on every rank. Collective.

        Raises: OwnCodeError, on every rank, for a failure in the first step of this process. A later one is a warning,
        as a run should not end for a figure.
        """
        result: dict[str, Metric] = {}
        with user_code():
            if self._is_main:
                result = self.observed(number, metrics, samples)
        self._is_first = False
        return from_first_rank(result)

    def observed(self, number: int, metrics: Mapping[str, Metric], samples: StepSamples | None) -> dict[str, Metric]:
        """Call every function on this rank; see `after_step`."""
        result: dict[str, Metric] = {}
        for label, function in zip(self._labels, self._calls, strict=True):
            try:
                step = Step(self._command, number, dict(metrics), copy.deepcopy(samples))
                returned = _by_name(label, call(function, label, step))
                result.update(plain_metrics(returned, label, {*metrics, *result}))
            except ValueError as error:
                if self._is_first:
                    raise
                self._warnings.append(f"WARNING: {error}. The run goes on without it")
        return result

    def take_warnings(self) -> list[str]:
        """Failures since the last call, on rank 0."""
        warnings, self._warnings = self._warnings, []
        return warnings

    @property
    def has_state(self) -> bool:
        return from_first_rank(bool(self._objects))

    def state_dict(self) -> dict[str, Any]:
        """State of each observer; after the first step the last good one where `state_dict` fails, with a warning."""
        for path, made in self._objects.items():
            label = f"observer {path!r}"
            try:
                self._states[path] = plain_state(call(made.state_dict, label), label)
            except ValueError as error:
                if self._is_first:
                    raise
                self._warnings.append(f"WARNING: {error}. Resume points keep its last good state")
        return copy.deepcopy(self._states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for path, made in self._objects.items():
            if path in state:  # an observer that was added since begins anew
                call(made.load_state_dict, f"observer {path!r}", copy.deepcopy(state[path]))


def _by_name(label: str, returned: Any) -> Mapping[Any, Any]:
    """Metrics by name, of what a function returned: a single number has the function's name."""
    if returned is None and label.startswith("observer "):
        return {}
    if returned is None:
        raise ValueError(f"{label} returned None, expected a number; a `return` may be missing")
    if isinstance(returned, Mapping):
        return returned
    return {label.partition("'")[2].rstrip("'").rpartition(":")[2]: returned}
