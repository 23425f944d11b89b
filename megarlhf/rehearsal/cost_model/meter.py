"""The meter: FLOPs, bytes and seconds of every operation, by the shapes of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megarlhf.rehearsal.cost_model.operations import FREE, memory_class, touched_bytes, work_of
from megarlhf.rehearsal.fake_device.torch_patches import flop_registry, tree_flatten
from megarlhf.rehearsal.timeline.trace import Compute, Event, Work


class OperationPricing(Protocol):
    """Prices of operations: `pricing.Pricing`."""

    def operation_seconds(
        self,
        work: Work,
        flops: float,
        nbytes: int,
        dtype: str,
        shape: tuple[int, ...] | None = None,
        kind: str = "copy",
    ) -> float: ...


class OperationCost(NamedTuple):
    """Cost of one operation."""

    work: Work
    seconds: float
    flops: float


class Spending(NamedTuple):
    """Sum over several operations."""

    operations: int = 0
    seconds: float = 0.0
    flops: int = 0
    recomputed: float = 0.0
    """Seconds of recomputation in a backward. Its operations are not in `flops`."""

    def plus(self, more: Spending) -> Spending:
        return Spending(
            self.operations + more.operations,
            self.seconds + more.seconds,
            self.flops + more.flops,
            self.recomputed + more.recomputed,
        )


class WorkListener(Protocol):
    """Listener to all work and messages: `tape.TapeRecorder`."""

    def work_done(self, work: Work, spending: Spending) -> None: ...

    def message_issued(self, event: Event) -> None: ...


NOTHING = OperationCost("host", 0.0, 0.0)
"""Cost of operations that touch no number."""


@dataclass
class Meter:
    """Counter of one rank's work, and writer of its trace."""

    price: OperationPricing
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    """The rank's own clock: its work, without waiting for others."""
    phase: str = "build"
    step: int = 0
    flops: Counter[tuple[int, str, Work]] = field(default_factory=Counter)
    """FLOPs by step, phase and work, without recomputation."""
    work_seconds: Counter[tuple[int, str, Work]] = field(default_factory=Counter)
    recomputed_seconds: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Seconds of recomputation in a backward, by step and phase."""
    recomputing: bool = False
    """Whether the current operations were computed before."""
    operations: Counter[tuple[int, str]] = field(default_factory=Counter)
    values: Callable[[Tensor], Tensor | None] = lambda tensor: None
    """Values of a device tensor where they are known: `Known.twin`."""
    ticked: Callable[[float], None] = lambda seconds: None
    """Called with the clock after each operation."""
    listener: WorkListener | None = None
    _pending: dict[Work, float] = field(default_factory=dict)

    def operation(self, func: Any, args: Sequence[Any], out: Any, tensors: Sequence[Tensor]) -> OperationCost | None:
        """Count an operation of torch on the device.

        Returns its cost, for `repeat`; None where the cost does not follow from shapes.
        """
        cost = self._cost(func, args, out, tensors)
        self.repeat(cost)
        return None if cost.work == "attention" else cost

    def repeat(self, cost: OperationCost) -> None:
        """Count the same operation on the same shapes."""
        if cost is not NOTHING:
            self.spend(*cost)

    def _cost(self, func: Any, args: Sequence[Any], out: Any, tensors: Sequence[Tensor]) -> OperationCost:
        name = func._overloadpacket.__name__
        if name in FREE:
            return NOTHING
        work, flops, shape = work_of(name), 0.0, None
        kind: str = "copy"
        of = tensors[-1:]
        if work == "matmul":
            flops, shape = _product(args)
            of = _matrices(args)
        elif work == "attention":
            full = _sees_all(name, args, tensors)
            flops = _attention_flops(func, args, out, self.values, full=full)
            shape = _attention_shape(name, args, full=full)
            kind, of = "backward" if "backward" in name else "forward", tensors
        else:
            kind = memory_class(name, args, out)
        nbytes = touched_bytes(name, args, out, tensors)
        dtype = str(of[0].dtype).removeprefix("torch.") if of else "float32"
        seconds = self.price.operation_seconds(work, flops, nbytes, dtype, shape, kind)
        if work == "attention" and kind == "backward":  # a fifth of it are the scores, which the kernel makes again
            flops *= 0.8
        return OperationCost(work, seconds, flops)

    def kernel(self, nbytes: int, dtype: str) -> None:
        """Count a kernel of ours, bound by the memory that it is given."""
        self.spend("kernel", self.price.operation_seconds("kernel", 0.0, nbytes, dtype), 0.0)

    def spend(self, work: Work, seconds: float, flops: float) -> None:
        """Advance the clock."""
        spending = Spending(1, seconds, 0, seconds) if self.recomputing else Spending(1, seconds, int(flops))
        if self.listener is not None:
            self.listener.work_done(work, spending)
        self._spend(work, spending)
        self.ticked(self.seconds)

    def repeat_spendings(self, spendings: Mapping[Work, Spending]) -> None:
        """Count the work of a stretch between two messages."""
        for work, spending in spendings.items():
            if self.recomputing:
                spending = Spending(spending.operations, spending.seconds, 0, spending.seconds)
            self._spend(work, spending)
        self.ticked(self.seconds)

    def _spend(self, work: Work, spending: Spending) -> None:
        at, key = (self.step, self.phase), (self.step, self.phase, work)
        self.flops[key] += spending.flops
        self.work_seconds[key] += spending.seconds  # type: ignore[assignment]
        self.recomputed_seconds[at] += spending.recomputed  # type: ignore[assignment]
        self.operations[at] += spending.operations
        self._pending[work] = self._pending.get(work, 0.0) + spending.seconds
        self.seconds += spending.seconds

    def message(self, event: Event) -> None:
        """Write a message into the trace, after the work so far."""
        if self.listener is not None:
            self.listener.message_issued(event)
        self.flush()
        self.events.append(event)

    def flush(self) -> None:
        """Write the work so far as events. To be called before the phase changes."""
        for work, seconds in self._pending.items():
            self.events.append(Compute(self.phase, seconds, work))
        self._pending.clear()


def _matrices(args: Sequence[Any]) -> list[Tensor]:
    """The two factors. The first argument of addmm and its like is a summand."""
    return [x for x in args if isinstance(x, Tensor) and x.dim() >= 2][-2:]


def _product(args: Sequence[Any]) -> tuple[float, tuple[int, ...]]:
    left, right = _matrices(args)
    batch = int(left.shape[0]) if left.dim() == 3 else 1
    m, k, n = int(left.shape[-2]), int(left.shape[-1]), int(right.shape[-1])
    return 2.0 * batch * m * k * n, (batch, m, k, n)


CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def _sees_all(name: str, args: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Whether each query sees each key in a CPU's kernel: it is neither causal nor has a mask among its `tensors`.
    Without a mask these are three inputs and two results, in a backward six and three."""
    causal = any(x is True for x in args)
    return name.startswith(CPU_FLASH) and not causal and len(tensors) == (9 if "backward" in name else 5)


