"""Published converters beside ours: installing them apart, running them, measuring all in the same way.

They are no dependencies of megarlhf: `prepare` installs one with the versions of requirements/bench-peers.txt
into build/peers/, `run` has its script convert one directory in a process of its own.

    env = prepare("mbridge")                          # None where it cannot be installed; the log says why
    result = run("mbridge", hf=DIR, out=NEW_DIR)      # what its script wrote: seconds, bytes, patches
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "requirements" / "bench-peers.txt"
INSTALLED = ROOT / "build" / "peers"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A published converter: the script that drives it and the packages that .venv lacks for it."""

    script: str
    packages: tuple[str, ...]


PEERS = {
    "mbridge": Peer(script="benchmarks.peer_mbridge", packages=("mbridge",)),
    "megatron-bridge": Peer(
        script="benchmarks.peer_megatron_bridge",
        packages=("megatron-bridge", "omegaconf", "antlr4-python3-runtime"),
    ),
}

NAMES = tuple(PEERS)


class UnavailableError(RuntimeError):
    """A peer that cannot be had on this machine; the message says why."""


def install(name: str, packages: Iterable[str]) -> Path:
    """The directory under build/peers/ that has `packages` in their pinned versions; made first where it is missing.

    Raises: UnavailableError where pip cannot.
    """
    target = INSTALLED / name
    requirements = [f"{package}=={pinned(package)}" for package in packages]
    stamp = target / ".requirements"
    if not stamp.is_file() or stamp.read_text().split() != requirements:
        part = target.with_name(f"{name}.part")
        for directory in (part, target):
            shutil.rmtree(directory, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        done = subprocess.run([*command, "--target", str(part), *requirements], capture_output=True, text=True)
        if done.returncode:
            raise UnavailableError(f"pip install {' '.join(requirements)}: {_last_error(done.stderr)}")
        (part / stamp.name).write_text("\n".join(requirements) + "\n")
        part.rename(target)
    return target


def prepare(name: str) -> dict[str, str] | None:
    """The environment to run `name` in; installs it first where it is missing. None, and a warning, if that fails.

    OMP_NUM_THREADS is taken out: a peer has as many threads as torch gives it, which is one per core.
    """
    try:
        target = install(name, _peer(name).packages)
    except UnavailableError as reason:
        log.warning("%s is left out: %s", name, reason)
        return None
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    env["PYTHONPATH"] = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    return env | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(name: str, hf: str | os.PathLike[str], out: str | os.PathLike[str]) -> dict[str, Any]:
    """Has `name` convert `hf` to Megatron in memory and back to the new directory `out`; what its script measured.

    Raises: RuntimeError if it cannot be installed or fails; its last lines are in the message.
    """
    env = prepare(name)
    if env is None:
        raise RuntimeError(f"{name} could not be installed into {INSTALLED / name}; the warning above says why")
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        paths = [os.path.abspath(path) for path in (hf, out)]
        command = [sys.executable, "-m", _peer(name).script, "--hf", paths[0], "--out", paths[1]]
        done = subprocess.run([*command, "--json", str(result)], env=env, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join(done.stderr.splitlines()[-15:])
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{tail}")
        return json.loads(result.read_text())


def pinned(package: str) -> str:
    """Version of `package` in requirements/bench-peers.txt."""
    pins = dict(line.split("==") for line in PINS.read_text().split("\n") if "==" in line and not line.startswith("#"))
    if package not in pins:
        raise ValueError(f"{PINS} does not pin {package}; it has {', '.join(sorted(pins))}")
    return pins[package].strip()


def _peer(name: str) -> Peer:
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    return PEERS[name]


def _last_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return (errors or stderr.splitlines() or ["no message"])[-1]


class AnonymousPeak:
    """Scope that finds the peak of anonymous memory above where it began, over this process and its descendants.

    A thread adds up RssAnon of /proc/PID/status every 5 ms; it looks for new descendants every 0.25 s, because that
    means reading all of /proc (5 ms where 100 processes run). Not in it: pages of mapped files, tmpfs and shared
    memory. A page that a forked child shares with its parent counts in both. A thread cannot sample while others
    hold the interpreter's lock: `largest_gap` (seconds) says for how long it could not.

        with AnonymousPeak() as peak: work()
        peak.peak_bytes
    """

    def __init__(self, interval: float = 0.005, family_interval: float = 0.25) -> None:
        self._interval = interval
        self._family_interval = family_interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="anonymous-peak", daemon=True)
        self._start = 0
        self._top = 0
        self.largest_gap = 0.0
        self.samples = 0

    @property
    def peak_bytes(self) -> int:
        """Peak above the value at the beginning; never below 0."""
        return max(0, self._top - self._start)

    def __enter__(self) -> AnonymousPeak:
        self._start = self._top = anonymous_bytes(family(os.getpid()))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        members: list[int] = []
        last = looked = time.perf_counter()
        while True:
            ended = self._done.wait(self._interval)
            now = time.perf_counter()
            if not members or now - looked > self._family_interval:
                members, looked = family(os.getpid()), now
            self._top = max(self._top, anonymous_bytes(members))
            self.largest_gap = max(self.largest_gap, now - last)
            self.samples += 1
            last = now
            if ended:
                return


def anonymous_bytes(pids: Iterable[int]) -> int:
    """RssAnon of these processes, in bytes; one that has ended counts as 0."""
    return sum(_rss_anon(pid) for pid in pids)


def family(pid: int) -> list[int]:
    """`pid` and its descendants, from the parents that /proc names: not every kernel lists children there."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            parent = _parent(entry)
            children.setdefault(parent, []).append(int(entry))
    members = [pid]
    for member in members:
        members += children.get(member, [])
    return members


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # PID (name) state parent ...: the name may hold anything, also ")".
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _rss_anon(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"RssAnon:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def fsync_tree(directory: Path) -> None:
    """Has every file under `directory`, and the directories, on the disk when it returns."""
    for path in [*sorted(directory.rglob("*")), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def same_tensors(left: Path, right: Path) -> bool:
    """Whether two directories of safetensors hold the same names, dtypes, shapes and bits, in whichever shards."""
    places = [_places(directory) for directory in (left, right)]
    if places[0].keys() != places[1].keys():
        return False
    for name in places[0]:
        left_tensor, right_tensor = (_read(place[name], name) for place in places)
        if left_tensor.dtype != right_tensor.dtype or left_tensor.shape != right_tensor.shape:
            return False
        if not torch.equal(left_tensor.contiguous().view(torch.uint8), right_tensor.contiguous().view(torch.uint8)):
            return False
    return bool(places[0])


def _places(directory: Path) -> dict[str, Path]:
    places: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if name in places:
                    raise ValueError(f"{name} is in {places[name]} and in {path}")
                places[name] = path
    return places


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def peer_arguments(doc: str | None) -> argparse.Namespace:
    """The command line that every peer script has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face directory to convert")
    parser.add_argument("--out", type=Path, required=True, help="Hugging Face directory to write; must not exist")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    return parser.parse_args()


def join_alone() -> None:
    """A process group of this one process, and Megatron-Core's groups over it. No port is opened."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def measure(
    name: str,
    arguments: argparse.Namespace,
    *,
    to_megatron: Callable[[], Any],
    to_hf: Callable[[Any], None],
    patched: Sequence[str],
    settings: Sequence[str],
) -> None:
    """Times `to_megatron`, then `to_hf` of what it returned up to the fsync; writes the result as JSON.

    Called with everything imported and the process group up: neither is in the times or in the memory.
    """
    version = importlib.metadata.version(name)
    if version != pinned(name):
        raise RuntimeError(f"the patches are for {name} {pinned(name)}, found {version}; run it through peers.run")
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} exists; name a new directory")
    with AnonymousPeak() as peak:
        begin = time.perf_counter()
        model = to_megatron()
        middle = time.perf_counter()
        to_hf(model)
        fsync_tree(arguments.out)
        end = time.perf_counter()
    result = {
        "name": name,
        "version": version,
        "to_megatron_seconds": middle - begin,
        "to_hf_seconds": end - middle,
        "peak_anonymous_bytes": peak.peak_bytes,
        "sampling_gap_seconds": peak.largest_gap,
        "torch_threads": torch.get_num_threads(),
        "versions": versions(("torch", "megatron-core", "transformers", "safetensors")),
        "settings": list(settings),
        "patched": list(patched),
        "bit_exact": same_tensors(arguments.hf, arguments.out),
    }
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def versions(packages: Iterable[str]) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}
