"""Hardware files: the figures of a machine, each with its source. `pricing.py` turns them into times.

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
"""Operations other than products, by what takes their time. `copy` reads and writes (also sums and products of
elements), `cast` changes the dtype, `math` computes exponentials and the like, `norm` is the root of a sum of squares,
`largest` the norm that is the largest absolute value, `reduce` makes few numbers of many, `index` accesses rows by
index, `fill` only writes."""


class SourcedNumber(FrozenModel):
    """A number with its source."""

    value: Positive
    source: Source
    """A datasheet, "measured by ..., on ...", or "assumed"."""


class SourcedFraction(FrozenModel):
    """A number of at most 1 with its source."""

    value: Annotated[float, Field(gt=0.0, le=1.0)]
    source: Source


class Link(FrozenModel):
    """Connection between two ranks."""

    bandwidth: SourcedNumber
    """Bytes per second that a rank can send while it receives as many: one direction."""
    latency: SourcedNumber
    """Seconds until the first byte of a message has arrived, including its launch."""


class EfficiencyAt(FrozenModel):
    """Point of an efficiency curve."""

    flops: Positive
    """Floating-point operations of one product: 2 x batch x m x k x n."""
    value: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share of the peak that it reaches."""


class ProductEfficiency(FrozenModel):
    """Share of the peak by size of a product. Between two points it is interpolated by logarithms; outside it is that
    of the nearest point."""

    points: Annotated[tuple[EfficiencyAt, ...], Field(min_length=1)]
    source: Source

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        sizes = [point.flops for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"points by flops {sizes} are not in rising order; sort them, each size once")
        return self


class Efficiencies(FrozenModel):
    """Shares of the peaks that are reached."""

    products: ProductEfficiency
    attention: SourcedFraction
    """Fused attention: share of the peak of its dtype."""
    memory: SourcedFraction
    """Operations bound by memory: share of its bandwidth."""


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
    """Dtype of the result."""
    nbytes: PositiveInt
    """Bytes read and written."""
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
    """Number of nodes, with equally many ranks on each."""
    place: Literal["device", "host"]
    """Memory that holds the tensors."""
    nbytes: Annotated[int, Field(ge=0)]
    seconds: Positive


class Measured(FrozenModel):
    """Tables that `megarlhf calibrate` writes. Prices are interpolated from them (by logarithms). Without a table they
    follow from peaks and efficiencies."""

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
    """`gpu`: the host runs ahead, so an operation takes the longer of its launch and its work. `cpu`: it takes their
    sum."""
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
    """Link between two ranks of a node."""
    between: Link
    """Link between ranks of different nodes. The bandwidth is a rank's share of its node's."""
    host: Link
    """Link for tensors of the host and for objects."""
    offload: SourcedNumber | None = None
    """Bytes per second of a copy between device and host memory, in one direction. If left out, such a copy takes as
    long as one within the device."""
    engine_step: SourcedNumber
    """Seconds of a rollout engine's step beside the work of its device: scheduling, sampling, returning tokens."""
    measured: Measured | None = None

    @property
    def sources(self) -> dict[str, str]:
        """Source of each figure, by its key; for the page."""
        sources: dict[str, str] = {}
        _add_sources(self, "", sources)
        return sources


def _add_sources(node: FrozenModel, key: str, sources: dict[str, str]) -> None:
    source = getattr(node, "source", None)
    if source is not None:
        sources[key] = source
    for name in type(node).model_fields:
        value = getattr(node, name)
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, inner in parts:
            if isinstance(inner, FrozenModel):
                _add_sources(inner, ".".join(filter(None, (key, name, part))), sources)


def load_hardware(path: str | Path) -> Hardware:
    """Read a hardware file.

    Raises: ValueError with one line per mistake: no such file, no YAML, an unknown key (with the nearest known one), a
    missing one, a figure that is not positive and finite or has no source.
    """
    return load_config(Hardware, path)