def _attention_flops(
    func: Any, args: Sequence[Any], out: Any, values: Callable[[Tensor], Tensor | None], *, full: bool
) -> float:
    """FLOPs by torch's formulas, which count every pair of a query and a key. Causal attention computes half of them
    and of the diagonal.

    The formulas do not know the lengths in a packed row and take the longest for all sequences. Where lengths are
    known, pairs are counted.
    """
    name = func._overloadpacket.__name__
    if "_varlen_attn" in name and (pairs := _packed_pairs(args, values)) is not None:
        query_TND = next(x for x in args if isinstance(x, Tensor) and x.dim() == 3)
        return 2.0 * pairs * query_TND[0].numel() * (2.5 if "backward" in name else 1.0)
    formula = flop_registry.get(func._overloadpacket)
    tensors = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
    if formula is not None:
        return float(formula(*args, out_val=out)) / 2
    query, key = tensors[1:3] if "backward" in name else tensors[:2]
    keys = int(key.shape[-2])
    whole = 4.0 * query.numel() * keys * (2.5 if "backward" in name else 1.0)
    return whole if full else whole * (keys + 1) / (2 * keys)


def _packed_pairs(args: Sequence[Any], values: Callable[[Tensor], Tensor | None]) -> int | None:
    """Twice the number of pairs of a query and a key that it sees, from the beginnings of sequences; None where these
    are not known. The last query of a sequence is aligned with its last key."""
    begins = [values(x) for x in args if isinstance(x, Tensor) and x.dtype is torch.int32 and x.dim() == 1][:2]
    if len(begins) < 2 or any(begin is None for begin in begins):
        return None
    queries, keys = (begin.long().diff() for begin in begins if begin is not None)
    to_the_right = next((x[1] for x in args if isinstance(x, list | tuple) and len(x) == 2), -1)
    causal = to_the_right == 0 or next(x for x in args if isinstance(x, bool))  # of several the first
    return int((queries * (2 * keys - (queries - 1 if causal else 0))).sum())


def _attention_shape(name: str, args: Sequence[Any], *, full: bool) -> tuple[int, ...] | None:
    """(heads, queries, keys, head_dim) of causal attention over [batch, heads, length, head_dim]; twice the queries
    where each of them sees all keys. None for any other form."""
    tensors = [x for x in args if isinstance(x, Tensor)][1 if "backward" in name else 0 :]
    query, key = tensors[0], tensors[1]
    if query.dim() != 4:
        return None
    batch, heads, queries, head_dim = map(int, query.shape)
    return batch * heads, queries * (2 if full else 1), int(key.shape[-2]), head_dim
