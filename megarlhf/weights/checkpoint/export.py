"""Writes the weights of live ranks as a Hugging Face directory, by the same copy plan as everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Head, identity_placements, logical_tensors
from megarlhf.placement import RankPlacements, Shape
from megarlhf.weights.checkpoint.formats.huggingface.write import split_by_bytes
from megarlhf.weights.checkpoint.hf_writer import HFWriter, open_hf_writer
from megarlhf.weights.plan.copy_plan import make_plan
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
    gather_bytes: int = 1 << 30,
) -> None:
    """Gathers the model to `writer_rank`, cast to `dtype`, and writes it there.

    All ranks of `sources` call it; they are exactly the ranks of `group`. `config` is the config.json to
    write (its dtype is corrected). Tensors are gathered in order, about `gather_bytes` at a time, and
    written at once: the writer never holds the model.

    Raises: ValueError or OSError as `open_hf_writer` and `make_plan`; when the writer failed, RuntimeError on the
    other ranks, so that none waits for ever.
    """
    tensors = logical_tensors(arch, head)
    make_plan(sources, [identity_placements(tensors, writer_rank)], only_rank=rank)  # all or nothing
    device = next(iter(live.values())).device

    def on_writer(action: Callable[[], None]) -> None:
        error: Exception | None = None
        if rank == writer_rank:
            try:
                action()
            except (OSError, ValueError, RuntimeError, MemoryError) as failure:
                error = failure  # raised once the other ranks know
        failed = torch.tensor(int(error is not None), dtype=torch.int32, device=device)
        if len(sources) > 1:
            dist.all_reduce(failed, group=group)
        if error is not None:
            raise error
        if int(failed):
            raise RuntimeError(f"export to {directory} failed on rank {writer_rank}; see that rank's error")

    def open_writer() -> None:
        stated = with_dtype(config, dtype)
        writer.append(stack.enter_context(open_hf_writer(directory, specs, stated, copy_from=copy_from)))

    specs = {name: (shape, dtype) for name, shape in tensors.items()}
    writer: list[HFWriter] = []
    with ExitStack() as stack:
        on_writer(open_writer)
        for names in split_by_bytes(specs, gather_bytes):
            whole = _gather(sources, live, {n: tensors[n] for n in names}, rank, writer_rank, dtype, group)
            on_writer(lambda whole=whole: _write(writer[0], whole))  # type: ignore[misc]
        on_writer(stack.close)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config.json that states this dtype."""
    return {**config, "dtype" if "dtype" in config else "torch_dtype": str(dtype).removeprefix("torch.")}


def _gather(
    sources: Sequence[RankPlacements],
    live: Storages,
    tensors: dict[str, Shape],
    rank: int,
    writer_rank: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> dict[str, torch.Tensor]:
    """The whole logical tensors on the writing rank, nothing on the others."""
    parts = [source.select(tensors) for source in sources]
    plan = make_plan(parts, [identity_placements(tensors, writer_rank)], only_rank=rank)
    device = next(iter(live.values())).device
    whole: dict[str, torch.Tensor] = {}
    if rank == writer_rank:
        whole = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in tensors.items()}
    if len(sources) > 1:
        Resharder(plan, rank=rank, dtype=dtype, device=device, group=group).run(live, whole)
    else:
        copy_local(plan.local(rank), live, whole, dtype)
    return whole


def _write(writer: HFWriter, whole: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in whole.items():
        writer.write(name, tensor)
