"""Checks of all machines of a run together, in seconds, before a model is built.

Every rank collects facts about itself (`rank_facts`), and `problems` compares all of them. A shared run directory and
sums over groups of ranks are tried. Nothing is left behind. One message names all problems by node and rank.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megarlhf
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import logical_tensors
from megarlhf.architectures.trained import count_trained, trained_tensors
from megarlhf.config import ROLES, DPOConfig, RLConfig, RMConfig, SFTConfig, trained_roles
from megarlhf.observe.watch.stacks import rank_ranges
from megarlhf.packages import PACKAGES, version_of
from megarlhf.parallel.process_groups import made_by_members
from megarlhf.resume.points.point import allocated_bytes, find_points, leftovers, passed_over, superfluous
from megarlhf.runtime import Runtime, gpu_in_use, gpu_versions, sees_gpus
from megarlhf.weights.checkpoint.dtype import resolve_dtype
from megarlhf.weights.checkpoint.peft import adapted

GB = 10**9
WARN_SKEW, MAX_SKEW = 1.0, 60.0
"""Seconds by which a node's clock may differ from the first rank's."""
SEE_SECONDS = 15.0
"""Time until a node must see another node's file. Network file systems keep old listings for some seconds."""
SUM_SECONDS = 120.0
"""Time for one sum over a group of ranks, with its connections."""
OTHERS_BYTES = 4 << 30
"""GPU memory that may be in use before a model is built: this process's own context and its communicators."""
_BYTES_PER_PARAMETER = {"fp32": (4, 12), "bf16": (2, 14)}
"""Bytes in an export, and in a resume point with fp32 main parameters and Adam's two moments, by dtype."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts about one rank and its node."""

    node: str
    rank: int
    versions: Mapping[str, str]
    open_files: float
    """Soft limit, `ulimit -n`."""
    gpu: str | None = None
    """UUID of this rank's GPU; None without one."""
    gpu_used: int = 0
    """Bytes of its memory that are in use."""
    gpu_bytes: int = 0
    skew: float = 0.0
    """Seconds by which its clock is ahead of the first rank's."""
    directory: tuple[str, ...] = ()
    """Problems of the run directory on this rank's node."""


