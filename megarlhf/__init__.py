"""megarlhf: alignment of language models at Megatron scale.

The public surface is the names of `__all__`: `import megarlhf`, then `megarlhf.run(...)`. Everything else is private
and may change in any version. A name is imported when it is first used, so that `import megarlhf` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarlhf.api.configuration import check as check
    from megarlhf.api.configuration import load_config as load_config
    from megarlhf.api.result import RunResult as RunResult
    from megarlhf.api.run import RunFailed as RunFailed
    from megarlhf.api.run import run as run

__version__ = "0.1.0"

_EXPORTS = {
    "check": "megarlhf.api.configuration",
    "load_config": "megarlhf.api.configuration",
    "RunResult": "megarlhf.api.result",
    "RunFailed": "megarlhf.api.run",
    "run": "megarlhf.api.run",
}
"""Module of each public name. The imports above tell editors and type checkers the same; a test compares the two."""

__all__ = ["RunFailed", "RunResult", "__version__", "check", "load_config", "run"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = value = getattr(import_module(_EXPORTS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
