"""How one rank's storage is put together from boxes of logical tensors: a few combinators, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from megarlhf.weights.placement import Box, Placement, Shape, place_slice


@dataclass(frozen=True, slots=True)
class Logical:
    """A logical tensor: its Hugging Face name and full shape."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a logical tensor and where it starts in the storage."""

    tensor: str
    box: Box
    at: Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a storage and the segments in it; what no segment covers is padding."""

    shape: Shape
    segments: tuple[Segment, ...]

    def placements(self, storage: str) -> tuple[Placement, ...]:
        return tuple(place_slice(s.tensor, s.box, storage, self.shape, s.at) for s in self.segments)


def replicated(tensor: Logical) -> Layout:
    """The whole tensor on every rank."""
    return Layout(tensor.shape, (Segment(tensor.name, Box.whole(tensor.shape), (0,) * len(tensor.shape)),))


def rows(tensor: Logical, start: int, stop: int) -> Layout:
    """Rows [start, stop) of the tensor, as far as it has them; the rest is padding."""
    shape = (stop - start, *tensor.shape[1:])
    real = min(stop, tensor.shape[0])
    if real <= start:
        return Layout(shape, ())
    zeros = (0,) * (len(shape) - 1)
    return Layout(shape, (Segment(tensor.name, Box((start, *zeros), (real, *tensor.shape[1:])), (0, *zeros)),))


def column_parallel(tensor: Logical, tp: int, tp_rank: int, *, padded_rows: int | None = None) -> Layout:
    """Rank's equal share of the rows (output features), of `padded_rows` rows if given."""
    total = tensor.shape[0] if padded_rows is None else padded_rows
    if total < tensor.shape[0]:
        raise ValueError(
            f"{tensor.name} has {tensor.shape[0]} rows, more than the padded {total}; pad to at least that"
        )
    share = divide(total, tp, f"rows of {tensor.name}")
    return rows(tensor, tp_rank * share, (tp_rank + 1) * share)


def row_parallel(tensor: Logical, tp: int, tp_rank: int) -> Layout:
    """Rank's equal share of the columns (input features)."""
    num_rows, num_columns = tensor.shape
    share = divide(num_columns, tp, f"columns of {tensor.name}")
    box = Box((0, tp_rank * share), (num_rows, (tp_rank + 1) * share))
    return Layout((num_rows, share), (Segment(tensor.name, box, (0, 0)),))


def fused_rows(*layouts: Layout) -> Layout:
    """The layouts stacked in dim 0."""
    segments = []
    end = 0
    for layout in layouts:
        segments += [Segment(s.tensor, s.box, (s.at[0] + end, *s.at[1:])) for s in layout.segments]
        end += layout.shape[0]
    return Layout((end, *layouts[0].shape[1:]), tuple(segments))


def divide(total: int, tp: int, what: str) -> int:
    share, rest = divmod(total, tp)
    if rest:
        raise ValueError(f"{total} {what} do not divide by tp = {tp}; choose a tp that divides {total}")
    return share
