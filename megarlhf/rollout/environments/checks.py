"""Check of a user's environment class before anything is called. Only the standard library is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megarlhf.own_code.load import load_function

_METHODS: Mapping[str, tuple[str, ...]] = {"reset": ("fields", "seed"), "step": ("turn",), "close": ()}
"""Methods of an environment and what they get. `close` may be missing."""


def check_environment(function: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """Load the class of an environment, and check that it can be called as environments are.

    function: `package.module:name`
    args: arguments of the class, by keyword

    Raises: ValueError if it cannot be loaded, is no class, lacks a method, or takes other arguments.
    """
    label = f"environment {function!r}"
    environment = load_function(function, "environment")
    if not inspect.isclass(environment):
        raise ValueError(
            f"{label} is {_kind(environment)}, expected a class with the methods reset(fields, seed) and step(turn); "
            "name the class, of which each conversation gets an object"
        )
    for method, parameters in _METHODS.items():
        _require_method(environment, method, parameters, label)
    if inspect.isabstract(environment):
        missing = ", ".join(sorted(getattr(environment, "__abstractmethods__", ())))
        raise ValueError(f"{label} is abstract: it has no {missing}; write the methods, or name a class that has them")
    if why := _refused(environment, (), args):
        given = ", ".join(args) or "none"
        raise ValueError(
            f"{label} cannot be made with the arguments that are given ({given}): {why}; change environment.args, or "
            "the parameters of __init__"
        )
    return environment


def _require_method(environment: type, name: str, parameters: tuple[str, ...], label: str) -> None:
    """Check a method. Raises: ValueError if it is missing or takes other arguments."""
    call = f"{name}({', '.join(parameters)})"
    method = getattr(environment, name, None)
    if method is None and name == "close":
        return
    if not callable(method):
        got = "has no method" if method is None else f"has a {type(method).__name__} in place of the method"
        raise ValueError(f"{label} {got} {call}; write one, as megarlhf/rollout/environments/answer.py shows")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ValueError(f"{label}: its method {name} is a generator; return the answer instead of yielding it")
    is_static = isinstance(inspect.getattr_static(environment, name), (staticmethod, classmethod))
    takes_self = inspect.isroutine(method) and not is_static
    if why := _refused(method, ("self", *parameters) if takes_self else parameters, {}):
        raise ValueError(f"{label}: its method {name} is called as {call}, which it does not take: {why}; change it")


def _refused(function: Callable[..., Any], positional: tuple[str, ...], named: Mapping[str, Any]) -> str:
    """Reason why a call with these arguments would fail; empty if it would not, or nobody can tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, say
        return ""
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        return str(error)
    return ""


def _kind(value: Any) -> str:
    return "a function" if inspect.isroutine(value) else f"an object of {type(value).__name__}"
