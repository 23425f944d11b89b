"""Loading of user code that is called once in each step: samplers of prompts, metrics and observers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megarlhf.own_code.advantage import require_parameters
from megarlhf.own_code.load import load_function


def load_sampler(path: str) -> Any:
    """The user's function or class of samplers.

    A function is called with (prompts, step, count, seed), and returns the numbers of `count` different prompts. A
    class is made with (prompts, seed). It has the methods choose(step, count), state_dict() and load_state_dict(state),
    and may have learn(chosen, rewards). Raises: ValueError for anything else.
    """
    label = f"sampler {path!r}"
    sampler = load_function(path, "sampler")
    if not inspect.isclass(sampler):
        if not inspect.isroutine(sampler):
            raise ValueError(f"{label} is an object of {type(sampler).__name__}; name the class or a function")
        require_parameters(sampler, ("prompts", "step", "count", "seed"), label)
        return sampler
    require_parameters(sampler, ("prompts", "seed"), label)
    methods = {"choose": ("step", "count"), "state_dict": (), "load_state_dict": ("state",)}
    if hasattr(sampler, "learn"):
        methods["learn"] = ("chosen", "rewards")
    for method, parameters in methods.items():
        if not callable(getattr(sampler, method, None)):
            raise ValueError(
                f"{label} has no method {method}({', '.join(parameters)}); a class may keep state, which a "
                "resume point saves: give it choose, state_dict and load_state_dict, or write a function (prompts, "
                "step, count, seed)"
            )
        require_parameters(getattr(sampler, method), ("self", *parameters), f"{label}, method {method}")
    return sampler


def load_observer(path: str, what: str) -> Callable[..., Any]:
    """A function of a step, or for an observer also a class. Raises: ValueError for anything else."""
    label = f"{what} {path!r}"
    function = load_function(path, what)
    if not inspect.isclass(function):
        require_parameters(function, ("step",), label)
        return function
    if what == "metric":
        raise ValueError(f"{label} is a class; a metric is a function of a step. observe.observers takes classes")
    require_parameters(function, (), label)
    after_step = getattr(function, "after_step", None)
    if not callable(after_step):
        raise ValueError(f"{label} has no method after_step(step); give it one, or name a function")
    require_parameters(after_step, ("self", "step"), f"{label}, method after_step")
    if hasattr(function, "state_dict") != hasattr(function, "load_state_dict"):
        raise ValueError(f"{label} has only one of state_dict and load_state_dict; give it both, or none")
    return function
