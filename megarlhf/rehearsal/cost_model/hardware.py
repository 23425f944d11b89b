"""A hardware file: what a machine can do, each figure with where it comes from. `pricing.py` makes times of it.

Units are SI, without prefixes: bytes, seconds, operations per second. `4.8e12` is a number of YAML 1.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.load import load_config
from megarlhf.config.roles import FrozenModel, Positive
from megarlhf.rehearsal.timeline.trace import Operation

Source = Annotated[str, Field(min_length=1)]
Dtype = Literal["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int8"]
MemoryClass = Literal["copy", "cast", "math", "norm", "largest", "reduce", "index", "fill"]
"""Operations that are no products, by what they take longest for: `copy` reads and writes (also sums and products of
elements), `cast` changes the dtype, `math` computes exponentials and the like, `norm` is the root of a sum of squares,
`largest` the norm that is the largest absolute value, `reduce` makes few numbers of many, `index` goes to rows by
number, `fill` only writes."""


class SourcedNumber(FrozenModel):
    """A number, and where it comes from."""

    value: Positive
    source: Source
    """A datasheet, "measured by ..., on ...", or "assumed"."""


class SourcedFraction(FrozenModel):
    """A number of at most 1, and where it comes from."""

    value: Annotated[float, Field(gt=0.0, le=1.0)]
    source: Source


class Link(FrozenModel):
    """What carries bytes from one rank to another."""

    bandwidth: SourcedNumber
    """Bytes per second that a rank can send while it receives as many: one direction."""
    latency: SourcedNumber
    """Seconds until the first byte of a message has arrived, with what starts it."""


class EfficiencyAt(FrozenModel):
    """A point of a curve."""

    flops: Positive
    """Floating-point operations of one product: 2 x batch x m x k x n."""
    value: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share of the peak that it reaches."""


class ProductEfficiency(FrozenModel):
    """Share of the peak by size of a product; between the points by logarithms, outside them as at the nearest."""

    points: Annotated[tuple[EfficiencyAt, ...], Field(min_length=1)]
    source: Source

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        sizes = [point.flops for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"points by flops {sizes} are not in rising order; sort them, each size once")
        return self


class Efficiencies(FrozenModel):
    """What share of a peak is reached."""

    products: ProductEfficiency
    attention: SourcedFraction
    """Fused attention, of the peak of its dtype."""
    memory: SourcedFraction
    """Operations bound by memory, of its bandwidth."""


class Product(NamedTuple):
    """A measured product of matrices: `batch` times [m, k] x [k, n]."""

    dtype: Dtype
    batch: PositiveInt
    m: PositiveInt
    k: PositiveInt
    n: PositiveInt
    seconds: Positive


class MemoryPass(NamedTuple):
    """A measured operation that is bound by memory."""

    kind: MemoryClass
    dtype: Dtype
    """Of its result."""
    nbytes: PositiveInt
    """Read and written."""
    seconds: Positive


class AttentionPass(NamedTuple):
    """Measured causal attention of `heads` sequences of one head each."""

    dtype: Dtype
    direction: Literal["forward", "backward"]
    heads: PositiveInt
    length: PositiveInt
    head_dim: PositiveInt
    seconds: Positive


class CollectiveTime(NamedTuple):
    """A measured collective; `nbytes` as in `trace.Collective`."""

    operation: Operation | Literal["send"]
    ranks: Annotated[int, Field(ge=2)]
    nodes: PositiveInt
    """On which the ranks are, as many on each."""
    place: Literal["device", "host"]
    """Where the tensors are."""
    nbytes: Annotated[int, Field(ge=0)]
    seconds: Positive


class Measured(FrozenModel):
    """Tables that `megarlhf calibrate` writes. Where a table is, prices are interpolated from it (by logarithms); where
    it is not, they are made of peaks and efficiencies."""

    source: Source
    products: tuple[Product, ...] = ()
    """[dtype, batch, m, k, n, seconds]"""
    memory: tuple[MemoryPass, ...] = ()
    """[kind, dtype, bytes, seconds]"""
    attention: tuple[AttentionPass, ...] = ()
    """[dtype, direction, heads, length, head_dim, seconds]"""
    collectives: tuple[CollectiveTime, ...] = ()
    """[operation, ranks, nodes, place, bytes, seconds]; `send` is a message from one rank to another."""


class Hardware(FrozenModel):
    """A hardware file."""

    name: Source
    kind: Literal["gpu", "cpu"]
    """`gpu`: the host runs ahead, so an operation takes its launch or its work, whichever is longer. `cpu`: both."""
    memory: SourcedNumber
    """Bytes of a device."""
    peaks: Annotated[dict[Dtype, SourcedNumber], Field(min_length=1)]
    """Floating-point operations per second of products, by dtype; dense."""
    memory_bandwidth: SourcedNumber
    """Bytes per second, read and written together."""
    launch: SourcedNumber
    """Seconds of the host for one operation: Python, dispatch, launch."""
    efficiency: Efficiencies
    inside: Link
    """Between two ranks of a node."""
    between: Link
    """Between ranks of different nodes; the bandwidth is a rank's share of its node's."""
    host: Link
    """For tensors of the host and objects."""
    offload: SourcedNumber | None = None
    """Bytes per second of a copy between a device and host memory, in one direction; left out, as within the device."""
    engine_step: SourcedNumber
    """Seconds of a rollout engine's step beside the work of its device: schedule, sample, hand out tokens."""
    measured: Measured | None = None

    @property
    def sources(self) -> dict[str, str]:
        """Where each figure comes from, by its key; for a page."""
        found: dict[str, str] = {}
        _gather(self, "", found)
        return found


def _gather(node: FrozenModel, key: str, found: dict[str, str]) -> None:
    source = getattr(node, "source", None)
    if source is not None:
        found[key] = source
    for name in type(node).model_fields:
        value = getattr(node, name)
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, inner in parts:
            if isinstance(inner, FrozenModel):
                _gather(inner, ".".join(filter(None, (key, name, part))), found)


def load_hardware(path: str | Path) -> Hardware:
    """Read a hardware file.

    Raises: ValueError with one line per mistake: no such file, no YAML, an unknown key (with the nearest known one), a
    missing one, a figure that is not positive and finite or has no source.
    """
    return load_config(Hardware, path)
