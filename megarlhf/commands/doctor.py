"""`megarlhf doctor`: what this machine has, what is missing, and what a missing part means.

It starts nothing: no device is initialised and no heavy package imported; versions come from the packages'
metadata, devices from `runtime.capabilities`.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarlhf.observe.progress import make_console

if TYPE_CHECKING:
    from megarlhf.runtime import Capabilities  # it imports torch

TESTED = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm": "0.32.0"}
GIB = 1024**3
MIN_SHM_GIB = 1.0

Verdict = Literal["ok", "note", "problem"]
ApexKind = Literal["missing", "nvidia", "nvidia without its kernels", "unrelated"]

STYLES: dict[Verdict, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}

REQUIRED = {
    "torch": "nothing runs without it: `make venv` on a CPU machine, requirements/gpu.txt on a cluster",
    "megatron-core": "no model can be built: `pip install megatron-core==0.16.1`",
    "transformers": "Hugging Face tokenizers and model configurations cannot be read",
    "datasets": "JSON lines, Parquet and Arrow data cannot be read",
}
OPTIONAL = {
    "sentencepiece": "SentencePiece tokenizers cannot be read; Hugging Face tokenizers can",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table."""

    part: str
    value: str
    verdict: Verdict
    meaning: str = ""


def examine(capabilities: Capabilities, *, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Every finding, in the order of the table."""
    versions, on_gpu = capabilities.versions, capabilities.device_type != "cpu"
    return [
        _python(),
        *(_package(name, versions.get(name)) for name in REQUIRED),
        *(_package(name, versions.get(name)) for name in OPTIONAL),
        _vllm(versions.get("vllm")),
        _triton(versions.get("triton"), on_gpu),
        _transformer_engine(versions.get("transformer-engine"), on_gpu),
        _apex(versions.get("apex"), apex_kind(), on_gpu),
        _device(capabilities),
        _backends(capabilities.backends, on_gpu),
        _attention(versions.get("transformer-engine"), on_gpu),
        _memory(),
        _shared_memory(),
        _cores(),
        *_slurm(environ),
    ]


def report(findings: Sequence[Finding], *, console: Console | None = None) -> int:
    """Print the table; return the exit status: 1 if a finding is a problem."""
    console = console or make_console()
    table = Table(title="megarlhf doctor", title_justify="left", title_style="bold")
    table.add_column("part", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("what it means", overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        table.add_row(Text(finding.part), Text(finding.value), verdict, Text(finding.meaning))
    console.print(table)
    problems = sum(finding.verdict == "problem" for finding in findings)
    console.print(f"{problems} problem(s)" if problems else "no problem found")
    return 1 if problems else 0


def print_doctor(capabilities: Capabilities) -> int:
    """The command: examine this machine, print the table, return the exit status."""
    return report(examine(capabilities))


def apex_kind(search_path: Sequence[str] | None = None) -> ApexKind:
    """Whether the importable package `apex` is NVIDIA's; nothing is imported to find out.

    The registry's package of that name is an unrelated project. NVIDIA's has `apex/optimizers/fused_adam.py`,
    and the extension module `amp_C` when its kernels were compiled.
    """
    spec = PathFinder.find_spec("apex", search_path)
    if spec is None:
        return "missing"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        return "unrelated"
    compiled = PathFinder.find_spec("amp_C", search_path) is not None
    return "nvidia" if compiled else "nvidia without its kernels"


def _python() -> Finding:
    value = platform.python_version()
    supported = Version("3.10") <= Version(value) < Version("3.13")
    meaning = "" if supported else "megarlhf supports 3.10 to 3.12: make the environment with one of those"
    return Finding(part="python", value=value, verdict="ok" if supported else "problem", meaning=meaning)


def _package(name: str, value: str | None) -> Finding:
    if value is None:
        required = name in REQUIRED
        meaning = f"not installed: {REQUIRED[name] if required else OPTIONAL[name]}"
        return Finding(part=name, value="missing", verdict="problem" if required else "note", meaning=meaning)
    return _tested(name, value)


def _tested(name: str, value: str) -> Finding:
    """An installed package, compared with the version that the tests ran with."""
    tested = TESTED.get(name)
    if tested is not None and Version(value).public != tested:
        meaning = f"the tests ran with {tested}: run `make test` with yours before you trust a long job to it"
        return Finding(part=name, value=value, verdict="note", meaning=meaning)
    return Finding(part=name, value=value, verdict="ok")


def _vllm(value: str | None) -> Finding:
    if value is None:
        meaning = "not installed: rl cannot use rollout.engine=vllm; sft, rm, dpo and convert are not touched by it"
        return Finding(part="vllm", value="missing", verdict="note", meaning=meaning)
    return _tested("vllm", value)


def _triton(value: str | None, on_gpu: bool) -> Finding:
    if value is not None:
        meaning = "" if on_gpu else "kernels run in its interpreter (tests only); plain torch is used on a CPU"
        return Finding(part="triton", value=value, verdict="ok", meaning=meaning)
    meaning = "not installed: plain torch kernels are used; fine on CPU, more memory and time on GPU"
    return Finding(part="triton", value="missing", verdict="note", meaning=meaning)


def transformer_engine_range() -> SpecifierSet | None:
    """The versions that the installed Megatron-Core takes, as its metadata says; None where that says nothing."""
    try:
        wanted = [Requirement(text) for text in requires("megatron-core") or ()]
    except PackageNotFoundError:
        return None
    return next((item.specifier for item in wanted if canonicalize_name(item.name) == "transformer-engine"), None)


def _transformer_engine(value: str | None, on_gpu: bool) -> Finding:
    part = "transformer-engine"
    taken = transformer_engine_range()
    if value is not None and taken is not None and not taken.contains(value, prereleases=True):
        meaning = (
            f"Megatron-Core {version('megatron-core')} takes {taken} and imports names that others may lack: "
            "install the one of requirements/gpu.txt"
        )
        return Finding(part=part, value=value, verdict="problem" if on_gpu else "note", meaning=meaning)
    if value is not None:
        meaning = "fused layers are used" if on_gpu else "not used: it needs a GPU; local layer spec instead"
        return Finding(part=part, value=value, verdict="ok", meaning=meaning)
    meaning = "not installed: local layer spec is used; fine on CPU, slower on GPU"
    return Finding(part=part, value="missing", verdict="note" if on_gpu else "ok", meaning=meaning)


def _apex(value: str | None, kind: ApexKind, on_gpu: bool) -> Finding:
    shown = value or "no version"
    missing: Verdict = "note" if on_gpu else "ok"
    if kind == "nvidia":
        return Finding(part="apex", value=f"{shown} (NVIDIA's)", verdict="ok", meaning="fused kernels are used")
    if kind == "unrelated":
        meaning = (
            "this is the registry's unrelated project, not NVIDIA's apex: `pip uninstall apex`, then build "
            "NVIDIA's from source if you want its kernels (requirements/gpu.txt)"
        )
        return Finding(part="apex", value=f"{shown} (unrelated)", verdict="problem", meaning=meaning)
    if kind == "nvidia without its kernels":
        meaning = "built without its extensions: torch's own norms and optimizer are used"
        return Finding(part="apex", value=f"{shown} (NVIDIA's)", verdict=missing, meaning=meaning)
    meaning = "not installed: torch's own norms and optimizer are used; fine on CPU, slightly slower on GPU"
    return Finding(part="apex", value="missing", verdict=missing, meaning=meaning)


def _device(capabilities: Capabilities) -> Finding:
    count, kind, name = capabilities.device_count, capabilities.device_type, capabilities.device_name
    value = f"{count} x {name}" if kind != "cpu" else name or kind
    meaning = "" if kind != "cpu" else "no GPU seen: everything runs over gloo, at the size of a test"
    return Finding(part="devices", value=value, verdict="ok" if kind != "cpu" else "note", meaning=meaning)


def _backends(backends: Sequence[str], on_gpu: bool) -> Finding:
    value, part = ", ".join(backends) or "none", "distributed backends"
    wanted = {"gloo"} | ({"nccl"} if on_gpu else set())
    absent = sorted(wanted - set(backends))
    if not absent:
        return Finding(part=part, value=value, verdict="ok")
    meaning = f"torch was built without {' and '.join(absent)}: install a build for this machine"
    return Finding(part=part, value=value, verdict="problem", meaning=meaning)


def _attention(transformer_engine: str | None, on_gpu: bool) -> Finding:
    """Attention over packed sequences: transformer-engine, flash-attn, torch's varlen."""
    flash = {name: _version(name) for name in ("flash-attn", "flash-attn-3")}
    kinds = [f"{name} {value}" for name, value in flash.items() if value is not None]
    if transformer_engine is not None:
        kinds.append("transformer-engine")
    spec = PathFinder.find_spec("torch")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if any((folder / "nn" / "attention" / "varlen.py").is_file() for folder in folders):
        kinds.append("torch varlen")
    value, part = ", ".join(kinds) or "none", "flash/varlen attention"
    if not on_gpu:
        meaning = "these are GPU kernels; on a CPU packed sequences go through torch's own attention"
        return Finding(part=part, value=value, verdict="ok", meaning=meaning)
    if kinds:
        return Finding(part=part, value=value, verdict="ok")
    meaning = "packed sequences go through torch's own attention: slower, and memory grows with length squared"
    return Finding(part=part, value=value, verdict="note", meaning=meaning)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    value = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    return Finding(part="host memory", value=value, verdict="ok")


def _shared_memory() -> Finding:
    part, folder = "shared memory", "/dev/shm"
    if not Path(folder).is_dir():
        return Finding(part=part, value="no /dev/shm", verdict="note", meaning="vLLM's and NCCL's workers use it")
    free = shutil.disk_usage(folder).free / GIB
    value = f"{free:.1f} GiB free"
    if free >= MIN_SHM_GIB:
        return Finding(part=part, value=value, verdict="ok")
    meaning = "workers pass tensors through it and die when it is full: start the container with more (--shm-size)"
    return Finding(part=part, value=value, verdict="note", meaning=meaning)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    value = f"{usable} usable of {os.cpu_count()}"
    return Finding(part="CPU cores", value=value, verdict="ok")


def _slurm(environ: Mapping[str, str]) -> list[Finding]:
    """The scheduler's variables, as this process sees them."""
    names = sorted(name for name in environ if name.startswith("SLURM_"))
    if not names:
        client = shutil.which("sbatch") is not None
        meaning = "not inside a job; " + ("sbatch is on PATH" if client else "no sbatch on PATH either")
        return [Finding(part="Slurm", value="no SLURM_ variables", verdict="ok", meaning=meaning)]
    shown = ["JOB_ID", "JOB_NODELIST", "NTASKS", "PROCID", "LOCALID", "NODEID", "CPUS_PER_TASK", "RESTART_COUNT"]
    value = ", ".join(f"{name}={environ[f'SLURM_{name}']}" for name in shown if f"SLURM_{name}" in environ)
    meaning = f"{len(names)} SLURM_ variables"
    if "SLURM_STEP_ID" in environ:
        return [Finding(part="Slurm", value=value, verdict="ok", meaning=meaning)]
    # The shell of an sbatch script sees SLURM_PROCID=0 too, but belongs to no step.
    meaning += "; no SLURM_STEP_ID: not under srun, so this process is no rank"
    return [Finding(part="Slurm", value=value, verdict="note", meaning=meaning)]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
