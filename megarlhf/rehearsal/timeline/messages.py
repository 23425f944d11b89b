"""Messages of one rank: counted for the page and written into the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.layout import MeshLayout
from megarlhf.parallel.mesh import EXPERT_GROUPS_AXES, GROUPS_AXES
from megarlhf.rehearsal.fake_device.torch_patches import FakeTensor, NumberedWork
from megarlhf.rehearsal.fake_device.trees import tensors_in
from megarlhf.rehearsal.timeline.trace import Collective, Event, Operation, Receive, Send, Wait

OPERATIONS: Mapping[str, Operation] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""Operations of `torch.ops.c10d` on whole groups, by torch's name."""
WHOLE: Mapping[Operation, int] = {"all_gather": 0, "reduce_scatter": 1, "gather": 1, "scatter": 1, "all_to_all": 1}
"""Index of the argument with the tensor that counts (trace.Collective.nbytes); 0 for other operations. If a rank
gathers for another one, it has no whole tensor: its own share times the number of ranks counts."""


class Line(NamedTuple):
    """A row of the table of messages."""

    step: int
    phase: str
    operation: str
    group: str
    """Name of the group: tp, dp, pp, ..., world. It does not name the role, since roles of one layout share groups."""
    size: int
    """Ranks of the group; 2 for a message."""
    between_nodes: bool
    host: bool


class Labels(NamedTuple):
    """Names of groups, by their ranks."""

    by_role: Mapping[str, Mapping[tuple[int, ...], str]]
    general: Mapping[tuple[int, ...], str]
    """Names over all roles."""

    def of(self, phase: str, ranks: tuple[int, ...]) -> str:
        """Name of a group in a phase. In a role's phase its own layout decides: another role may name the same ranks
        differently."""
        role = "reward_model" if phase == "reward" else phase.partition("/")[2]
        return self.by_role.get(role, {}).get(ranks) or self.general.get(ranks, "other")


class Reached(NamedTuple):
    """Partners with which a rank has exchanged device tensors, so that connections were made."""

    groups: int = 0
    """Groups in which a collective was made."""
    near_peers: int = 0
    """Ranks of its node that were sent to or received from, in each group."""
    far_groups: int = 0
    """Groups in which another node was sent to or received from."""


class MessageListener(Protocol):
    """Listener to each message that is counted: `tape.TapeRecorder`."""

    def counted(self, line: Line, nbytes: int) -> None: ...