def require_gpus(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Check, before joining the run, that torch sees the GPUs that Slurm has given to this node.

    Ranks with and without a GPU would wait for each other in different ways. Raises: ValueError.
    """
    promised = environ.get("SLURM_GPUS_ON_NODE", "0")
    if promised.isdecimal() and int(promised) and not sees_gpus():
        raise ValueError(
            f"{_node(environ)} (rank {rank}): Slurm has given this node {promised} GPU(s), but torch sees none; check "
            "the driver there (nvidia-smi), that torch is built for it, and that the container is started with its "
            "GPUs (--nv); or ask for no GPUs (--gpus-per-node=0)"
        )


def check_nodes(cfg: Any, runtime: Runtime) -> list[str]:
    """Check every node of the run. Collective; returns notes for the user, in sentences.

    Raises: ValueError on every rank, with all problems. Nothing has been changed then.
    """
    facts = _gather(rank_facts(cfg.run.dir, runtime))
    refusals = problems(facts)
    if runtime.rank == 0 and (needed := needed_bytes(cfg)):
        refusals += disk_problems(cfg.run.dir, needed, facts[0].node, cfg.checkpoint.keep_every)
    refusals = _from_first(refusals)
    if refusals:
        raise ValueError(
            f"{len({fact.node for fact in facts})} node(s), {len(facts)} rank(s) were looked at before anything "
            f"was built; {len(refusals)} problem(s):\n" + "\n".join(f"  - {problem}" for problem in refusals)
        )
    _check_sums(facts, runtime)  # last: a node with other software may not compute the same sums
    return notes(facts)


def rank_facts(run_dir: Path, runtime: Runtime) -> RankFacts:
    """Facts about this rank. Collective, for the clocks and the directory."""
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
    """Problems that prevent the run, from the facts of all ranks."""
    refusals = []
    for name in sorted({name for fact in facts for name in fact.versions}):
        by_version = _by_version(facts, name)
        if len(by_version) > 1:
            refusals.append(f"{name} differs: {'; '.join(f'{v} on {where(on)}' for v, on in by_version.items())}")
    limit = 512 + 4 * len(facts)
    for value, on in _grouped(facts, lambda f: [f.open_files] if 0 <= f.open_files < limit else []).items():
        refusals.append(
            f"{where(on)}: ulimit -n is {value:.0f}, and {len(facts)} ranks need {limit} open files; raise it "
            f"(ulimit -n {limit} in the script that MEGARLHF_ENV names, or LimitNOFILE of slurmd)"
        )
    for (_, gpu), on in _grouped(facts, lambda f: [] if f.gpu is None else [(f.node, f.gpu)]).items():
        if len(on) > 1:
            refusals.append(f"{where(on)}: share the GPU {gpu}; start one rank for each GPU")
    for fact in facts:
        if fact.gpu_used > OTHERS_BYTES:
            refusals.append(
                f"{where([fact])}: {fact.gpu_used / GB:.1f} of {fact.gpu_bytes / GB:.1f} GB of its GPU {fact.gpu} are "
                "in use before anything is built; end the processes that hold them (nvidia-smi)"
            )
        if abs(fact.skew) > MAX_SKEW:
            refusals.append(f"{where([fact])}: {_clock(fact)}; correct it (NTP)")
    return refusals + [f"{where(on)}: {problem}" for problem, on in _grouped(facts, lambda f: f.directory).items()]


def notes(facts: Sequence[RankFacts]) -> list[str]:
    """Notes for the user that do not prevent the run."""
    by_node = {fact.node: fact for fact in facts if WARN_SKEW < abs(fact.skew) <= MAX_SKEW}
    return [f"{where([fact])}: {_clock(fact)}" for fact in by_node.values()]


def where(facts: Sequence[RankFacts]) -> str:
    """`n1 (rank 0-7), n2 (rank 8)`, for example; at most four nodes are named."""
    by_node = _by_node(facts)
    shown = [f"{node} (rank {rank_ranges(ranks)})" for node, ranks in list(by_node.items())[:4]]
    return ", ".join(shown) + (f" and {len(by_node) - 4} more nodes" if len(by_node) > 4 else "")


def needed_bytes(cfg: Any) -> int:
    """Bytes of two resume points and an export of the trained roles; 0 for a run that saves nothing."""
    total, roles = 0, cfg.roles() if isinstance(cfg, SFTConfig | RMConfig | DPOConfig | RLConfig) else {}
    for name, section in roles.items():
        if name not in trained_roles(cfg):
            continue
        arch, head = architecture_from_hf(section.model.hf_directory()), ROLES[name].head
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
    """A problem if `needed` bytes do not fit. New resume points replace the run's own, except those of `keep_every`."""
    replaced = [*superfluous(find_points(run_dir), keep=0, keep_every=keep_every), *passed_over(run_dir)]
    held = sum(map(allocated_bytes, [*(point.path for point in replaced), *leftovers(run_dir)]))
    existing = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if free + held >= needed:
        return []
    problem = f"{node} (rank 0): {existing} has {free / GB:.2f} GB free, and two resume points and an export of the "
    return [problem + f"trained roles take {needed / GB:.2f} GB; free some, or name another run.dir"]


def _node(environ: Mapping[str, str]) -> str:
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _versions() -> dict[str, str]:
    """Versions that must be equal on all ranks."""
    versions = {name: version_of(name) or "missing" for name in PACKAGES}
    versions |= {"python": platform.python_version(), "megarlhf": megarlhf.__version__}
    versions["sources of megarlhf"] = source_digest(Path(megarlhf.__file__).parent)
    return versions | gpu_versions()


def source_digest(package: Path) -> str:
    """Digest of all Python files. A commit does not show later changes, and an installation has none."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _skew() -> float:
    """Seconds by which this clock is ahead of rank 0's: the least of three measurements. Collective."""
    skews = []
    for _ in range(3):
        dist.barrier()
        clocks = _gather(time.time())
        skews.append(clocks[dist.get_rank()] - clocks[0])
    return min(skews, key=abs)


def _try_directory(run_dir: Path, runtime: Runtime) -> Iterator[str]:
    """Problems of the run directory on this rank's node. Collective.

    Every node must see a file of rank 0, and rank 0 a file of every node. The files are removed again, and so is the
    directory if it did not exist.
    """
    token = _from_first(uuid.uuid4().hex if runtime.rank == 0 else "")
    name = run_dir / f".preflight-{token}"
    made: list[Path] = []
    # os.path, not Path, which may raise if a file system fails: the other ranks would wait for this one.
    if runtime.rank == 0:
        made = [path for path in (run_dir.absolute(), *run_dir.absolute().parents) if not os.path.exists(path)]
        not_made = list(_attempt(lambda: run_dir.mkdir(parents=True, exist_ok=True), run_dir))
        yield from not_made or _attempt(lambda: name.write_text(token), run_dir)
    is_written = _from_first(os.path.isfile(name) if runtime.rank == 0 else False)
    own = name.with_name(f"{name.name}-{runtime.rank}")
    if is_written and runtime.local_rank == 0 and runtime.rank:
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
            yield f"files that rank {rank_ranges(unseen)} wrote to run.dir = {run_dir.absolute()} are not seen here"
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
    """Sum over the world and over each node, and pass a number from each node to the next. Collective.

    Raises: ValueError, with this rank's name, if a sum is wrong or does not arrive.
    """
    by_node = list(_by_node(facts).values())
    local_ranks = next(ranks for ranks in by_node if runtime.rank in ranks)
    _require_sum("all ranks", list(range(len(facts))), None, runtime)
    if len(by_node) == 1:
        return
    with made_by_members("check of the nodes"):
        node_group = dist.new_group(local_ranks, backend=runtime.backend, use_local_synchronization=True)
    _require_sum("the ranks of this node", local_ranks, node_group, runtime)
    dist.destroy_process_group(node_group)
    local_index = local_ranks.index(runtime.rank)
    if local_index < min(map(len, by_node)):
        ring = [ranks[local_index] for ranks in by_node]
        position = ring.index(runtime.rank)
        _require_passed(ring[(position + 1) % len(ring)], ring[position - 1], runtime)


def _require_sum(name: str, ranks: Sequence[int], group: dist.ProcessGroup | None, runtime: Runtime) -> None:
    total = torch.tensor([float(runtime.rank + 1)], device=runtime.device)
    with _named(f"an all-reduce over {name}"):
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
        raise RuntimeError(f"gave {value:g} instead of {expected:g}")


@contextlib.contextmanager
def _named(operation: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            f"{_node(os.environ)} (rank {dist.get_rank()}): {operation} failed: {error}; check the network between "
            "nodes (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO, firewalls), or leave a node out (sbatch --exclude)"
        ) from error


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _from_first(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _grouped(facts: Sequence[RankFacts], keys: Callable[[RankFacts], Iterable[Any]]) -> dict[Any, list[RankFacts]]:
    """Facts by each of their keys."""
    groups: dict[Any, list[RankFacts]] = {}
    for fact in facts:
        for key in keys(fact):
            groups.setdefault(key, []).append(fact)
    return groups


def _by_node(facts: Sequence[RankFacts]) -> dict[str, list[int]]:
    """Ranks of each node."""
    return {node: [fact.rank for fact in on] for node, on in _grouped(facts, lambda fact: [fact.node]).items()}


def _by_version(facts: Sequence[RankFacts], name: str) -> dict[str, list[RankFacts]]:
    return _grouped(facts, lambda fact: [fact.versions.get(name, "missing")])


def _clock(fact: RankFacts) -> str:
    return f"its clock is {abs(fact.skew):.1f} s {'ahead of' if fact.skew > 0 else 'behind'} that of rank 0"
