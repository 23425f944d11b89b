"""Whether an engine's own loader agrees with the table, found before anything is written by the table.

Every element of a few layers gets a number; the engine's loader is given tensors that hold these numbers, and each
live parameter must then hold the numbers that the table says. A dtype of 16 bits has too few values to tell all
elements apart, so the numbers are given digit by digit. Elements in a wrong place can therefore be named.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import logical_tensors, table_of
from megarlhf.placement import Box, Placement, RankPlacements, Shape, contiguous_strides, unravel
from megarlhf.weights.checks.digest import block_elements
from megarlhf.weights.transport.storages import Storages, check_storages, view

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]
"""The engine's own loader: takes (Hugging Face name, whole tensor) and fills the live parameters of this rank."""

_WORDS = {2: torch.int16, 4: torch.int32}


def sample_tensors(arch: Architecture) -> dict[str, Shape]:
    """Logical tensors of the first, a middle and the last layer, and all that belong to no layer."""
    tensors = logical_tensors(arch)
    layer = table_of(arch).hf_layer
    left_out = set(range(arch.num_layers)) - {0, arch.num_layers // 2, arch.num_layers - 1}
    prefixes = tuple(layer.format(layer=n) for n in left_out)
    return {name: shape for name, shape in tensors.items() if not name.startswith(prefixes)}


@torch.no_grad()
def check_loader(
    placements: RankPlacements, live: Storages, load: Load, tensors: Mapping[str, Shape], dtype: torch.dtype
) -> list[str]:
    """Problems of `placements`, or of `live`, in words: one entry for each parameter; empty if all agree.

    Feeds all of `tensors` to `load`, in `dtype`, one at a time and several times over. The live parameters that hold
    them are overwritten, their padding with NaN: fill them afterwards.
    """
    try:
        check_storages(placements, live)
        placements.padding()
    except ValueError as error:
        return [str(error)]
    chosen = placements.select(tensors)
    mixed = [f"{name} holds {live[name].dtype}" for name in chosen.storages if not live[name].is_floating_point()]
    if mixed:
        return [f"{text}, expected floating point: quantized weights cannot be filled by a copy plan" for text in mixed]
    numbers = _Numbers(tensors, dtype)
    check = _Check(chosen, live, numbers)
    device = next(iter(live.values())).device
    for digit in range(numbers.num_digits):
        for name in chosen.storages:
            live[name].detach().fill_(torch.nan)
        try:
            load((name, numbers.whole(name, digit, device)) for name in tensors)
        except Exception as error:  # noqa: BLE001 -- whatever it says, it is told together with the other ranks' errors
            return [f"the engine's loader failed on the tensors of the table: {type(error).__name__}: {error}"]
        check.compare(digit)
    return check.problems()


class _Numbers:
    """A number for each element of some logical tensors, as values of a dtype, a digit at a time.

    The bit pattern of digit d is d + 2^(bits - 3): positive, normal and finite in bf16, fp16 and fp32.
    """

    def __init__(self, tensors: Mapping[str, Shape], dtype: torch.dtype) -> None:
        self.dtype = dtype
        bits = dtype.itemsize * 8
        self.digit_bits = bits - 2
        self._lowest = 1 << (bits - 3)
        self._word = _WORDS[dtype.itemsize]
        self._tensors = dict(tensors)
        self._names = list(tensors)
        self._starts: list[int] = []
        total = 0
        for shape in tensors.values():
            self._starts.append(total)
            total += torch.Size(shape).numel()
        self._start_of = dict(zip(self._names, self._starts, strict=True))
        self.num_digits = max(1, -(-max(total - 1, 1).bit_length() // self.digit_bits))

    def whole(self, name: str, digit: int, device: torch.device) -> torch.Tensor:
        """One digit of all elements of a logical tensor."""
        shape = self._tensors[name]
        out = torch.empty(shape, dtype=self.dtype, device=device)
        flat, first = out.view(-1), self._start_of[name]
        step = block_elements(device)
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            flat[start:stop] = self._encode(torch.arange(first + start, first + stop, device=device), digit)
        return out

    def of_box(self, name: str, box: Box, digit: int, device: torch.device) -> torch.Tensor:
        """One digit of the elements of a box."""
        number = torch.full((1,) * len(box.shape), self._start_of[name], dtype=torch.int64, device=device)
        for dim, step in enumerate(contiguous_strides(self._tensors[name])):
            along = torch.arange(box.start[dim], box.stop[dim], device=device) * step
            number = number + along.view(-1, *([1] * (len(box.shape) - dim - 1)))
        return self._encode(number, digit)

    def number(self, name: str, index: Shape) -> int:
        strides = contiguous_strides(self._tensors[name])
        return self._start_of[name] + sum(i * s for i, s in zip(index, strides, strict=True))

    def digit(self, value: torch.Tensor) -> int | None:
        """The digit that a value means, None if it is none."""
        number = int(value.to(self.dtype).view(self._word)) - self._lowest
        return number if 0 <= number < 1 << self.digit_bits else None

    def digit_of(self, number: int, digit: int) -> int:
        return number >> (digit * self.digit_bits) & ((1 << self.digit_bits) - 1)

    def element(self, number: int) -> str | None:
        """`tensor[index]` of a number, None beyond the last."""
        name = self._names[bisect_right(self._starts, number) - 1]
        shape, inside = self._tensors[name], number - self._start_of[name]
        return f"{name}{list(unravel(inside, shape))}" if inside < torch.Size(shape).numel() else None

    def _encode(self, numbers: torch.Tensor, digit: int) -> torch.Tensor:
        digits = numbers >> (digit * self.digit_bits) & ((1 << self.digit_bits) - 1)
        return (digits + self._lowest).to(self._word).view(self.dtype)


@dataclass
class _Difference:
    """The first element of a parameter that differs."""

    element: int
    """Index in the parameter, counted row-major."""
    expected: int | None
    """Number; None: padding."""
    since: int
    """The first digit that differs."""
    count: int
    size: int
    values: list[torch.Tensor] = field(default_factory=list)
    """Values, from digit `since` on."""


class _Check:
    """Compares digit after digit and keeps the first difference of each parameter."""

    def __init__(self, placements: RankPlacements, live: Storages, numbers: _Numbers) -> None:
        self._live, self._numbers = live, numbers
        self._placements = placements.by_storage()
        self._padding = placements.padding()
        self._differences: dict[str, _Difference] = {}

    def compare(self, digit: int) -> None:
        for name, placements in self._placements.items():
            if name not in self._differences:
                self._first_difference(name, placements, digit)
            if name in self._differences:
                difference = self._differences[name]
                difference.values.append(self._live[name].detach().view(-1)[difference.element].cpu().clone())

    def problems(self) -> list[str]:
        return [self._describe(name, difference) for name, difference in self._differences.items()]

    def _first_difference(self, name: str, placements: Sequence[Placement], digit: int) -> None:
        live = self._live[name].detach()
        first: tuple[int, int | None] | None = None
        count = 0
        for placement in placements:
            for box in placement.box.blocks(block_elements(live.device)):
                part = placement.part(box)
                expected = self._numbers.of_box(part.tensor, box, digit, live.device).to(live.dtype)
                differs = view(part, self._live) != expected
                if count_here := int(differs.sum()):
                    count += count_here
                    inside = unravel(int(differs.view(-1).int().argmax()), box.shape)
                    index = tuple(a + b for a, b in zip(box.start, inside, strict=True))
                    element = part.offset + sum(i * s for i, s in zip(inside, part.strides, strict=True))
                    if first is None or element < first[0]:
                        first = (element, self._numbers.number(part.tensor, index))
        for start, stop in self._padding.get(name, []):
            # A loader may leave its padding alone, or set it to zero.
            gap = live.view(-1)[start:stop]
            differs = ~(gap.isnan() | (gap == 0))
            if count_here := int(differs.sum()):
                count += count_here
                element = start + int(differs.int().argmax())
                if first is None or element < first[0]:
                    first = (element, None)
        if first is not None:
            self._differences[name] = _Difference(*first, since=digit, count=count, size=live.numel())

    def _describe(self, name: str, difference: _Difference) -> str:
        place = f"{name}{list(unravel(difference.element, tuple(self._live[name].shape)))}"
        table = "padding" if difference.expected is None else self._numbers.element(difference.expected)
        return (
            f"{place}: the table says {table}, the engine's loader put {self._put_there(difference)} there "
            f"({difference.count} of {difference.size} elements differ)"
        )

    def _put_there(self, difference: _Difference) -> str:
        if any(value.isnan() for value in difference.values):
            return "nothing"
        digits = [self._numbers.digit(value) for value in difference.values]
        before = [self._numbers.digit_of(difference.expected or 0, k) for k in range(difference.since)]
        if None not in digits:
            all_digits = [*before, *(digit for digit in digits if digit is not None)]
            number = sum(digit << (k * self._numbers.digit_bits) for k, digit in enumerate(all_digits))
            if element := self._numbers.element(number):
                return element
        return f"the value {difference.values[0].item()}, which it was not given,"
