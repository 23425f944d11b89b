"""`megarlhf doctor`: the parts of this machine, missing ones, and the meaning of each.

No device is initialised and no heavy package imported: versions come from packages' metadata, devices from
`runtime.capabilities`.
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
from rich.text import Text

from megarlhf.observe.terminal.progress import make_console, table

if TYPE_CHECKING:
    from megarlhf.runtime import Capabilities  # it imports torch

TESTED = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm": "0.32.0"}
GIB = 1024**3
MIN_SHM_GIB = 1.0

Verdict = Literal["ok", "note", "problem"]
ApexKind = Literal["missing", "nvidia", "nvidia without its kernels", "unrelated"]

STYLES: dict[Verdict, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}

REQUIRED = {
    "torch": "nothing runs without it: `make venv` on a CPU machine, `make venv-gpu` on a cluster",
    "megatron-core": "no model can be built: `pip install megatron-core==0.16.1`",
    "transformers": "Hugging Face tokenizers and model configurations cannot be read",
    "datasets": "JSON lines, Parquet and Arrow data cannot be read",
}
OPTIONAL = {
    "sentencepiece": "SentencePiece tokenizers cannot be read; Hugging Face tokenizers can",
    "vllm": "rl cannot use rollout.engine=vllm; sft, rm, dpo and convert do not need it",
}


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    part: str
    value: str
    verdict: Verdict = "ok"
    meaning: str = ""


def examine(capabilities: Capabilities, *, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Every finding, in the order of the table."""
    versions, on_gpu = capabilities.versions, capabilities.device_type != "cpu"
    return [
        _python(),
        *(_package(name, versions.get(name)) for name in REQUIRED | OPTIONAL),
        _triton(versions.get("triton"), on_gpu),
        _transformer_engine(versions.get("transformer-engine"), on_gpu),
        _apex(versions.get("apex"), apex_kind(), on_gpu),
        _device(capabilities),
        _backends(capabilities.backends, on_gpu),
        _attention(versions.get("transformer-engine"), on_gpu),
        _memory(),
        _shared_memory(),
        _cores(),
        _slurm(environ),
    ]


def report(findings: Sequence[Finding], *, console: Console | None = None) -> int:
    """Print the table; returns the exit status, which is 1 if a finding is a problem."""
    console = console or make_console()
    rows = [(f.part, f.value, Text(f.verdict, style=STYLES[f.verdict]), f.meaning) for f in findings]
    console.print(table("megarlhf doctor", rows, ("part", "found", "", "what it means")))
    problems = sum(finding.verdict == "problem" for finding in findings)
    console.print(f"{problems} problem(s)" if problems else "no problem found")
    return 1 if problems else 0


