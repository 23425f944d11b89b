"""The tests of packed kernels once more, in a process whose Triton interprets its kernels on the CPU.

A process of its own: see test_triton.py. Not covered: GPUs.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
FILES = {"interpreted_packed.py": 11, "test_packed.py": 54, "test_packed_sums.py": 16}
"""And the least number of tests in each."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_packed_kernels_in_tritons_interpreter(tmp_path):
    """None may be missing, and only those in which the interpreter plays no part may be left out."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in FILES)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    for name, least in FILES.items():
        module = f"tests.kernels.{name.removesuffix('.py')}"
        ran = [case for case in cases if case.get("classname") == module and case.find("skipped") is None]
        assert len(ran) >= least, f"{name}: {len(ran)} tests"
    left_out = {case.get("name").partition("[")[0] for case in cases if case.find("skipped") is not None}
    assert left_out <= {"test_gae_equals_its_definition", "test_nothing_is_added_by_index", "test_fp64_stays_fp64"}
