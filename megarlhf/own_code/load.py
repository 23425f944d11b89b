"""Loading of what `package.module:name` names: one loader for every kind of user code."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from megarlhf.own_code.failures import describe_error, error_text, is_user_error, line_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to stop."""
OWN = "write your own as package.module:name"
"""End of a message about an unknown name."""


def is_path(name: str) -> bool:
    """Whether a name is an import path and none of our own names."""
    return ":" in name


def load_module(name: str, what: str) -> ModuleType:
    """Import a user's module. `what`: kind and name for messages, such as "reward rule 'mine:f'".

    Raises: ValueError if it is not there or fails, with the user's line.
    """
    if name == "__main__":
        raise ValueError(
            f"{what}: __main__ is this script or notebook itself, which ranks and reward workers cannot import; put "
            "the code into a module beside it and name that"
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{what}: {name!r} is no name of a module; write package.module, such as mine")
    before = _process_state()
    try:
        with warnings.catch_warnings():
            module = importlib.import_module(name)
    except BaseException as error:
        if not is_user_error(error):
            raise
        raise ValueError(f"{what}: {_import_failure(name, error)}") from error
    if changed := [key for key, value in _process_state().items() if before.get(key, value) != value]:
        raise ValueError(
            f"{what}: importing {name} changes {', '.join(changed)} of the process, which the run needs as they are; "
            "do that inside a function, or not at all"
        )
    return module


def _process_state() -> dict[str, object]:
    """Settings of this process that an import must leave alone."""
    state: dict[str, object] = {"the working directory": os.getcwd()}
    state |= {f"the handler of {number.name}": signal.getsignal(number) for number in _SIGNALS}
    if (torch := sys.modules.get("torch")) is not None:
        state |= {"torch's default dtype": torch.get_default_dtype(), "torch's gradient mode": torch.is_grad_enabled()}
        state["torch's default device"] = str(torch.get_default_device())
    return state


def _import_failure(name: str, error: BaseException) -> str:
    line = None if isinstance(error, SyntaxError) else line_of(None, error)  # a SyntaxError names its own place
    where = f" ({line.filename}:{line.lineno})" if line else ""
    if isinstance(error, ImportError):
        return f"cannot import {name or 'a module without a name'}: {error_text(error)}{where}; set PYTHONPATH"
    hint = ""
    if isinstance(error, SystemExit):
        hint = "; what a command line calls belongs under `if __name__ == '__main__':`"
    return f"{name} fails when it is imported: {describe_error(error)}{where}{hint}"


def load(path: str, what: str) -> Any:
    """Import the object `package.module:name`. `what`: its kind, such as "reward rule".

    Raises: ValueError if that fails.
    """
    module_name, _, name = path.partition(":")
    label = f"{what} {path!r}"
    if not (module_name and name):
        raise ValueError(f"{label} is no import path; write package.module:name")
    module = load_module(module_name, label)
    try:
        value = getattr(module, name, None)
    except BaseException as error:
        if not is_user_error(error):
            raise
        raise ValueError(f"{label}: {_import_failure(module_name, error)}") from error
    if value is None:
        known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{label}: {_describe_module(module)} has no function {name!r}{hint}")
    return value


def load_function(path: str, what: str) -> Callable[..., Any]:
    """Import the function, class or callable object `package.module:name`. Raises: ValueError if that fails."""
    value = load(path, what)
    if not callable(value):
        raise ValueError(f"{what} {path!r} is of type {type(value).__name__}, expected a function; name one")
    function: Callable[..., Any] = value
    return function


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Message about a name that is none of ours: the nearest one, all of them, and that an own one may be given."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{what} {name!r} is not known; {hint}the known ones are {', '.join(known)}; {OWN}"


def _describe_module(module: ModuleType) -> str:
    if file := getattr(module, "__file__", None):
        return str(file)
    if folders := list(getattr(module, "__path__", [])):
        return f"{folders[0]} is a folder without __init__.py, which"
    return f"the module {module.__name__}, which is built into Python,"
