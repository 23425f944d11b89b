"""Names and orders of older Megatron-LM models, in today's terms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarlhf.architectures.architecture import Architecture
from megarlhf.placement import Placement, RankPlacements, contiguous_strides
from megarlhf.weights.checkpoint.formats.megatron.stored import NO_PARAMETERS
from megarlhf.weights.checkpoint.formats.torch_file.unpickle import ForeignObject
from megarlhf.weights.transport.extent import Extent

_RENAMES = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"^language_model\.", ""),
        (r"^(encoder|transformer)\.", "decoder."),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"\.(self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.(post_attention_layernorm|post_attention_norm)\.", ".pre_mlp_layernorm."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.mlp\.local_experts\.", ".mlp.experts.local_experts."),
        (r"\.final_norm\.", ".final_layernorm."),
    )
)
"""Names from before Megatron-Core to its local spec."""


def core_names(model: Any, path: Path) -> tuple[dict[str, Extent], bool]:
    """The tensors of a model chunk by Megatron-Core's names, and whether they had older ones.

    Entries that are no tensors (`_extra_state`) are left out. Raises: ValueError when the chunk is no dict.
    """
    if not isinstance(model, dict):
        raise ValueError(f"{path} holds a model of type {type(model).__name__}, expected a dict of tensors; is it one?")
    flat = _flatten(model, path)
    if flat and all(name.startswith("module.") for name in flat):
        flat = {name.removeprefix("module."): extent for name, extent in flat.items()}
    legacy = any(name.startswith("language_model.") for name in flat)
    if not legacy:
        return flat, False
    renamed = {}
    for name, extent in flat.items():
        for old, new in _RENAMES:
            name = old.sub(new, name)
        renamed[name] = extent
    return renamed, True


def _flatten(model: Mapping[str, Any], path: Path, prefix: str = "") -> dict[str, Extent]:
    """Older models are dicts of dicts."""
    flat: dict[str, Extent] = {}
    for name, value in model.items():
        if isinstance(value, Extent):
            flat[f"{prefix}{name}"] = value
        elif isinstance(value, dict):
            flat |= _flatten(value, path, f"{prefix}{name}.")
        elif isinstance(value, ForeignObject) and not str(name).endswith(NO_PARAMETERS):
            raise ValueError(
                f"{path} stores {prefix}{name} as an object of {type(value)!r}, expected a tensor; save the "
                "model with plain tensors where that class is installed"
            )
    return flat


def reorder_qkv(part: RankPlacements, arch: Architecture, tp: int, version: float, folder: Path) -> RankPlacements:
    """The part with the row order of q, k and v that a checkpoint version has inside each rank.

    From 2.0 on [heads, 3, head_dim]; 0 has [3, heads, head_dim] and 1.0 [heads, head_dim, 3] (Megatron-LM's
    `fix_query_key_value_ordering`). Raises: ValueError for grouped queries, which came with 3.0.
    """
    if version >= 2.0:
        return part
    if arch.num_kv_heads != arch.num_heads:
        raise ValueError(
            f"{folder} has checkpoint_version {version}, whose order of q, k and v is known for as many KV heads as "
            f"heads only, and the model has {arch.num_kv_heads} for {arch.num_heads}; load and save it with Megatron-LM"
        )
    heads = arch.num_heads // tp
    placements = tuple(
        _reordered(p, part, heads, arch.head_dim, version) if ".linear_qkv." in p.storage else p
        for p in part.placements
    )
    return replace(part, placements=placements)


def _reordered(placement: Placement, part: RankPlacements, heads: int, head_dim: int, version: float) -> Placement:
    """One placement inside one head's q, k or v, at its older rows."""
    if not placement.storage.endswith((".weight", ".bias")) or ".layer_norm_" in placement.storage:
        return placement
    row_size = contiguous_strides(part.storages[placement.storage])[0]
    row, column = divmod(placement.offset, row_size)
    block, channel = divmod(row, head_dim)
    head, kind = divmod(block, 3)
    if version == 0:
        return replace(placement, offset=((kind * heads + head) * head_dim + channel) * row_size + column)
    strides = tuple(3 * s if s >= row_size else s for s in placement.strides)
    return replace(placement, offset=((head * head_dim + channel) * 3 + kind) * row_size + column, strides=strides)
