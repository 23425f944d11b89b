"""The tests of log-prob kernels once more, in a process whose Triton interprets its kernels on the CPU.

A process of its own: the interpreter is chosen when a kernel is defined, for all of Triton's users in the process.

Not covered: GPUs.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
FILES = {
    # file: the least number of tests in it
    "interpreted_tiles.py": 30,
    "test_token_logprobs.py": 50,
    "test_linear_logprobs.py": 35,
    "test_properties.py": 2,
    "test_sharded.py": 2,
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("files", [["interpreted_tiles.py", "test_token_logprobs.py", "test_properties.py"],
                                   ["test_linear_logprobs.py", "test_sharded.py"]])  # fmt: skip
def test_kernels_in_tritons_interpreter(files, tmp_path):
    """None may be missing, and only those in which the interpreter plays no part may be left out."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", f"--junitxml={report}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in files)], env=environment, cwd=HERE.parents[1], capture_output=True,
        text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    for name in files:
        module = f"tests.kernels.{name.removesuffix('.py')}"
        ran = [case for case in cases if case.get("classname") == module and case.find("skipped") is None]
        assert len(ran) >= FILES[name], f"{name}: {len(ran)} tests"
    left_out = {case.get("name").partition("[")[0] for case in cases if case.find("skipped") is not None}
    assert left_out <= {"test_collectives_of_the_linear_kernel"}
