"""Random initial weights that are the same numbers at every layout."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Head, Init, tensor_inits
from megarlhf.placement import Box, Placement, RankPlacements, Shape
from megarlhf.weights.transport.storages import Storages, view, zero_padding

_BLOCK_ELEMENTS = 1 << 20


@torch.no_grad()
def fill_random(
    placements: RankPlacements,
    dst: Storages,
    *,
    seed: int,
    std: float,
    arch: Architecture,
    head: Head = "lm",
    only: frozenset[str] | None = None,
) -> None:
    """Fills a rank's storages: matrices normal(0, std), the projections that write into the residual stream
    (o_proj, down_proj) normal(0, std / sqrt(2 num_layers)), norms one, biases and padding zero, a score head
    normal(0, 1 / sqrt(hidden + 1)), A of an adapter uniform up to 1 / sqrt(columns), as PEFT's
    kaiming_uniform(a = sqrt(5)), and its B zero.

    A tensor is drawn in fp32 in blocks of whole rows, each from a CPU generator seeded by (seed, name,
    block); a rank draws only the blocks it holds rows of. `only` limits it to some logical tensors (a
    fresh head on a loaded trunk) and then leaves padding alone.
    """
    inits = tensor_inits(arch, head)
    scales: dict[Init, float] = {
        "normal": std,
        "residual": std / math.sqrt(2 * arch.num_layers),
        "ones": 1.0,
        "zeros": 0.0,
        "score": 1 / math.sqrt(arch.hidden_size + 1),
        "lora": 1.0,
    }
    parts: dict[str, list[Placement]] = defaultdict(list)
    for placement in placements.placements:
        if only is None or placement.tensor in only:
            parts[placement.tensor].append(placement)
    for tensor, tensor_placements in parts.items():
        init = inits[tensor]
        scale = scales[init]
        if scale == 0.0 or init == "ones":
            for placement in tensor_placements:
                view(placement, dst).fill_(1.0 if init == "ones" else 0.0)
            continue
        shape = placements.tensors[tensor]
        scale = 1 / math.sqrt(shape[1]) if init == "lora" else scale
        for block, values in _blocks(tensor, shape, tensor_placements, seed, uniform=init == "lora"):
            values *= scale
            for placement in tensor_placements:
                common = placement.box.intersect(block)
                if common is not None:
                    inside = common.shift(tuple(-a for a in block.start))
                    index = tuple(slice(a, b) for a, b in zip(inside.start, inside.stop, strict=True))
                    view(placement.part(common), dst).copy_(values[index])
    if only is None:
        zero_padding(placements, dst)


@torch.no_grad()
def fill_zeros(placements: RankPlacements, dst: Storages, only: frozenset[str]) -> None:
    """Fill the named logical tensors with zeros, as far as a rank holds them."""
    for placement in placements.placements:
        if placement.tensor in only:
            view(placement, dst).zero_()


def _blocks(
    tensor: str, shape: Shape, placements: list[Placement], seed: int, *, uniform: bool
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The blocks of rows that the placements touch, with their values: standard normal, or uniform in [-1, 1)."""
    inner = math.prod(shape[1:])
    rows = max(1, _BLOCK_ELEMENTS // inner)
    for number, start in enumerate(range(0, shape[0], rows)):
        block = Box.whole(shape).rows(start, min(start + rows, shape[0]))
        if any(placement.box.intersect(block) for placement in placements):
            generator = torch.Generator().manual_seed(_seed(seed, tensor, number))
            draw = torch.rand if uniform else torch.randn
            values = draw(block.shape, generator=generator, dtype=torch.float32)
            yield block, values.mul_(2).sub_(1) if uniform else values


def _seed(seed: int, tensor: str, block: int) -> int:
    """63 bits of a hash; Python's own `hash` differs from process to process."""
    digest = hashlib.blake2b(f"{seed}/{tensor}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