def apex_kind(search_path: Sequence[str] | None = None) -> ApexKind:
    """The kind of the importable package `apex`, found without an import.

    The registry's package of that name is an unrelated project. NVIDIA's has `apex/optimizers/fused_adam.py`, and the
    extension module `amp_C` if its kernels were compiled.
    """
    if PathFinder.find_spec("apex", search_path) is None:
        return "missing"
    folders = _folders("apex", search_path)
    if not any((folder / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        return "unrelated"
    compiled = PathFinder.find_spec("amp_C", search_path) is not None
    return "nvidia" if compiled else "nvidia without its kernels"


def _python() -> Finding:
    value = platform.python_version()
    if Version("3.10") <= Version(value) < Version("3.13"):
        return Finding("python", value)
    return Finding("python", value, "problem", "megarlhf supports 3.10 to 3.12: make the environment with one of them")


def _package(name: str, value: str | None) -> Finding:
    """Compare an installed package with the version of the tests."""
    if value is None:
        verdict: Verdict = "problem" if name in REQUIRED else "note"
        return Finding(name, "missing", verdict, f"not installed: {(REQUIRED | OPTIONAL)[name]}")
    tested = TESTED.get(name)
    if tested is None or Version(value).public == tested:
        return Finding(name, value)
    meaning = f"the tests ran with {tested}: run `make test` with yours before a long job"
    return Finding(name, value, "note", meaning)


def _triton(value: str | None, on_gpu: bool) -> Finding:
    if value is None:
        meaning = "not installed: plain torch kernels are used; fine on CPU, more memory and time on GPU"
        return Finding("triton", "missing", "note", meaning)
    meaning = "kernels run in its interpreter (tests only); plain torch is used on a CPU"
    return Finding("triton", value, "ok", "" if on_gpu else meaning)


def transformer_engine_range() -> SpecifierSet | None:
    """Versions that the installed Megatron-Core accepts, by its metadata; None if that names none."""
    try:
        wanted = [Requirement(text) for text in requires("megatron-core") or ()]
    except PackageNotFoundError:
        return None
    return next((item.specifier for item in wanted if canonicalize_name(item.name) == "transformer-engine"), None)


def _transformer_engine(value: str | None, on_gpu: bool) -> Finding:
    part, accepted = "transformer-engine", transformer_engine_range()
    if value is None:
        meaning = "not installed: local layer spec is used; fine on CPU, slower on GPU"
        return Finding(part, "missing", "note" if on_gpu else "ok", meaning)
    if accepted is not None and not accepted.contains(value, prereleases=True):
        meaning = (
            f"Megatron-Core {version('megatron-core')} takes {accepted} and imports names that other versions may "
            "lack: install the version of requirements/transformer-engine.txt"
        )
        return Finding(part, value, "problem" if on_gpu else "note", meaning)
    meaning = "fused layers are used" if on_gpu else "not used: it needs a GPU; local layer spec instead"
    return Finding(part, value, "ok", meaning)


def _apex(value: str | None, kind: ApexKind, on_gpu: bool) -> Finding:
    absent: Verdict = "note" if on_gpu else "ok"
    if kind == "missing":
        meaning = "not installed: torch's own norms and optimizer are used; fine on CPU, slightly slower on GPU"
        return Finding("apex", "missing", absent, meaning)
    if kind == "unrelated":
        meaning = (
            "this is an unrelated project of the registry, not NVIDIA's apex: `pip uninstall apex`, then build "
            "NVIDIA's from source if you want its kernels (requirements/README.md)"
        )
        return Finding("apex", f"{value or 'no version'} (unrelated)", "problem", meaning)
    shown = f"{value or 'no version'} (NVIDIA's)"
    if kind == "nvidia":
        return Finding("apex", shown, "ok", "fused kernels are used")
    return Finding("apex", shown, absent, "built without its extensions: torch's own norms and optimizer are used")


def _device(capabilities: Capabilities) -> Finding:
    kind, name = capabilities.device_type, capabilities.device_name
    if kind != "cpu":
        return Finding("devices", f"{capabilities.device_count} x {name}")
    return Finding("devices", name or kind, "note", "no GPU seen: everything runs over gloo, at the size of a test")


def _backends(backends: Sequence[str], on_gpu: bool) -> Finding:
    value, part = ", ".join(backends) or "none", "distributed backends"
    absent = [name for name in ("gloo", *["nccl"] * on_gpu) if name not in backends]
    if not absent:
        return Finding(part, value)
    meaning = f"torch was built without {' and '.join(absent)}: install a build for this machine"
    return Finding(part, value, "problem", meaning)


def _attention(transformer_engine: str | None, on_gpu: bool) -> Finding:
    """Kernels of attention over packed sequences: transformer-engine, flash-attn, torch's varlen."""
    kinds = [f"{name} {value}" for name in ("flash-attn", "flash-attn-3") if (value := _version(name)) is not None]
    if transformer_engine is not None:
        kinds.append("transformer-engine")
    if any((folder / "nn" / "attention" / "varlen.py").is_file() for folder in _folders("torch")):
        kinds.append("torch varlen")
    value, part = ", ".join(kinds) or "none", "flash/varlen attention"
    if not on_gpu:
        meaning = "these are GPU kernels; on a CPU packed sequences go through torch's own attention"
        return Finding(part, value, "ok", meaning)
    if kinds:
        return Finding(part, value)
    meaning = "packed sequences go through torch's own attention: slower, and memory grows with length squared"
    return Finding(part, value, "note", meaning)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    return Finding("host memory", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free")


def _shared_memory() -> Finding:
    part, folder = "shared memory", Path("/dev/shm")
    if not folder.is_dir():
        return Finding(part, "no /dev/shm", "note", "vLLM's and NCCL's workers use it")
    free = shutil.disk_usage(folder).free / GIB
    if free >= MIN_SHM_GIB:
        return Finding(part, f"{free:.1f} GiB free")
    meaning = "workers pass tensors through it and die when it is full: start the container with more (--shm-size)"
    return Finding(part, f"{free:.1f} GiB free", "note", meaning)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return Finding("CPU cores", f"{usable} usable of {os.cpu_count()}")


def _slurm(environ: Mapping[str, str]) -> Finding:
    """The scheduler's variables in this process."""
    from megarlhf.runtime import WITHOUT_STEP, is_shell_of_step

    names = [name for name in environ if name.startswith("SLURM_")]
    if not names:
        on_path = "sbatch is on PATH" if shutil.which("sbatch") else "no sbatch on PATH either"
        return Finding("Slurm", "no SLURM_ variables", "ok", f"not inside a job; {on_path}")
    shown = ["JOB_ID", "JOB_NODELIST", "NTASKS", "PROCID", "LOCALID", "NODEID", "CPUS_PER_TASK", "RESTART_COUNT"]
    value = ", ".join(f"{name}={environ[f'SLURM_{name}']}" for name in shown if f"SLURM_{name}" in environ)
    meaning = f"{len(names)} SLURM_ variables"
    if is_shell_of_step(environ):
        meaning += (
            "; a shell in a step (srun --pty, salloc): megarlhf takes itself for the only rank of a launcher, and "
        )
        return Finding("Slurm", value, "note", f"{meaning}starts ranks of its own by `{WITHOUT_STEP} megarlhf ...`")
    if "SLURM_STEP_ID" in environ:
        return Finding("Slurm", value, "ok", meaning)
    # The shell of an sbatch script sees SLURM_PROCID=0 too, but belongs to no step.
    meaning += "; no SLURM_STEP_ID: not under srun, so this process is no rank"
    return Finding("Slurm", value, "note", meaning)


def _folders(package: str, search_path: Sequence[str] | None = None) -> list[Path]:
    """Folders of a package; none if it is not installed. Nothing is imported."""
    spec = PathFinder.find_spec(package, search_path)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
