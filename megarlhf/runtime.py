"""Capabilities of this machine, and the rank of this process in the run.

Only this module looks for a device. Device, backend and rank are passed to all other modules.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarlhf.memory import available_bytes, peak_resident_bytes
from megarlhf.packages import PACKAGES, version_of

GPU = "cuda"
"""Torch's name for a GPU."""
STORE_IS_THERE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable that a launcher (torchrun, or a plain start) sets to True if it serves, at MASTER_PORT, the store through
which ranks find each other. Torch reads it; without it rank 0 makes the store."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Installed packages and devices, found without making a device context."""

    device_type: str
    device_count: int
    device_name: str
    backends: tuple[str, ...]
    versions: Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One process of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Ranks on this machine."""


@dataclass(frozen=True, kw_only=True)
class Runtime(RankInfo):
    """A process that has joined its run: rank, device and communication backend."""

    ranks_per_block: int = 1
    """Greatest number that divides the number of ranks of every machine. It is the same on all ranks."""
    device: torch.device
    backend: str
    timeout_seconds: float = 1800.0
    """Time after which a collective fails if not all ranks have joined it."""
    deterministic: bool = False
    """Whether only kernels with a fixed order of sums may run."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def capabilities() -> Capabilities:
    """Capabilities of this machine. Nothing heavier than torch is imported."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    return Capabilities(
        device_type=GPU if count else "cpu",
        device_count=count,
        device_name=_gpu_names() if count else (os.uname().machine + " CPU"),
        backends=tuple(backends),
        versions={name: version_of(name) for name in PACKAGES},
    )


def _gpu_names(driver: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """GPU models in the driver's list. Torch would make a context on a device to read its name."""
    listed = [path.read_text() for path in sorted(driver.glob("*/information"))]
    lines = [line.partition(":") for text in listed for line in text.splitlines()]
    models = {value.strip() for key, _, value in lines if key == "Model"}
    return ", ".join(sorted(models)) or "GPU (the driver lists no name)"


def has_transformer_engine() -> bool:
    """Whether the fused TransformerEngine layers can be used: the package and a GPU."""
    return version_of("transformer-engine") is not None and torch.cuda.is_available()


def detect_rank(env: Mapping[str, str]) -> RankInfo | None:
    """Rank that a launcher gave this process; None after a plain start.

    `torchrun` sets RANK, LOCAL_RANK and WORLD_SIZE; `srun` sets SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_ID and the
    number of tasks. The shell of an `sbatch` script has SLURM_PROCID=0 too, but no SLURM_STEP_ID: it belongs to no step
    and is not a rank. In a task of a step Slurm's numbers are used, unless a launcher inside the task has set
    LOCAL_WORLD_SIZE too. RANK and WORLD_SIZE alone may come from the shell that submitted the job, or from a
    container's entry (pyxis with an image of PyTorch), and do not tell the number of ranks per machine.
    """
    num_tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS"))
    is_task = "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and num_tasks is not None
    if "RANK" in env and "WORLD_SIZE" in env and ("LOCAL_WORLD_SIZE" in env or not is_task):
        world, rank = int(env["WORLD_SIZE"] or 1), int(env["RANK"] or 0)
        if not 0 <= rank < world:
            raise ValueError(f"RANK = {rank} is not in [0, WORLD_SIZE = {world}); unset both, or start with torchrun")
        return RankInfo(
            rank=rank,
            local_rank=int(env.get("LOCAL_RANK", 0)),
            world_size=world,
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", world)),
        )
    if is_task and num_tasks is not None:
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "1"))
        return RankInfo(
            rank=int(env["SLURM_PROCID"]),
            local_rank=int(env.get("SLURM_LOCALID", 0)),
            world_size=int(num_tasks),
            local_world_size=_tasks_of_node(per_node, int(env.get("SLURM_NODEID", 0))),
        )
    return None


WITHOUT_STEP = "env -u SLURM_STEP_ID"
"""Start of a command line by which a command in a Slurm step starts its own ranks."""


