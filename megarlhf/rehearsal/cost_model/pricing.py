"""Prices of a rehearsed rank's work by a hardware file: operations, collectives, messages, decoding.

An operation takes the time of the roofline (Williams, Waterman and Patterson, "Roofline", 2009): its FLOPs at the peak
of its dtype or its bytes at the memory's bandwidth, each times the efficiency of the file, whichever is longer. Where
the file has a measured table, the time is interpolated from it instead. The host's share, the file's `launch`, is added
to this: on a GPU the host runs ahead and an operation takes at least that long; on a CPU the two follow one another.
"""

from __future__ import annotations

from typing import Any

from megarlhf.rehearsal.cost_model.collectives import Speed, Spread, message_seconds, seconds_by_formula
from megarlhf.rehearsal.cost_model.decoding import EngineShape, RolloutTime, RolloutWork, decode_seconds
from megarlhf.rehearsal.cost_model.hardware import Hardware, Link
from megarlhf.rehearsal.cost_model.interpolation import between_shares
from megarlhf.rehearsal.cost_model.tables import Tables
from megarlhf.rehearsal.timeline.trace import Operation, Work


class Pricing:
    """Prices on one machine: `meter.OperationPricing`, `simulate.MessagePricing` and `engine_time.DecodePrice`. Equal
    questions have equal answers."""

    def __init__(self, hardware: Hardware, ranks_per_node: int) -> None:
        """Raises: ValueError for fewer than one rank a node."""
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node = {ranks_per_node}; give 1 or more")
        self.hardware, self.ranks_per_node = hardware, ranks_per_node
        self._inside, self._between, self._host = map(_speed, (hardware.inside, hardware.between, hardware.host))
        self._efficiencies = [(point.flops, point.value) for point in hardware.efficiency.products.points]
        self._tables = Tables(hardware.measured) if hardware.measured is not None else None
        self._known: dict[Any, float] = {}

    # --- operations of a device

    def operation_seconds(
        self,
        work: Work,
        flops: float,
        nbytes: int,
        dtype: str,
        shape: tuple[int, ...] | None = None,
        kind: str = "copy",
    ) -> float:
        """Seconds of one operation of torch.

        shape: of "matmul" (batch, m, k, n), of "attention" (heads, queries, keys, head_dim).
        kind:  of "memory" a `hardware.MemoryClass`, of "attention" "forward" or "backward".
        Raises: ValueError for a product of a dtype of which the file has neither a table nor a peak.
        """
        key = (work, flops, nbytes, dtype, shape, kind)
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = self._operation(work, flops, nbytes, dtype, shape, kind)
        return seconds

    def _operation(
        self, work: Work, flops: float, nbytes: int, dtype: str, shape: tuple[int, ...] | None, kind: str
    ) -> float:
        if work == "host":
            return 0.0
        launch = self.hardware.launch.value
        seconds = self._measured(work, nbytes, dtype, shape, kind)
        if seconds is None:
            seconds = self._roofline(work, flops, nbytes, dtype)
        return launch + seconds if self.hardware.kind == "cpu" else max(launch, seconds)

    def _measured(self, work: Work, nbytes: int, dtype: str, shape: tuple[int, ...] | None, kind: str) -> float | None:
        """Seconds from the tables without the launch; None where they have no entry."""
        if self._tables is None:
            return None
        if work == "matmul" and shape is not None:
            return self._tables.product_seconds(dtype, shape)
        if work == "attention" and shape is not None:
            return self._tables.attention_seconds(dtype, kind, shape)
        return self._tables.memory_seconds(kind, dtype, nbytes) if work in ("memory", "kernel") else None

    def _roofline(self, work: Work, flops: float, nbytes: float, dtype: str) -> float:
        efficiency = self.hardware.efficiency
        seconds = nbytes / (self.hardware.memory_bandwidth.value * efficiency.memory.value)
        if work in ("matmul", "attention"):
            share = (
                between_shares(self._efficiencies, flops) if work == "matmul" and flops else efficiency.attention.value
            )
            seconds = max(seconds, flops / (self.peak(dtype) * share))
        return seconds

    def offload_seconds(self, nbytes: int) -> float:
        """Seconds of a copy between device and host memory."""
        figure = self.hardware.offload
        if figure is None:
            return self.operation_seconds("memory", 0.0, 2 * nbytes, "int8")
        return self.hardware.launch.value + nbytes / figure.value

    def product_seconds(self, flops: float, nbytes: float, dtype: str) -> float:
        """Seconds of products of which only the sizes are known, by the roofline, without a launch."""
        return self._roofline("matmul", flops, nbytes, dtype)

    def peak(self, dtype: str) -> float:
        """FLOPs per second of a dtype, of which a model FLOPs utilisation is a share.

        Raises: ValueError for a dtype of which the file has no peak.
        """
        for name, figure in self.hardware.peaks.items():
            if name == dtype:
                return figure.value
        known = ", ".join(self.hardware.peaks)
        raise ValueError(f"the hardware file {self.hardware.name!r} has no peak of {dtype}, only {known}; add it")

    # --- communication

    def collective_seconds(self, operation: Operation, ranks: tuple[int, ...], nbytes: int, *, host: bool) -> float:
        """Seconds from the moment at which the last rank has issued the collective.

        The formulas of `cost_model/collectives.py`, times measured / formula of the nearest measured group size where
        the file has a table.
        """
        spread = Spread.of(ranks, self.ranks_per_node)
        if spread.ranks == 1:
            return 0.0
        inside, between = (self._host, self._host) if host else (self._inside, self._between)
        seconds = seconds_by_formula(operation, spread, nbytes, inside, between)
        if self._tables is not None:
            place = "host" if host else "device"
            seconds *= self._tables.correction(operation, spread, place, nbytes, inside, between)
        return seconds

    def message_seconds(self, src: int, dst: int, nbytes: int) -> float:
        """Seconds from the moment at which both ends have issued it."""
        spread = Spread.of((src, dst), self.ranks_per_node)
        seconds = message_seconds(nbytes, self._between if spread.nodes > 1 else self._inside)
        if self._tables is not None:
            seconds *= self._tables.correction("send", spread, "device", nbytes, self._inside, self._between)
        return seconds

    # --- rollout

    def decode_seconds(
        self,
        shape: EngineShape,
        work: RolloutWork,
        cache_bytes: int,
        *,
        max_running: int = 1024,
    ) -> tuple[list[RolloutTime], list[int]]:
        """Times of engines, and the engine of each piece of their queue: `decoding.decode_seconds`."""
        return decode_seconds(
            self,
            shape,
            work,
            cache_bytes,
            step_overhead=self.hardware.engine_step.value,
            max_running=max_running,
        )


def _speed(link: Link) -> Speed:
    return Speed(link.bandwidth.value, link.latency.value)
