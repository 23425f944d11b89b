"""The child of a guard: it gives up its rights, then runs a model's code as a notebook would."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import resource
import signal
import sys
import types

from megarlhf.rollout.tools.python import kernel
from megarlhf.rollout.tools.python.isolation import isolate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from traceback import TracebackException

    from megarlhf.rollout.tools.python.request import GuardRequest

OUT_OF_MEMORY = 77
"""Exit status after a MemoryError."""
_NAME = "<code>"
"""File name of the code in tracebacks."""


def run_child(request: GuardRequest, guard: int, folder: str, output_fd: int, ready_fd: int) -> int:
    """Run the code. Returns the exit status. Raises: SystemExit if the code does."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.dup2(ready_fd, 3, inheritable=False)
    os.closerange(4, 1 << 30)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        return 0
    os.setsid()
    os.umask(0o077)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder})
    isolate(request, folder)
    sys.path[:] = [path for path in sys.path if path != request["root"]] + request["libraries"] + [folder]
    for name in [name for name in sys.modules if name.partition(".")[0] == "megarlhf"]:
        del sys.modules[name]
    sys.argv[:] = [_NAME]
    # One stream for both keeps the order of writing.
    stream = io.TextIOWrapper(io.FileIO(1, "w"), "utf-8", "backslashreplace", line_buffering=True)
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = stream  # type: ignore[misc]
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.write(3, b"1")
    os.close(3)
    return _run(request["code"])


def _run(code: str) -> int:
    import ast  # allowed to be slow or to fail: the child's time and memory are limited

    _show_own_lines(code)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    try:
        tree = ast.parse(code, _NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        _seed(code)
        exec(compile(tree, _NAME, "exec"), module.__dict__)
        if last:
            exec(compile(ast.Interactive([last]), _NAME, "single"), module.__dict__)  # prints the value
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the model sees it
        if isinstance(error, MemoryError):
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        _show(error, code)
        return OUT_OF_MEMORY if isinstance(error, MemoryError) else 0
    return 0


def _seed(code: str) -> None:
    """Let random numbers follow from the code: a call that is repeated after a kill has the same result."""
    if "random" not in code:
        return
    import random

    random.seed(code)
    if "numpy" in code:
        with contextlib.suppress(Exception):  # the code's own import says what is wrong
            import numpy

            numpy.random.seed(random.getrandbits(32))
            random.seed(code)


def _show_own_lines(code: str) -> None:
    """Let errors of threads, and those at exit, also show the code's own lines only."""
    import threading

    def show_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            _show(args.exc_value, code, f"In thread {args.thread.name if args.thread else '?'}: ")

    threading.excepthook = show_thread
    sys.excepthook = lambda kind, error, trace: _show(error, code)


def _show(error: BaseException, code: str, prefix: str = "") -> None:
    """Write the traceback past the stream, which the code may have closed."""
    import linecache
    import traceback

    linecache.cache[_NAME] = (len(code), None, [line + "\n" for line in code.split("\n")], _NAME)
    shown = traceback.TracebackException.from_exception(error, compact=True)
    _keep_own_lines(shown)
    with contextlib.suppress(ValueError, OSError):
        if sys.__stderr__ is not None:
            sys.__stderr__.flush()
    data = (prefix + "".join(shown.format())).encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):  # the code has closed it
        while data:
            data = data[os.write(2, data) :]


def _keep_own_lines(shown: TracebackException) -> None:
    """Drop the lines of the interpreter and of libraries, also in the exceptions that led to this one."""
    shown.stack[:] = [frame for frame in shown.stack if frame.filename == _NAME]
    for other in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        if other is not None:
            _keep_own_lines(other)