def is_shell_of_step(env: Mapping[str, str]) -> bool:
    """Whether a launcher's rank 0 of 1 is in truth a shell in a Slurm step of one task, or started from one.

    `srun --pty bash` has SLURM_PTY_PORT. `salloc` opens the step 0xfffffffa where Slurm has `use_interactive_step`.
    """
    interactive = env.get("SLURM_STEP_ID") == str(0xFFFFFFFA) or "SLURM_PTY_PORT" in env
    if not interactive or "LOCAL_WORLD_SIZE" in env:
        return False
    info = detect_rank(env)
    return info is not None and info.world_size == 1


def _tasks_of_node(tasks_per_node: str, node: int) -> int:
    """Tasks of a node. Slurm writes tasks per node as `8(x3),4`: three nodes of eight, then one of four."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        count, _, repeat = part.partition("(x")
        counts += [int(count)] * (int(repeat.rstrip(")")) if repeat else 1)
    return counts[min(node, len(counts) - 1)]


def initialize(
    info: RankInfo,
    *,
    seed: int,
    timeout_seconds: float = 1800.0,
    deterministic: bool = False,
    store: dist.Store | None = None,
) -> Runtime:
    """Join the run: device, threads, seeds and the default process group (NCCL on GPUs, else gloo).

    deterministic: operations of torch without a deterministic variant raise; the caller has set the variables of
                   `planning.machine.determinism.environment`
    store:         the store through which ranks find each other; default: the one at MASTER_ADDR and MASTER_PORT
    """
    on_gpu = torch.cuda.is_available()
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    # With --gpus-per-task each rank sees one device, its own, as number 0.
    device_index = info.local_rank % max(1, torch.cuda.device_count())
    if on_gpu:
        torch.cuda.set_device(device_index)
    else:
        if info.local_world_size >= (os.cpu_count() or 1):
            # With more runnable threads than cores OpenMP spins: up to ten times slower.
            torch.set_num_threads(1)
            os.environ["OMP_NUM_THREADS"] = "1"
        # Compiling small CPU functions (Megatron's fusions, vLLM's sampler) costs more than it saves: 10 s
        # at the first sample against nothing measurable later.
        torch._dynamo.config.disable = True
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    backend, device = ("nccl", torch.device("cuda", device_index)) if on_gpu else ("gloo", torch.device("cpu"))
    if not dist.is_initialized():
        _default_rendezvous(info, device_index if on_gpu else info.local_rank)
        dist.init_process_group(
            backend,
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            # No `device_id`: with it torch makes every further group by splitting the world, with all ranks.
        )
        os.environ.pop(STORE_IS_THERE, None)  # child processes may make a store of their own
    return Runtime(
        **vars(info),
        ranks_per_block=_ranks_per_block(info),
        device=device,
        backend=backend,
        timeout_seconds=timeout_seconds,
        deterministic=deterministic,
    )


def _ranks_per_block(info: RankInfo) -> int:
    """Greatest number that divides the ranks of every machine. Collective."""
    sizes = [info.local_world_size] * dist.get_world_size()
    dist.all_gather_object(sizes, info.local_world_size)
    return math.gcd(*sizes)


def _default_rendezvous(info: RankInfo, device_index: int) -> None:
    """Set torchrun's variables, which libraries read (vLLM's external launcher).

    For them LOCAL_RANK is the index of this rank's device among the visible ones: 0 if each task sees only its own.
    """
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        if info.world_size > 1:
            raise ValueError(
                f"rank {info.rank} of {info.world_size} has no MASTER_PORT; start ranks with torchrun, with "
                "slurm/run.sbatch (which sets MASTER_ADDR and MASTER_PORT), or plainly with run.nproc"
            )
        os.environ["MASTER_PORT"] = str(free_port())
    try:
        socket.getaddrinfo(address := os.environ["MASTER_ADDR"], None)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"rank {info.rank} finds no host of the name MASTER_ADDR = {address!r}: {error}. Export one that "
            "every node resolves, such as the first rank's address; under Slurm in the script that MEGARLHF_ENV names"
        ) from error
    sizes = {"WORLD_SIZE": info.world_size, "LOCAL_WORLD_SIZE": info.local_world_size}
    os.environ.update({name: str(n) for name, n in {"RANK": info.rank, "LOCAL_RANK": device_index, **sizes}.items()})


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def without_torch_determinism() -> Iterator[None]:
    """Scope for a library in this process that is responsible for its own kernels.

    Torch's switch would refuse operations of vLLM that do not change responses, such as the cumulative sum of its
    sampler.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(False)
    torch._inductor.config.deterministic = True  # kernels are chosen without timing them
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def compute_capability(runtime: Runtime) -> tuple[int, int] | None:
    """Compute capability of this rank's GPU, such as (9, 0) for an H100; None on a CPU."""
    return torch.cuda.get_device_capability(runtime.device) if runtime.device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that the host's clock measures finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(runtime: Runtime) -> int:
    """Bytes that this rank can still allocate on its device.

    On a GPU it includes memory that torch's allocator keeps for reuse. On a CPU it is this rank's equal share of the
    memory that is available by the machine and its control groups, since a container or a Slurm step limits its ranks
    together. If each rank has its own group, more than that is available.
    """
    if runtime.device.type == "cuda":
        kept = torch.cuda.memory_reserved(runtime.device) - torch.cuda.memory_allocated(runtime.device)
        return torch.cuda.mem_get_info(runtime.device)[0] + kept
    return available_bytes() // runtime.local_world_size


