"""Are the machines fit for this run? Asked of all of them together, in seconds, before a model is built.

Every rank looks at itself (`examine`); what they have found is compared in one place (`problems`); and what only all
of them together can show is tried: a directory that every node sees, and a sum over every group of ranks. Nothing is
left behind. What does not fit is named by node and rank, all of it in one message.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import resource
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megarlhf
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import Head, logical_tensors
from megarlhf.architectures.trained import count_trained, trained_tensors
from megarlhf.config import DPOConfig, RLConfig, RMConfig, RoleConfig, SFTConfig
from megarlhf.packages import PACKAGES, version_of
from megarlhf.parallel.process_groups import made_by_members
from megarlhf.resume.points.point import allocated_bytes, find_points, leftovers, passed_over, superfluous
from megarlhf.runtime import Runtime, gpu_in_use, gpu_versions, sees_gpus
from megarlhf.weights.checkpoint.dtype import resolve_dtype
from megarlhf.weights.checkpoint.peft import adapted

GB = 10**9
WARN_SKEW, MAX_SKEW = 1.0, 60.0
"""Seconds that a node's clock may differ from the first rank's."""
SEE_SECONDS = 15.0
"""Until a file that another node has written must be seen: network file systems keep old listings for some seconds."""
SUM_SECONDS = 120.0
"""For one sum over a group of ranks, its connections included."""
OTHERS_BYTES = 4 << 30
"""Of a GPU's memory that may be in use before a model is built: this process's own context and its communicators."""
_BYTES_PER_PARAMETER = {"fp32": (4, 12), "bf16": (2, 14)}
"""By dtype: in an export; in a resume point, with fp32 main parameters and Adam's two moments."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank has found where it runs."""

    node: str
    rank: int
    versions: Mapping[str, str]
    open_files: float
    """The soft limit, `ulimit -n`."""
    gpu: str | None = None
    """Identity of this rank's GPU; None without one."""
    gpu_used: int = 0
    """Bytes of its memory that are in use."""
    gpu_bytes: int = 0
    skew: float = 0.0
    """Seconds by which its clock is ahead of the first rank's."""
    directory: tuple[str, ...] = field(default=())
    """What is wrong with the run directory, seen from this rank's node."""


