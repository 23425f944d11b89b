"""Small models, layouts and copies in memory for the tests of `megarlhf.weights`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import logical_tensors, megatron_placements, padded_vocab_size, vllm_placements
from megarlhf.placement import Box, Placement, RankPlacements, Shape, contiguous_strides
from megarlhf.weights.plan.copy_plan import CopyPlan
from megarlhf.weights.transport.storages import view

TINY: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 128,
    "hidden_act": "silu",
}  # fmt: skip

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def place_slice(tensor: str, box: Box, storage: str, storage_shape: Shape, at: Shape) -> Placement:
    """The placement of `box` in the slice of a storage that starts at `at` and has the box's shape."""
    inside = all(a >= 0 and a + n <= size for a, n, size in zip(at, box.shape, storage_shape, strict=True))
    assert inside, f"{tensor}: {box.shape} at {at} leaves {storage} of shape {storage_shape}"
    strides = contiguous_strides(storage_shape)
    return Placement(tensor, box, storage, sum(a * s for a, s in zip(at, strides, strict=True)), strides)


Live = dict[int, dict[str, torch.Tensor]]


def tiny(**changes: Any) -> Architecture:
    return architecture_from_hf({**TINY, **changes})


def transformers_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    settings = {**TINY, **changes}
    settings.pop("model_type")
    return LlamaConfig(**settings)


def random_logical(arch: Architecture, head: str = "lm") -> dict[str, torch.Tensor]:
    """Values that a mistake cannot hide in: every element of the model is different."""
    tensors, start = {}, 1
    for name, shape in logical_tensors(arch, head).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + count, dtype=torch.float64).view(shape)
        start += count
    return tensors


def megatron_ranks(
    arch: Architecture, tp: int, stages: Sequence[Sequence[int]], dp: int = 1, *, head: str = "lm", spec: str = "local",
    padded_vocab: int | None = None
) -> list[RankPlacements]:  # fmt: skip
    """Ranks in Megatron's order: tp fastest, then dp, then pp."""
    padded = padded_vocab or padded_vocab_size(arch.vocab_size, tp)
    ranks = []
    for stage, layers in enumerate(stages):
        for replica in range(dp):
            for tp_rank in range(tp):
                place = {"first_stage": stage == 0, "last_stage": stage == len(stages) - 1, "padded_vocab": padded}
                place |= {"rank": (stage * dp + replica) * tp + tp_rank, "head": head, "spec": spec}
                ranks.append(megatron_placements(arch, tp=tp, tp_rank=tp_rank, layers=layers, **place))
    return ranks


def vllm_ranks(arch: Architecture, tp: int, engines: int = 1) -> list[RankPlacements]:
    shards = [vllm_placements(arch, tp=tp, tp_rank=r, rank=r) for r in range(tp)]
    return [shards[rank % tp].on_rank(rank) for rank in range(tp * engines)]


def empty(ranks: Sequence[RankPlacements], dtype: torch.dtype = torch.float64, fill: float = -1.0) -> Live:
    return {
        part.rank: {name: torch.full(shape, fill, dtype=dtype) for name, shape in part.storages.items()}
        for part in ranks
    }


def copy_in_memory(plan: CopyPlan, src: Live, dst: Live) -> None:
    for copy in plan.copies:
        view(copy.dst, dst[copy.dst_rank]).copy_(view(copy.src, src[copy.src_rank]))


def fill_from_logical(part: RankPlacements, live: dict[str, torch.Tensor], logical: dict) -> None:
    """The independent way: write each placement from the logical tensor by plain slicing."""
    for placement in part.placements:
        index = tuple(slice(a, b) for a, b in zip(placement.box.start, placement.box.stop, strict=True))
        view(placement, live).copy_(logical[placement.tensor][index])
