"""Words for errors that user code raises, with the line of the user's own file.

Only the standard library is imported: the processes that run users' functions load this module.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_MAX_VALUE_LENGTH = 60
"""Characters of a value in a message."""
_MAX_ERROR_LENGTH = 1000
"""Characters of a user's exception in a message."""
_MAX_LINE_LENGTH = 200
"""Characters of a line of source in a message."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages."""
_OURS = Path(__file__).parent.parent
"""Folder of megarlhf."""


def is_user_error(error: BaseException) -> bool:
    """Whether user code raised the error, including sys.exit and a cancelled task.

    Not so a KeyboardInterrupt or an error of the watchdog: those come from a signal to this process.
    """
    if isinstance(error, Exception):
        return True
    return not isinstance(error, KeyboardInterrupt) and not type(error).__module__.startswith("megarlhf.")


def short(value: Any) -> str:
    """Shortened `repr` for a message, even if the value's own `repr` raises."""
    try:
        return cut(repr(value), _MAX_VALUE_LENGTH)
    except Exception as error:  # noqa: BLE001 - the message is needed; even a number of 5000 digits raises
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def error_text(error: BaseException) -> str:
    """Text of an exception for a message."""
    try:
        text = str(error)
    except Exception as other:  # noqa: BLE001 - as above
        return f"(its text raises {type(other).__name__})"
    if len(text) <= _MAX_ERROR_LENGTH:
        return text
    return f"{text[:_MAX_ERROR_LENGTH]}... ({len(text)} characters)"


def describe_error(error: BaseException) -> str:
    """Type and text of an exception."""
    text = error_text(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def cut(text: str, length: int) -> str:
    """The first characters of a text, with dots in place of the rest."""
    return text if len(text) <= length else text[: length - 3] + "..."


def describe_failure(function: Callable[..., Any], error: BaseException) -> str:
    """Description of an error that a user's function raised, with its line: `raised KeyError: 'x'; FILE:3: CODE`."""
    hint = "; a function must return, not exit" if isinstance(error, SystemExit) else ""
    line = line_of(file_of(function), error)
    if line is not None:
        where = f"; {line.filename}:{line.lineno}: {cut(line.line or '', _MAX_LINE_LENGTH)}"
    else:
        where = "; it takes other arguments" if isinstance(error, TypeError) else ""
    return f"raised {describe_error(error)}{hint}{where}"


def without_partials(function: Any) -> Any:
    """The function inside any functools.partial."""
    while isinstance(function, partial):
        function = function.func
    return function


def file_of(function: Callable[..., Any]) -> str | None:
    """File of the user's function below partials and decorators, or of the `__call__` of an object."""
    try:
        target: Any = inspect.unwrap(without_partials(function))
        if inspect.isclass(target):
            return inspect.getsourcefile(target)
        if not inspect.isroutine(target) and not isinstance(target, partial):
            target = inspect.unwrap(without_partials(type(target).__call__))
        return without_partials(target).__code__.co_filename
    except Exception:  # noqa: BLE001 - an object may raise anything for an attribute; then the file is unknown
        return None


def line_of(file: str | None, error: BaseException) -> traceback.FrameSummary | None:
    """The last line of user code in the traceback: in `file`, else in any file that belongs neither to Python nor to an
    installed package. Without such a line, the last line of a package. Never a line of ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    own = [frame for frame in frames if frame.filename == file]
    others = [frame for frame in frames if not is_standard_library(frame.filename)]
    users = [frame for frame in others if not is_installed(Path(frame.filename))]
    own_users = [frame for frame in own if frame in users]
    return next((chosen[-1] for chosen in (own_users, users, own, others) if chosen), None)


def _is_ours(file: str) -> bool:
    return (file.startswith("<") and not file.startswith("<ipython")) or Path(file).is_relative_to(_OURS)


def is_installed(file: Path) -> bool:
    """Whether a file belongs to an installed package."""
    return not _INSTALLED.isdisjoint(file.parts)


def is_standard_library(file: str) -> bool:
    """Whether a file belongs to Python itself."""
    path = Path(file)  # packages may be installed below the standard library
    is_below = not _python_folders().isdisjoint(path.parents) and not is_installed(path)
    return is_below or file.startswith("<frozen ")


@functools.cache
def _python_folders() -> frozenset[Path]:
    return frozenset(Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib"))