def require_gpus(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Before joining the run, since ranks with and without a GPU would wait for each other in different ways.

    Raises: ValueError when Slurm has given this node GPUs and torch sees none.
    """
    promised = environ.get("SLURM_GPUS_ON_NODE", "0")
    if promised.isdecimal() and int(promised) and not sees_gpus():
        raise ValueError(
            f"{_node(environ)} (rank {rank}): Slurm has given this node {promised} GPU(s), but torch sees none; check "
            "the driver there (nvidia-smi), that torch is built for it, and that the container is started with its "
            "GPUs (--nv); or ask for no GPUs (--gpus-per-node=0)"
        )


def check_nodes(cfg: Any, runtime: Runtime) -> list[str]:
    """Check every node of the run. Collective; returns what is no hindrance but should be known, in sentences.

    Raises: ValueError on every rank, with everything that does not fit. Nothing has been changed then.
    """
    facts = _gather(examine(cfg.run.dir, runtime))
    first_of_node = {each.node: each.rank for each in reversed(facts)}
    found = problems(facts)
    if runtime.rank == 0 and (needed := needed_bytes(cfg)):
        found += disk_problems(cfg.run.dir, needed, facts[0].node, cfg.checkpoint.keep_every)
    found = _from_first(found)
    if not found:  # a node with other software may not even compute the same sums
        _check_sums(facts, runtime)
    if found:
        raise ValueError(
            f"{len(first_of_node)} node(s), {len(facts)} rank(s) were looked at before anything was built; "
            f"{len(found)} problem(s):\n" + "\n".join(f"  - {problem}" for problem in found)
        )
    return notes(facts)


def examine(run_dir: Path, runtime: Runtime) -> RankFacts:
    """What this rank finds. Collective, for the clocks and the directory."""
    gpu, used, total = gpu_in_use(runtime) or (None, 0, 0)
    return RankFacts(
        node=_node(os.environ),
        rank=runtime.rank,
        versions=_versions(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpu=gpu,
        gpu_used=used,
        gpu_bytes=total,
        skew=_skew(),
        directory=tuple(_try_directory(run_dir, runtime)),
    )


def problems(facts: Sequence[RankFacts]) -> list[str]:
    """What hinders the run, from what the ranks have found."""
    found = []
    for name in sorted({name for each in facts for name in each.versions}):
        by_version: dict[str, list[RankFacts]] = {}
        for each in facts:
            by_version.setdefault(each.versions.get(name, "missing"), []).append(each)
        if len(by_version) > 1:
            found.append(f"{name} differs: {'; '.join(f'{v} on {where(on)}' for v, on in by_version.items())}")
    limit = 512 + 4 * len(facts)
    for value, on in _by([each for each in facts if 0 <= each.open_files < limit], lambda e: e.open_files).items():
        found.append(
            f"{where(on)}: ulimit -n is {value:.0f}, and {len(facts)} ranks need {limit} open files; raise it "
            f"(ulimit -n {limit} in the script that MEGARLHF_ENV names, or LimitNOFILE of slurmd)"
        )
    for gpu, on in _by([each for each in facts if each.gpu is not None], lambda each: (each.node, each.gpu)).items():
        if len(on) > 1:
            found.append(f"{where(on)}: share the GPU {gpu[1]}; start one rank for each GPU")
    for each in facts:
        if each.gpu_used > OTHERS_BYTES:
            found.append(
                f"{where([each])}: {each.gpu_used / GB:.1f} of {each.gpu_bytes / GB:.1f} GB of its GPU {each.gpu} are "
                "in use before anything is built; end the processes there that hold them (nvidia-smi)"
            )
        if abs(each.skew) > MAX_SKEW:
            found.append(f"{where([each])}: its clock is {_apart(each.skew)} that of rank 0; correct it (NTP)")
    for problem, on in _by_each(facts).items():
        found.append(f"{where(on)}: {problem}")
    return found


def notes(facts: Sequence[RankFacts]) -> list[str]:
    """What should be known and hinders nothing."""
    by_node = {each.node: each for each in facts if WARN_SKEW < abs(each.skew) <= MAX_SKEW}
    return [f"{where([each])}: its clock is {_apart(each.skew)} that of rank 0" for each in by_node.values()]


def where(facts: Sequence[RankFacts]) -> str:
    """`n1 (rank 0-7), n2 (rank 8)`: at most four nodes are named."""
    by_node = {node: [each.rank for each in on] for node, on in _by(facts, lambda each: each.node).items()}
    shown = [f"{node} (rank {_ranges(ranks)})" for node, ranks in list(by_node.items())[:4]]
    return ", ".join(shown) + (f" and {len(by_node) - 4} more nodes" if len(by_node) > 4 else "")


def needed_bytes(cfg: Any) -> int:
    """Bytes of two resume points and an export of the roles that the run trains; 0 for a run that saves nothing."""
    trained: dict[str, tuple[RoleConfig, Head]] = {}
    if isinstance(cfg, SFTConfig | DPOConfig):
        trained = {"actor": (cfg.actor, "lm")}
    elif isinstance(cfg, RMConfig):
        trained = {"reward_model": (cfg.reward_model, "scalar")}
    elif isinstance(cfg, RLConfig):
        trained = {"actor": (cfg.actor, "lm")}
        if "critic" in cfg.roles():
            trained["critic"] = (cfg.roles()["critic"], "scalar")
    total = 0
    for name, (section, head) in trained.items():
        arch = architecture_from_hf(section.model.hf_directory())
        parameters = sum(math.prod(shape) for shape in logical_tensors(arch, head).values())
        saved = parameters
        if section.lora is not None:
            with_adapter = adapted(arch, section.lora, name)
            saved, _ = count_trained(with_adapter, head, trained_tensors(with_adapter, head))
            parameters = saved if section.lora.export == "adapter" else parameters
        exported, resumed = _BYTES_PER_PARAMETER[resolve_dtype(name, section.model, head).name]
        total += parameters * exported + saved * 2 * resumed
        if name == "actor" and isinstance(cfg, RLConfig):  # in fp32, and in the reference's dtype
            total += parameters * 4 * 3 * (cfg.ema is not None)
            total += parameters * exported * 2 * (cfg.reference_update is not None)
    return total


def disk_problems(run_dir: Path, needed: int, node: str, keep_every: int) -> list[str]:
    """Whether `needed` bytes fit, where the run's own resume points give way to new ones but for those of
    `keep_every`."""
    replaced = [*superfluous(find_points(run_dir), keep=0, keep_every=keep_every), *passed_over(run_dir)]
    held = sum(map(allocated_bytes, [*(each.path for each in replaced), *leftovers(run_dir)]))
    place = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free + held >= needed:
        return []
    problem = f"{node} (rank 0): {place} has {free / GB:.2f} GB free, and two resume points and an export of the "
    return [problem + f"trained roles take {needed / GB:.2f} GB; free some, or name another run.dir"]


def _node(environ: Mapping[str, str]) -> str:
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _versions() -> dict[str, str]:
    """What has to be the same everywhere."""
    versions = {name: version_of(name) or "missing" for name in PACKAGES}
    versions |= {"python": platform.python_version(), "megarlhf": megarlhf.__version__}
    versions["sources of megarlhf"] = source_digest(Path(megarlhf.__file__).parent)
    return versions | gpu_versions()


def source_digest(package: Path) -> str:
    """Of all Python files: a commit does not show what was changed after it, and an installation has none."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _skew() -> float:
    """Seconds by which this clock is ahead of rank 0's, at most: the best of three looks. Collective."""
    looks = []
    for _ in range(3):
        dist.barrier()
        clocks = _gather(time.time())
        looks.append(clocks[dist.get_rank()] - clocks[0])
    return min(looks, key=abs)


def _try_directory(run_dir: Path, runtime: Runtime) -> Iterator[str]:
    """What is wrong with the run directory, from here. Collective. A file of rank 0 has to be seen on every node, and
    one of every node by rank 0; files, and the directory if it was not there, are removed again."""
    token = uuid.uuid4().hex if runtime.rank == 0 else ""
    token = _from_first(token)
    speaks = runtime.local_rank == 0
    name = run_dir / f".preflight-{token}"
    made: list[Path] = []
    # os.path, not Path: the others wait where a rank raises because a file system does not answer as it should.
    if runtime.rank == 0:
        made = [path for path in (run_dir.absolute(), *run_dir.absolute().parents) if not os.path.exists(path)]
        not_made = list(_attempt(lambda: run_dir.mkdir(parents=True, exist_ok=True), run_dir))
        yield from not_made or _attempt(lambda: name.write_text(token), run_dir)
    there = _from_first(os.path.isfile(name) if runtime.rank == 0 else False)
    own = name.with_name(f"{name.name}-{runtime.rank}")
    if there and speaks and runtime.rank:
        if not _appears(name):
            yield (
                f"run.dir = {run_dir.absolute()} is not the directory of rank 0: a file that rank 0 wrote there was "
                f"not seen in {SEE_SECONDS:.0f} s; name a directory that all nodes share, and mount it into containers"
            )
        else:
            yield from _attempt(lambda: own.write_text(token), run_dir)
    written = _gather(str(own) if os.path.isfile(own) else "")
    if runtime.rank == 0:
        unseen = [rank for rank, path in enumerate(written) if path and not _appears(Path(path))]
        if unseen:
            yield f"files that rank {_ranges(unseen)} wrote to run.dir = {run_dir.absolute()} are not seen here"
        for path in [name, *map(Path, filter(None, written))]:
            with contextlib.suppress(OSError):
                path.unlink()
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
    dist.barrier()


def _attempt(action: Callable[[], object], run_dir: Path) -> Iterator[str]:
    try:
        action()
    except OSError as error:
        yield f"run.dir = {run_dir} cannot be written ({error}); name a directory you may write"


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SEE_SECONDS
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system look again
        time.sleep(0.2)
    return True


def _check_sums(facts: Sequence[RankFacts], runtime: Runtime) -> None:
    """Sum over the world, over each node, and pass a number from each node to the next. Collective.

    Raises: ValueError, naming this rank, when a sum is wrong or does not come.
    """
    by_node = [[each.rank for each in on] for on in _by(facts, lambda each: each.node).values()]
    here = next(ranks for ranks in by_node if runtime.rank in ranks)
    _require_sum("all ranks", list(range(len(facts))), None, runtime)
    if len(by_node) == 1:
        return
    with made_by_members("check of the nodes"):
        mine = dist.new_group(here, backend=runtime.backend, use_local_synchronization=True)
    _require_sum("the ranks of this node", here, mine, runtime)
    dist.destroy_process_group(mine)
    columns = min(map(len, by_node))
    place = here.index(runtime.rank)
    if place < columns:
        ring = [ranks[place] for ranks in by_node]
        at = ring.index(runtime.rank)
        _require_passed(ring[(at + 1) % len(ring)], ring[at - 1], runtime)


def _require_sum(what: str, ranks: Sequence[int], group: dist.ProcessGroup | None, runtime: Runtime) -> None:
    total = torch.tensor([float(runtime.rank + 1)], device=runtime.device)
    with _named(f"an all-reduce over {what}"):
        work = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=SUM_SECONDS))
        _require_equal(total.item(), float(sum(ranks) + len(ranks)))


