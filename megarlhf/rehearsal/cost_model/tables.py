"""Lookup in the measured tables of a hardware file."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from megarlhf.rehearsal.cost_model.collectives import Speed, Spread, message_seconds, seconds_by_formula
from megarlhf.rehearsal.cost_model.hardware import Measured
from megarlhf.rehearsal.cost_model.interpolation import Grid, along

Points = list[tuple[float, float]]


class Tables:
    """Tables by operation. Every method returns None where the file has no such table."""

    def __init__(self, measured: Measured) -> None:
        products: dict[str, dict[tuple[int, ...], float]] = defaultdict(dict)
        for product in measured.products:
            products[product.dtype][product.batch, product.m, product.k, product.n] = product.seconds
        self._products = {dtype: Grid(points) for dtype, points in products.items()}
        memory: dict[tuple[str, str], Points] = defaultdict(list)
        for row in measured.memory:
            memory[row.kind, row.dtype].append((row.nbytes, row.seconds))
        self._memory = {key: sorted(points) for key, points in memory.items()}
        attention: dict[tuple[str, str], dict[tuple[int, ...], float]] = defaultdict(dict)
        for run in measured.attention:
            attention[run.dtype, run.direction][run.heads, run.length, run.head_dim] = run.seconds
        self._attention = {key: Grid(points) for key, points in attention.items()}
        collectives: dict[tuple[str, str, bool], dict[tuple[int, int], Points]] = {}
        for collective in measured.collectives:
            groups = collectives.setdefault((collective.operation, collective.place, collective.nodes > 1), {})
            points = groups.setdefault((collective.ranks, collective.nodes), [])
            points.append((max(1, collective.nbytes), collective.seconds))
        self._collectives = {
            key: {group: sorted(points) for group, points in groups.items()} for key, groups in collectives.items()
        }

    def product_seconds(self, dtype: str, shape: Sequence[int]) -> float | None:
        """Seconds of a product; `shape`: (batch, m, k, n)."""
        grid = self._products.get(dtype)
        return None if grid is None else grid.at(shape)

    def memory_seconds(self, kind: str, dtype: str, nbytes: int) -> float | None:
        """Seconds of an operation that is bound by memory. A dtype that was not measured is looked up as float32, a
        kind that was not measured as a copy."""
        for key in ((kind, dtype), (kind, "float32"), ("copy", dtype), ("copy", "float32")):
            if key in self._memory:
                return along(self._memory[key], max(1, nbytes))
        return None

    def attention_seconds(self, dtype: str, direction: str, shape: Sequence[int]) -> float | None:
        """Seconds of attention; `shape`: (heads, queries, keys, head_dim). If queries and keys differ in number, the
        root of their product is looked up."""
        grid = self._attention.get((dtype, direction))
        heads, queries, keys, head_dim = shape
        return None if grid is None else grid.at((heads, math.sqrt(queries * keys), head_dim))

    def correction(
        self, operation: str, spread: Spread, place: str, nbytes: int, inside: Speed, between: Speed
    ) -> float:
        """Measured / formula of the nearest measured group; 1 where none was measured."""
        groups = self._collectives.get((operation, place, spread.nodes > 1))
        if not groups:
            return 1.0
        near = min(groups, key=lambda group: (_distance(group, spread), group))
        if operation == "send":
            formula = message_seconds(nbytes, between if spread.nodes > 1 else inside)
        else:
            ranks, nodes = near
            measured = Spread(ranks, nodes, ranks // nodes, -(-ranks // nodes))
            formula = seconds_by_formula(operation, measured, nbytes, inside, between)  # type: ignore[arg-type]
        return along(groups[near], max(1, nbytes)) / formula


def _distance(group: tuple[int, int], spread: Spread) -> float:
    return abs(math.log(group[0] / spread.ranks)) + abs(math.log(group[1] / spread.nodes))
