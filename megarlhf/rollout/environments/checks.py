"""Check of a user's environment class before anything is called. Only the standard library is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megarlhf.own_code.gymnasium import reset_keywords, why_refused
from megarlhf.own_code.load import load_function

_METHODS: Mapping[str, tuple[str, ...]] = {"reset": ("fields", "seed"), "step": ("turn",), "close": ()}
"""Methods of an environment and what they get. `close` may be missing."""
_GYMNASIUM_METHODS: Mapping[str, tuple[str, ...]] = {"reset": (), "step": ("action",), "close": ()}
"""Methods of an environment with gymnasium's interface. `reset` gets keywords besides, see `reset_keywords`."""


def check_environment(function: str, args: Mapping[str, Any], interface: str = "megarlhf") -> Callable[..., Any]:
    """Load the class of an environment, and check that it can be called as environments are.

    function: `package.module:name`
    args: arguments of the class, by keyword
    interface: `environment.interface`. With `gymnasium` it may be a function that makes the environment; then only its
        arguments are checked.

    Raises: ValueError if it cannot be loaded, is no class, lacks a method, or takes other arguments.
    """
    label = f"environment {function!r}"
    environment = load_function(function, "environment")
    is_gymnasium = interface == "gymnasium"
    if not inspect.isclass(environment) and not is_gymnasium:
        raise ValueError(
            f"{label} is {_kind(environment)}, expected a class with the methods reset(fields, seed) and step(turn); "
            "name the class, of which each conversation gets an object"
        )
    if inspect.isclass(environment):
        for method, parameters in (_GYMNASIUM_METHODS if is_gymnasium else _METHODS).items():
            _require_method(environment, method, parameters, label, is_gymnasium=is_gymnasium)
    if inspect.isabstract(environment):
        missing = ", ".join(sorted(getattr(environment, "__abstractmethods__", ())))
        raise ValueError(f"{label} is abstract: it has no {missing}; write the methods, or name a class that has them")
    if why := why_refused(environment, (), args):
        given = ", ".join(args) or "none"
        raise ValueError(
            f"{label} cannot be made with the arguments that are given ({given}): {why}; change environment.args, or "
            "the parameters of __init__"
        )
    return environment


def _require_method(
    environment: type, name: str, parameters: tuple[str, ...], label: str, *, is_gymnasium: bool
) -> None:
    """Check a method. Raises: ValueError if it is missing or takes other arguments."""
    method = getattr(environment, name, None)
    keywords = dict.fromkeys(reset_keywords(method)) if is_gymnasium and name == "reset" else {}
    call = f"{name}({', '.join([*parameters, *(f'{keyword}=...' for keyword in keywords)])})"
    if method is None and name == "close":
        return
    if not callable(method):
        got = "has no method" if method is None else f"has a {type(method).__name__} in place of the method"
        shown = "gymnasium_adapter" if is_gymnasium else "answer"
        raise ValueError(f"{label} {got} {call}; write one, as megarlhf/rollout/environments/{shown}.py shows")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ValueError(f"{label}: its method {name} is a generator; return the answer instead of yielding it")
    is_static = isinstance(inspect.getattr_static(environment, name), (staticmethod, classmethod))
    takes_self = inspect.isroutine(method) and not is_static
    if why := why_refused(method, ("self", *parameters) if takes_self else parameters, keywords):
        raise ValueError(f"{label}: its method {name} is called as {call}, which it does not take: {why}; change it")


def _kind(value: Any) -> str:
    return "a function" if inspect.isroutine(value) else f"an object of {type(value).__name__}"