def _require_passed(to: int, source: int, runtime: Runtime) -> None:
    sent = torch.tensor([float(runtime.rank + 1)], device=runtime.device)
    received = torch.zeros_like(sent)
    with _named(f"a message from rank {source} and one to rank {to}, on other nodes,"):
        operations = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
        for work in dist.batch_isend_irecv(operations):
            work.wait(timedelta(seconds=SUM_SECONDS))
        _require_equal(received.item(), float(source + 1))


def _require_equal(value: float, expected: float) -> None:
    if value != expected:
        raise RuntimeError(f"gave {value:g} in place of {expected:g}")


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            f"{_node(os.environ)} (rank {dist.get_rank()}): {what} failed: {error}; check the network between nodes "
            "(NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO, firewalls), or leave a node out (sbatch --exclude)"
        ) from error


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _from_first(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _by(facts: Sequence[RankFacts], key: Callable[[RankFacts], Any]) -> dict[Any, list[RankFacts]]:
    groups: dict[Any, list[RankFacts]] = {}
    for each in facts:
        groups.setdefault(key(each), []).append(each)
    return groups


def _by_each(facts: Sequence[RankFacts]) -> dict[str, list[RankFacts]]:
    groups: dict[str, list[RankFacts]] = {}
    for each in facts:
        for problem in each.directory:
            groups.setdefault(problem, []).append(each)
    return groups


def _ranges(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _apart(skew: float) -> str:
    return f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'}"
