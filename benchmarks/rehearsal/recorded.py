"""A process group that hands everything to gloo and writes down what it was handed.

It is a backend of torch's (`BACKEND`), so that whatever the program says to others comes through here, by whatever way
it was said: torch's functions, Megatron-Core's, pickled objects.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten

from megarlhf.parallel.process_groups import OneThreadGloo
from megarlhf.rehearsal.timeline.trace import Operation

BACKEND = "recorded"


class Message(NamedTuple):
    """What two messages have in common that count as the same."""

    step: int
    phase: str
    operation: str
    """Of `trace.Operation`, or send, receive."""
    ranks: tuple[int, ...]
    """Of the group; of a message also (own rank, other rank) at the end."""


class Recorder:
    """The messages of one rank. `where` tells step and phase."""

    def __init__(self, where: Callable[[], tuple[int, str]]) -> None:
        self.where = where
        self.on = False
        self.counts: Counter[Message] = Counter()
        self.nbytes: Counter[Message] = Counter()

    def write(self, operation: str, ranks: tuple[int, ...], nbytes: int) -> None:
        if self.on:
            message = Message(*self.where(), operation, ranks)
            self.counts[message] += 1
            self.nbytes[message] += nbytes


class Settled(dist.Work):
    """A message whose memory is given back by the thread that waited for it.

    gloo's own thread lets go of a message a moment after it has said that it is done. Were it the last to do so, the
    release would be one that torch's profiler, which follows threads one by one, does not report.
    """

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, *timeout: Any) -> bool:
        done = self._work.wait(*timeout)
        ends = time.monotonic() + SETTLING_SECONDS
        while not _is_gloo_idle() and time.monotonic() < ends:
            time.sleep(0.0005)
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


SETTLING_SECONDS = 1.0
"""At most; other threads of gloo may be at work for other messages."""
GLOO_THREAD = "(pt_gloo_runloop)"


def _is_gloo_idle() -> bool:
    """Whether each of gloo's threads sleeps until there is work; one that has not yet let go is running, or would."""
    for task in os.scandir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(task.path, "stat").read_text().partition(" ")[2]
            if words.startswith(GLOO_THREAD) and words.removeprefix(GLOO_THREAD).split()[0] != "S":
                return False
    return True


METHODS: dict[str, tuple[Operation, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "all_gather_single_coalesced": ("all_gather", 0),
    "barrier": ("barrier", 0),
    "monitored_barrier": ("barrier", 0),
}
"""Of a process group: the operation, and which argument's bytes are counted. Of all_gather it is what is gathered from
all, of reduce_scatter what is scattered to all; gather and scatter have this rank's share, times the ranks."""
SHARES = ("gather", "scatter")


def recording_group(recorder: Recorder) -> type[ProcessGroup]:
    """The class whose groups write into `recorder`."""

    class Recorded(ProcessGroup):
        """gloo's, looked at."""

        def __init__(self, gloo: ProcessGroup, ranks: tuple[int, ...], rank: int) -> None:
            super().__init__(rank, len(ranks))
            self.gloo, self.ranks, self.number = gloo, ranks, rank

        def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
            recorder.write("send", (*self.ranks, self.ranks[self.number], self.ranks[peer]), _nbytes(tensors))
            return Settled(self.gloo.send(tensors, peer, tag))

        def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
            recorder.write("receive", (*self.ranks, self.ranks[self.number], self.ranks[peer]), _nbytes(tensors))
            return Settled(self.gloo.recv(tensors, peer, tag))

        def getBackendName(self) -> str:
            return BACKEND

    def method(name: str, operation: Operation, argument: int) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            nbytes = 0 if operation == "barrier" else _nbytes(args[argument])
            recorder.write(operation, self.ranks, nbytes * (len(self.ranks) if operation in SHARES else 1))
            work = getattr(self.gloo, name)(*args, **kwargs)
            return work if work is None else Settled(work)

        return call

    for name, (operation, argument) in METHODS.items():
        setattr(Recorded, name, method(name, operation, argument))
    return Recorded


def _nbytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_flatten(tensors)[0] if isinstance(x, Tensor))


def join_again(recorder: Recorder) -> None:
    """Leave the default process group and form it anew on the recording backend, over the same store. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(BACKEND, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    made = recording_group(recorder)

    def group(common: Any, options: Any) -> ProcessGroup:
        backend = OneThreadGloo(common.store, common.group_rank, common.group_size, common.timeout)
        gloo = ProcessGroup(common.store, common.group_rank, common.group_size)
        gloo._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        gloo._set_default_backend(ProcessGroup.BackendType.GLOO)
        ranks = tuple(common.global_ranks_in_group) or tuple(range(common.group_size))
        return made(gloo, ranks, common.group_rank)  # type: ignore[call-arg]

    # Each run of this process has a recorder of its own.
    dist.Backend.backend_list = [name for name in dist.Backend.backend_list if name != BACKEND]
    if hasattr(dist.Backend, BACKEND.upper()):
        delattr(dist.Backend, BACKEND.upper())
    dist.Backend.register_backend(BACKEND, group, extended_api=True, devices=["cpu"])
    dist.init_process_group(BACKEND, rank=rank, world_size=size, store=store)
