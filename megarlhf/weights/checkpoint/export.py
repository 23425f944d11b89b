"""Writes the weights of live ranks as a Hugging Face directory, by the same copy plan as everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Head, identity_placements, logical_tensors
from megarlhf.placement import RankPlacements, Shape
from megarlhf.weights.checkpoint.formats.huggingface.write import Specs, num_bytes_of, split_by_bytes
from megarlhf.weights.checkpoint.hf_writer import HFWriter, open_hf_writer
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.extent import Extent
from megarlhf.weights.transport.reshard import Resharder
from megarlhf.weights.transport.storages import Storages, copy_local


def export(
    sources: Sequence[RankPlacements],
    live: Storages,
    directory: str | PathLike[str],
    *,
    arch: Architecture,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    rank: int,
    head: Head = "lm",
    writer_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    copy_from: str | PathLike[str] | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
    gather_bytes: int = 1 << 30,
) -> None:
    """Writes the model, cast to `dtype`: every rank its own part of the files.

    All ranks of `sources` call it; they are exactly the ranks of `group`. `config` is the config.json to
    write (its dtype is corrected). `writer_rank` makes the directory with files at full length, in which the tensors
    are holes. Each tensor is gathered on one of the ranks that hold a part of it, and written there into its hole;
    each rank gathers about `gather_bytes` at a time, so that none holds the model. A rank whose file system does not
    show the directory writes nothing.

    Raises: ValueError or OSError as `open_hf_writer` and `make_plan`; where it failed on another rank RuntimeError, so
    that none waits for ever.
    """
    tensors = logical_tensors(arch, head)
    make_plan(sources, [identity_placements(tensors, writer_rank)], only_rank=rank)  # all or nothing
    collectively = _Collectively(directory, rank, group, live, alone=len(sources) == 1)
    specs = {name: (shape, dtype) for name, shape in tensors.items()}
    with ExitStack() as stack:
        writers: list[HFWriter] = []

        def open_writer() -> None:
            if rank == writer_rank:
                opened = open_hf_writer(directory, specs, with_dtype(config, dtype), copy_from=copy_from, files=files)
                writers.append(stack.enter_context(opened))

        collectively(open_writer)
        writer = collectively.shared_writer(writers, writer_rank, specs)
        owners = divided(specs, sources, collectively.ranks_that_see(writer, [source.rank for source in sources]))
        batches = {
            owner: split_by_bytes({name: specs[name] for name in names}, gather_bytes)
            for owner, names in owners.items()
        }
        for number in range(max(map(len, batches.values()))):
            now = {owner: parts[number] for owner, parts in batches.items() if number < len(parts)}
            whole = gather(sources, live, now, tensors, rank, dtype, group)
            collectively(partial(_write, writer, whole))
        collectively(writer.sync)
        if writers:  # the others have written what they promised
            writers[0].missing.clear()
        collectively(stack.close)


def divided(tensors: Specs, sources: Sequence[RankPlacements], ranks: Collection[int]) -> dict[int, list[str]]:
    """Names of the tensors that each rank writes. A tensor goes to the one of `ranks` that holds a part of it (to any,
    where none does) and has the fewest bytes so far, the largest tensors first. The same on every rank."""
    holders: dict[str, list[int]] = defaultdict(list)
    for source in sources:
        if source.rank in ranks:
            for name in source.tensors.keys() & tensors.keys():
                holders[name].append(source.rank)
    load = dict.fromkeys(sorted(ranks), 0)
    owners: dict[int, list[str]] = {rank: [] for rank in load}
    order = {name: number for number, name in enumerate(tensors)}
    for name in sorted(tensors, key=lambda name: (-num_bytes_of(tensors[name]), order[name])):
        owner = min(holders.get(name) or load, key=lambda rank: (load[rank], rank))
        owners[owner].append(name)
        load[owner] += num_bytes_of(tensors[name])
    return {rank: sorted(names, key=order.__getitem__) for rank, names in owners.items()}


class _Collectively:
    """Runner of collective phases: a failure on one rank is raised on all."""

    def __init__(
        self,
        directory: str | PathLike[str],
        rank: int,
        group: dist.ProcessGroup | None,
        live: Storages,
        *,
        alone: bool,
    ) -> None:
        """`alone`: no other rank takes part."""
        self._directory, self._rank, self._group, self._alone = directory, rank, group, alone
        self._device = next(iter(live.values())).device

    def __call__(self, action: Callable[[], object]) -> None:
        """Run `action`; raises its own failure, or RuntimeError for one of another rank. Collective."""
        error: Exception | None = None
        try:
            action()
        except (OSError, ValueError, RuntimeError, MemoryError) as failure:
            error = failure  # raised once the other ranks know
        failed = torch.tensor(0 if error is None else self._rank + 1, dtype=torch.int32, device=self._device)
        if not self._alone:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if error is not None:
            raise error
        if int(failed):
            raise RuntimeError(f"export to {self._directory} failed on rank {int(failed) - 1}; see that rank's error")

    def shared_writer(self, writers: Sequence[HFWriter], writer_rank: int, specs: Specs) -> HFWriter:
        """A writer, on every rank, for the files that `writer_rank` has made. Collective."""
        if self._alone:
            return writers[0]
        broadcast: list[Any] = (
            [[(name, str(at.path), at.offset) for name, at in writers[0].places.items()]] if writers else [None]
        )
        dist.broadcast_object_list(broadcast, src=writer_rank, group=self._group)
        return (
            writers[0]
            if writers
            else HFWriter({name: Extent(Path(path), offset, *specs[name]) for name, path, offset in broadcast[0]})
        )

    def ranks_that_see(self, writer: HFWriter, ranks: Sequence[int]) -> list[int]:
        """Ranks on whose file system the files appear. Collective."""
        if self._alone:
            return list(ranks)
        seen: list[tuple[int, bool]] = [(0, False)] * len(ranks)
        sees = all(path.is_file() for path in writer.paths)
        dist.all_gather_object(seen, (self._rank, sees), group=self._group)
        return sorted(rank for rank, sees in seen if sees)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config.json that states this dtype."""
    return {**config, "dtype" if "dtype" in config else "torch_dtype": str(dtype).removeprefix("torch.")}


def gather(
    sources: Sequence[RankPlacements],
    live: Storages,
    owned: Mapping[int, Sequence[str]],
    tensors: Mapping[str, Shape],
    rank: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> dict[str, torch.Tensor]:
    """The whole logical tensors, each on the rank that writes it."""
    names = dict.fromkeys(name for mine in owned.values() for name in mine)
    parts = [source.select(names) for source in sources]
    wanted = [
        identity_placements({name: tensors[name] for name in owned.get(source.rank, ())}, source.rank)
        for source in sources
    ]
    plan = make_plan(parts, wanted, only_rank=rank)
    device = next(iter(live.values())).device
    mine = owned.get(rank, ())
    whole = {name: torch.empty(tensors[name], dtype=dtype, device=device) for name in mine}
    if len(sources) > 1:
        Resharder(plan, rank=rank, dtype=dtype, device=device, group=group, keep_views=False).run(live, whole)
    else:
        copy_local(plan.local(rank), live, whole, dtype)
    return whole


def _write(writer: HFWriter, whole: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in whole.items():
        writer.write(name, tensor)