def give_back_cached(runtime: Runtime) -> None:
    """Return the GPU memory that torch's allocator keeps for reuse."""
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory_bytes(runtime: Runtime) -> int:
    """Peak memory of this rank: reserved by torch's allocator on a GPU, resident memory of the process on a CPU."""
    if runtime.device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(runtime.device))
    return peak_resident_bytes()


def record_allocations(device: torch.device) -> None:
    """Record each allocation of torch's GPU allocator with its stack, until `write_allocations`."""
    torch.cuda.memory._record_memory_history(stacks="python", device=device)


def write_allocations(device: torch.device, path: Path) -> None:
    """Write the recorded allocations for pytorch.org/memory_viz, and stop recording."""
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)


def counts_allocations(device: torch.device) -> bool:
    """Whether torch counts the allocations of this device, as it does on GPUs only."""
    return device.type == "cuda"


def allocated_bytes(device: torch.device) -> int:
    """Bytes of GPU memory that tensors and torch's libraries have allocated now."""
    return int(torch.cuda.memory_allocated(device))


def peak_allocated_bytes(device: torch.device) -> int:
    """Peak of `allocated_bytes` since `reset_peak_allocated`."""
    return int(torch.cuda.max_memory_allocated(device))


def reset_peak_allocated(device: torch.device) -> None:
    """Reset the peak to the memory that is allocated now."""
    torch.cuda.reset_peak_memory_stats(device)


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the random generators of Python, numpy and torch in this process, as texts and numbers."""
    version, keys, gauss = random.getstate()
    kind, key, *position = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(keys), gauss],
        "numpy": [kind, np.asarray(key).tolist(), *position],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a result of `random_state`, on a device of the same type."""

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, keys, gauss = state["python"]
    kind, key, *position = state["numpy"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state((kind, np.array(key, dtype=np.uint32), *position))
    torch.set_rng_state(tensor(state["torch"]))
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(tensor(state["device"]), device)


def sees_gpus() -> bool:
    """Whether torch can use a GPU here."""
    return torch.cuda.is_available()


def gpu_versions() -> dict[str, str]:
    """Versions of torch's CUDA and of the NVIDIA driver, as far as they are installed."""
    versions = {} if torch.version.cuda is None else {"CUDA of torch": str(torch.version.cuda)}
    with contextlib.suppress(OSError):
        match = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
        versions |= {"NVIDIA driver": match[0]} if match else {}
    return versions


def gpu_in_use(runtime: Runtime) -> tuple[str, int, int] | None:
    """UUID of this rank's GPU, its bytes in use, and all its bytes; None without a GPU."""
    if runtime.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(runtime.device)
    return str(torch.cuda.get_device_properties(runtime.device).uuid), total - free, total


def shutdown() -> None:
    """Leave the run."""
    if dist.is_initialized():
        dist.destroy_process_group()


def first_gpu() -> torch.device:
    """The GPU of a process that is no rank of a run. Raises: ValueError if there is none."""
    if not torch.cuda.is_available():
        raise ValueError("device = gpu, but torch sees no GPU here; set device: cpu")
    return torch.device("cuda", 0)
