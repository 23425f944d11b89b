"""What doctor says of made-up machines. Not covered: what a real GPU machine reports of itself."""

import io
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from megarlhf.commands.doctor import apex_kind, examine, report, transformer_engine_range
from tests.refuses import missing_names

ROOT = Path(__file__).parents[2]

CPU_VERSIONS = {
    "torch": "2.13.0+cpu", "megatron-core": "0.16.1", "vllm": "0.32.0", "triton": "3.9.0", "transformer-engine": None,
    "apex": None, "transformers": "5.19.0", "datasets": "5.2.0", "sentencepiece": "0.2.3",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Machine:
    device_type: str = "cpu"
    device_count: int = 1
    device_name: str = "x86_64 CPU"
    backends: tuple[str, ...] = ("gloo",)
    versions: dict[str, str | None] = field(default_factory=lambda: dict(CPU_VERSIONS))


def findings_of(machine, environ=None):
    return {finding.part: finding for finding in examine(machine, environ=environ or {})}


def test_the_ci_machine_has_no_problem_and_missing_parts_are_explained():
    findings = findings_of(Machine())
    assert [finding for finding in findings.values() if finding.verdict == "problem"] == []
    engine = findings["transformer-engine"]
    assert (engine.value, engine.verdict) == ("missing", "ok")
    assert not missing_names(engine.meaning, "not installed", "local layer spec")
    assert findings["torch"].verdict == "ok"
    assert findings["devices"].value == "x86_64 CPU"


def test_on_a_gpu_machine_missing_kernels_are_noted_and_missing_nccl_is_a_problem():
    machine = Machine(device_type="cuda", device_count=8, device_name="H200")
    findings = findings_of(machine)
    assert findings["devices"].value == "8 x H200"
    assert findings["transformer-engine"].verdict == "note"
    assert findings["distributed backends"].verdict == "problem"
    assert "without nccl" in findings["distributed backends"].meaning


@pytest.mark.parametrize(
    ("version", "device", "verdict"),
    [("2.11.0", "cuda", "ok"), ("2.20.2", "cuda", "problem"), ("2.8.0", "cuda", "problem"), ("2.20.2", "cpu", "note")],
)
def test_a_transformer_engine_outside_megatron_core_s_range_is_said(version, device, verdict):
    """Where there is no GPU it is not used."""
    findings = findings_of(Machine(device_type=device, versions={**CPU_VERSIONS, "transformer-engine": version}))
    assert findings["transformer-engine"].verdict == verdict
    is_told = "Megatron-Core 0.16.1 takes <2.12.0,>=2.9.0a0" in findings["transformer-engine"].meaning
    assert is_told is (verdict != "ok")


def test_what_is_pinned_for_gpus_is_inside_megatron_core_s_range():
    """The requirements name one version, setup.py's extra a range that lies inside."""
    taken = transformer_engine_range()
    assert taken is not None
    lines = (ROOT / "requirements/transformer-engine.txt").read_text().splitlines()
    (pinned,) = (Requirement(line) for line in lines if line.startswith("transformer-engine=="))
    (exact,) = pinned.specifier
    assert exact.operator == "=="
    assert taken.contains(exact.version)
    (extra,) = re.findall(r'"(transformer-engine\[[^"]*)"', (ROOT / "setup.py").read_text())
    asked = Requirement(extra).specifier
    assert asked.contains(exact.version)
    releases = [f"{major}.{minor}.{patch}" for major in (1, 2, 3) for minor in range(30) for patch in (0, 1)]
    assert {release for release in releases if asked.contains(release)} == set(taken.filter(releases))


def test_an_untested_version_is_noted_and_a_missing_core_is_a_problem():
    findings = findings_of(Machine(versions={**CPU_VERSIONS, "torch": "2.12.1", "megatron-core": None}))
    assert findings["torch"].verdict == "note"
    assert "2.13.0" in findings["torch"].meaning
    assert (findings["megatron-core"].value, findings["megatron-core"].verdict) == ("missing", "problem")


def test_apex_of_nvidia_and_of_the_registry_are_told_apart(tmp_path):
    path = [str(tmp_path)]
    assert apex_kind(path) == "missing"
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    assert apex_kind(path) == "unrelated"
    (tmp_path / "apex" / "optimizers").mkdir()
    (tmp_path / "apex" / "optimizers" / "fused_adam.py").touch()
    assert apex_kind(path) == "nvidia without its kernels"
    (tmp_path / "amp_C.py").touch()
    assert apex_kind(path) == "nvidia"


def test_an_unrelated_apex_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = findings_of(Machine(versions={**CPU_VERSIONS, "apex": "0.9.8.dev0"}))["apex"]
    assert finding.verdict == "problem"
    assert "pip uninstall apex" in finding.meaning


@pytest.mark.parametrize(
    ("environ", "verdict", "words"),
    [
        ({}, "ok", "not inside a job"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "note", "no SLURM_STEP_ID"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}, "ok", "3 SLURM_ variables"),
        (
            {
                "SLURM_JOB_ID": "7",
                "SLURM_PROCID": "0",
                "SLURM_STEP_ID": "0",
                "SLURM_NTASKS": "1",
                "SLURM_PTY_PORT": "1",
            },
            "note",
            "env -u SLURM_STEP_ID megarlhf",
        ),
    ],
)
def test_slurm_variables(environ, verdict, words):
    finding = findings_of(Machine(), environ)["Slurm"]
    assert finding.verdict == verdict
    assert words in finding.meaning
    assert ("JOB_ID=7" in finding.value) == bool(environ)


def test_the_table_shows_every_finding_and_the_status_counts_problems():
    console = Console(file=io.StringIO(), width=300)
    findings = examine(Machine(), environ={})
    assert report(findings, console=console) == 0
    text = console.file.getvalue()
    assert all(finding.part in text and finding.meaning in text for finding in findings)
    assert report(examine(Machine(backends=()), environ={}), console=console) == 1


def test_doctor_imports_nothing_heavy():
    """In a new process: neither torch nor any package that it reports on."""
    heavy = "{'torch', 'vllm', 'megatron', 'transformers'}"
    code = f"import sys, megarlhf.commands.doctor; print(*(sys.modules.keys() & {heavy}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
