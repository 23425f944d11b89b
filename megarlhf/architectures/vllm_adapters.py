"""Where vLLM keeps an adapter: beside each of its layers, a slot for A and one for B of each linear layer in it."""

from __future__ import annotations

from megarlhf.architectures.adapters import WEIGHT, A, B, is_linear, modules_of
from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.families import family_of
from megarlhf.architectures.shards import LogicalTensor
from megarlhf.architectures.table import Entry, TPRank, dimensions
from megarlhf.placement import Box, Placement, RankPlacements, Shape

SLOTS = (".lora_a", ".lora_b")
"""Between the name of vLLM's layer and the number of the linear layer in it."""
RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Sizes of slots that vLLM offers."""
MAX_RANK = RANKS[-1]
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose vLLM layers take an adapter for each linear layer that Hugging Face names."""


def adapter_slots(arch: Architecture) -> dict[str, list[tuple[str, str] | None]]:
    """vLLM's layers that have a part in the adapter -> names of A and B of each linear layer in it; None: none."""
    assert arch.adapter is not None
    table, targets = family_of(arch.model_type).table, {target.module: target.layers for target in arch.adapter.targets}
    slots: dict[str, list[tuple[str, str] | None]] = {}
    for layer in range(arch.num_layers):
        for entry in table.layer:
            if not is_linear(entry, arch) or entry.vllm is None:
                continue
            names: list[tuple[str, str] | None] = []
            for module in modules_of(entry):
                layers = targets.get(module, ())
                full = table.hf_layer.format(layer=layer) + module
                names.append((full + A, full + B) if layers is None or layer in layers else None)
            if any(names):
                slots[table.vllm_layer.format(layer=layer) + entry.vllm.name.removesuffix(WEIGHT)] = names
    return slots


def vllm_adapter_placements(arch: Architecture, slot_rank: int, *, tp: int, tp_rank: int, rank: int) -> RankPlacements:
    """One tensor-parallel rank's slots of `slot_rank` columns or rows. B is there as scale x B."""
    assert arch.adapter is not None
    table, slots = family_of(arch.model_type).table, adapter_slots(arch)
    here = TPRank(arch=arch.base, tp=tp, tp_rank=tp_rank, padded_vocab=arch.vocab_size)
    storages: dict[str, Shape] = {}
    tensors: dict[str, Shape] = {}
    placements: list[Placement] = []
    for layer in range(arch.num_layers):
        for entry in table.layer:
            if not is_linear(entry, arch) or entry.vllm is None:
                continue
            module = table.vllm_layer.format(layer=layer) + entry.vllm.name.removesuffix(WEIGHT)
            for number, (columns, rows) in enumerate(_cuts(entry, here)):
                names = slots.get(module, [None] * len(entry.tensors))[number]
                a, b = (f"{module}{end}.{number}" for end in SLOTS)
                storages[a] = (slot_rank, columns[1] - columns[0])
                storages[b] = (rows[1] - rows[0], slot_rank)
                if names is not None:
                    size, shapes = arch.adapter.rank, _shapes(entry, number, arch)
                    box_a = Box((0, columns[0]), (size, columns[1]))
                    box_b = Box((rows[0], 0), (rows[1], size))
                    placements.append(Placement(names[0], box_a, a, 0, (storages[a][1], 1)))
                    placements.append(Placement(names[1], box_b, b, 0, (slot_rank, 1)))
                    tensors |= {names[0]: (size, shapes[1]), names[1]: (shapes[0], size)}
    return RankPlacements(rank, storages, tuple(placements), tensors)


def _shapes(entry: Entry, number: int, arch: Architecture) -> tuple[int, int]:
    dims = dimensions(arch)
    outputs, inputs = (dims[word] for word in entry.tensors[number][1])
    return outputs, inputs


_Range = tuple[int, int]


def _cuts(entry: Entry, rank: TPRank) -> list[tuple[_Range, _Range]]:
    """For each linear layer of the entry: the columns and the rows of its weight that the rank has."""
    assert entry.vllm is not None
    dims = dimensions(rank.arch)
    tensors = [LogicalTensor(str(n), tuple(dims[word] for word in shape)) for n, (_, shape) in enumerate(entry.tensors)]
    shard = entry.vllm.rule(tensors, rank)
    cuts = []
    for tensor in tensors:
        (segment,) = (segment for segment in shard.segments if segment.tensor == tensor.name)
        assert segment.dims == (0, 1), f"vLLM keeps {entry.vllm.name} transposed"
        cuts.append(((segment.box.start[1], segment.box.stop[1]), (segment.box.start[0], segment.box.stop[0])))
    return cuts
