"""Interpolation between measured points by logarithms, which is exact for a time that grows as a power of a size. Pure
functions."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence


def along(points: Sequence[tuple[float, float]], size: float) -> float:
    """Time at `size`, from (size, time) in rising order of size, all above 0.

    Between two points it is a straight line of logarithms. Below the first it is that of the first, since what remains
    there is the cost of starting. Above the last it is proportional to the size.
    """
    sizes = [point[0] for point in points]
    if size <= sizes[0]:
        return points[0][1]
    if size >= sizes[-1]:
        return points[-1][1] * size / sizes[-1]
    right = bisect_left(sizes, size)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    share = math.log(size / x0) / math.log(x1 / x0)
    return float(y0 * (y1 / y0) ** share)


def between_shares(points: Sequence[tuple[float, float]], size: float) -> float:
    """Share of a peak at `size`, from (size, share) in rising order. Outside the points it is that of the nearest."""
    if size >= points[-1][0]:
        return points[-1][1]
    return along(points, size)


class Grid:
    """Times on a grid of several sizes, some points of which may be missing.

    A missing point gets the speed (product of its sizes by time) of the nearest measured one, by logarithms. Between
    points times are interpolated in every direction as in `along`.
    """

    def __init__(self, points: Mapping[tuple[int, ...], float]) -> None:
        """`points`: seconds by sizes, at least one."""
        self._axes = [sorted({sizes[axis] for sizes in points}) for axis in range(len(next(iter(points))))]
        logarithms = {sizes: [math.log(size) for size in sizes] for sizes in points}
        self._times: dict[tuple[int, ...], float] = {}
        for sizes in itertools.product(*self._axes):
            if sizes not in points:
                here = [math.log(size) for size in sizes]
                near = min(points, key=lambda other: (math.dist(here, logarithms[other]), other))
                self._times[sizes] = points[near] * math.prod(sizes) / math.prod(near)
            else:
                self._times[sizes] = points[sizes]

    def at(self, sizes: Sequence[float]) -> float:
        """Seconds at these sizes."""
        ends: list[tuple[tuple[int, float], ...]] = []
        beyond = 1.0
        for axis, size in zip(self._axes, sizes, strict=True):
            if size <= axis[0] or len(axis) == 1:
                ends.append(((axis[0], 1.0),))
                beyond *= max(1.0, size / axis[0])
            elif size >= axis[-1]:
                ends.append(((axis[-1], 1.0),))
                beyond *= size / axis[-1]
            else:
                right = bisect_left(axis, size)
                share = math.log(size / axis[right - 1]) / math.log(axis[right] / axis[right - 1])
                ends.append(((axis[right - 1], 1 - share), (axis[right], share)))
        total = 0.0
        for corner in itertools.product(*ends):
            weight = math.prod(share for _, share in corner)
            total += weight * math.log(self._times[tuple(size for size, _ in corner)])
        return math.exp(total) * beyond