class Wire:
    """Messages of one rank. `issue` gets each event of the trace."""

    def __init__(self, rank: int, ranks_per_node: int, labels: Labels, issue: Callable[[Event], None]) -> None:
        self._rank, self._ranks_per_node, self._labels, self._issue = rank, ranks_per_node, labels, issue
        self.counts: Counter[Line] = Counter()
        self.nbytes: Counter[Line] = Counter()
        self.step, self.phase = 0, "build"
        self._number = 0
        self._world = False
        """Whether the current group is the default one. Another group may have the same ranks."""
        self.listener: MessageListener | None = None
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        """One tuple object for each group: a trace names groups a hundred thousand times."""
        self._collectives: set[tuple[tuple[int, ...], bool]] = set()
        """(group, whether it is the default one)"""
        self._peers: set[tuple[tuple[int, ...], bool, int]] = set()
        self._works: dict[int, tuple[NumberedWork, Callable[[], None]]] = {}
        """Messages until they are waited for: torch keeps their handles in C++ only."""

    def call(self, func: Any, args: Sequence[Any], over: Callable[[], None] = lambda: None) -> Any:
        """Handle one operation of `torch.ops.c10d`. Returns the same as torch, without touching a tensor. `over` is
        called when the message is waited for."""
        name = func._schema.name.removeprefix("c10d::")
        tensors = tensors_in(args)
        ranks, self._world = _ranks(args)
        ranks = self._groups.setdefault(ranks, ranks)
        host = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        self._number += 1
        if name in ("send", "recv_"):
            peer, nbytes = ranks[args[2]], sum(map(_nbytes, args[0]))
            kind = Send if name == "send" else Receive
            self._issue(kind(self.phase, peer, nbytes, self._number, ranks))
            if not host:
                self._peers.add((ranks, self._world, peer))
            self._count("send" if name == "send" else "receive", ranks, (self._rank, peer), nbytes, host)
        else:
            operation = OPERATIONS[name]
            nbytes = _whole(operation, args, len(ranks))
            if not host:
                self._collectives.add((ranks, self._world))
            self._issue(Collective(self.phase, operation, ranks, nbytes, self._number, host))
            self._count(operation, ranks, ranks, nbytes, host)
        work = NumberedWork(self._number, self._waited)
        self._works[self._number] = work, over
        return work.boxed() if len(func._schema.returns) == 1 else (args[0], work.boxed())

    def _waited(self, number: int) -> None:
        self._issue(Wait(self.phase, number))
        if number in self._works:
            self._works.pop(number)[1]()

    def _count(self, operation: str, group: tuple[int, ...], reached: Sequence[int], nbytes: int, host: bool) -> None:
        nodes = {rank // self._ranks_per_node for rank in reached}
        line = Line(
            self.step, self.phase, operation, self.label(group), len(reached), between_nodes=len(nodes) > 1, host=host
        )
        self._add(line, nbytes)

    def repeat_count(self, line: Line, nbytes: int) -> None:
        """Count an equal message in the current step and phase."""
        self._add(line._replace(step=self.step, phase=self.phase), nbytes)

    def _add(self, line: Line, nbytes: int) -> None:
        if self.listener is not None:
            self.listener.counted(line, nbytes)
        self.counts[line] += 1
        self.nbytes[line] += nbytes

    def next_number(self) -> int:
        """Number of the next message."""
        self._number += 1
        return self._number

    def label(self, ranks: tuple[int, ...]) -> str:
        """Name of a group."""
        return "world" if self._world else self._labels.of(self.phase, ranks)

    def reached(self) -> Reached:
        """Partners so far."""
        near = {peer for peer in self._peers if self._is_near(peer[2])}
        far = {peer[:2] for peer in self._peers if not self._is_near(peer[2])}
        return Reached(len(self._collectives), len(near), len(far))

    def _is_near(self, peer: int) -> bool:
        return peer // self._ranks_per_node == self._rank // self._ranks_per_node


def labels_of(layouts: Mapping[str, MeshLayout]) -> Labels:
    """Names of the groups of roles' layouts, as in Megatron-Core. A group of all ranks that is in no layout is the
    world."""
    by_role = {role: _labels_of([layout]) for role, layout in layouts.items()}
    world = next(iter(layouts.values())).world_size if layouts else 0
    return Labels(by_role, {tuple(range(world)): "world"} | _labels_of(list(layouts.values())))


def _labels_of(layouts: Sequence[MeshLayout]) -> dict[tuple[int, ...], str]:
    """Name of each group of the layouts, by its ranks. Of several names the one with the fewest axes is taken, then
    that of the first layout."""
    labels: dict[tuple[int, ...], str] = {}
    pairs = [*product(layouts, GROUPS_AXES.items())]
    pairs += product([layout.expert_layout for layout in layouts], EXPERT_GROUPS_AXES.items())
    for layout, (name, axes) in sorted(pairs, key=lambda pair: len(pair[1][1])):  # stable
        for ranks in layout.groups(axes):
            if len(ranks) > 1:
                labels.setdefault(ranks, name)
    for layout in layouts:
        for line in layout.groups(["pp"]):
            if len(line) > 2:
                labels.setdefault((line[0], line[-1]), "embd")
    return labels


def _ranks(args: Sequence[Any]) -> tuple[tuple[int, ...], bool]:
    """(ranks of a call's group, whether it is the default group)"""
    boxed = next(x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
    group = dist.ProcessGroup.unbox(boxed)
    assert dist.group.WORLD is not None
    return tuple(dist.get_process_group_ranks(group)), group.group_name == dist.group.WORLD.group_name


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _whole(operation: Operation, args: Sequence[Any], size: int) -> int:
    if operation == "barrier":
        return 0
    argument = WHOLE.get(operation, 0)
    nbytes = sum(map(_nbytes, tensors_in((args[argument],))))
    if operation == "gather":
        return nbytes * size
    if operation == "scatter" and not nbytes:
        return sum(map(_nbytes, tensors_in((args[0],)))) * size
    return nbytes
