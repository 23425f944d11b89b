"""Every module of benchmarks/ can be imported: what a benchmark takes from the package has its name and form still.

Not covered: a benchmark whose peers are not installed is imported as far as its first import of them.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("name", ["benchmarks.gpu_logprob", "benchmarks.gpu_packed"])
def test_a_benchmark_of_kernels_imports_nothing_but_kernels(name: str) -> None:
    """A GPU machine has no Megatron-Core and no vLLM."""
    script = (
        f"import sys, {name}\n"
        "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('megarlhf.')}))\n"
        "print([name for name in ('megatron', 'vllm', 'transformers', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['algo', 'kernels']", "[]"]
