"""Every module of benchmarks/ can be imported: what a benchmark takes from the package has its name and form still.

Not covered: a benchmark whose peers are not installed is imported as far as its first import of them.
"""

from __future__ import annotations

import subprocess
import sys

from tests.command import ROOT

IMPORT_ALL = """
import importlib, pkgutil, sys
import benchmarks
for module in pkgutil.iter_modules(benchmarks.__path__, "benchmarks."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] in {"benchmarks", "megarlhf", "tools", "tests"}:
            raise
    print(module.name)
"""


def test_every_benchmark_can_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"}
    assert {name.removeprefix("benchmarks.") for name in done.stdout.split()} >= names
