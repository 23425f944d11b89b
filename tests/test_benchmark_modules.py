"""Every module of benchmarks/ can be imported: what a benchmark takes from the package has its name and form still.

Not covered: a benchmark whose peers are not installed is imported as far as its first import of them.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.apart import apart
from tests.command import ROOT


def import_all() -> list[str]:
    import benchmarks

    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__, "benchmarks.")]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in {"benchmarks", "megarlhf", "tools", "tests"}:
                raise
    return names


def test_every_benchmark_can_be_imported() -> None:
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"}
    assert {name.removeprefix("benchmarks.") for name in apart(import_all)} >= names
