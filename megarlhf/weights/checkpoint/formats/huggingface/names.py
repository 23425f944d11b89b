"""Names under which other programs store a model's tensors: wrappers' prefixes, and experts in one tensor."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import table_of
from megarlhf.weights.transport.extent import Extent

WRAPPERS = ("_orig_mod.", "module.", "base_model.model.")
"""Starts of all names in the state of a wrapped model: torch.compile, DDP or DeepSpeed, PEFT."""

log = logging.getLogger(__name__)


def without_wrappers(directory: Path, tensors: Mapping[str, Extent]) -> dict[str, Extent]:
    """The tensors without what wrappers of the model have put before every name.

    Raises: ValueError for PEFT's model with the adapter beside its base.
    """
    prefix, names = "", list(tensors)
    while more := next((wrapper for wrapper in WRAPPERS if all(name.startswith(wrapper) for name in names)), ""):
        prefix, names = prefix + more, [name.removeprefix(more) for name in names]
        if not names:
            return {}
    if adapted := [name for name in names if ".lora_" in name]:
        is_alone = len(adapted) == len(names)
        what = "an adapter and no model" if is_alone else "a model with an adapter beside its weights"
        raise ValueError(
            f"{directory} holds {what} ({adapted[0]}, ...): merge it into its base by PEFT (merge_and_unload), save "
            "that by save_pretrained, and give the directory"
        )
    if prefix:
        _tell(directory, prefix)
    return dict(zip(names, tensors.values(), strict=True))


@functools.cache
def _tell(directory: Path, prefix: str) -> None:
    """Once in a process, which opens a model several times."""
    log.warning("%s: the name of every tensor begins with %s, which is left out", directory, prefix)


def single_experts(tensors: Mapping[str, Extent], arch: Architecture) -> dict[str, Extent]:
    """The tensors by the family's own names, where transformers 5 has saved experts as it holds them in memory
    (`save_original_format=False`): those of a layer in `mlp.experts.gate_up_proj` [experts, 2 x ffn, hidden] and
    `mlp.experts.down_proj` [experts, hidden, ffn], the router in `mlp.gate.weight`.
    """
    fused = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    if not arch.num_experts or not any(name.endswith(fused) for name in tensors):
        return dict(tensors)
    per_expert = {len(entry.tensors): entry.tensors for entry in table_of(arch).layer if entry.per_expert}
    if set(per_expert) != {1, 2}:  # a family of the user that is built in another way
        return dict(tensors)
    block = per_expert[1][0][0].partition(".experts.")[0]
    single: dict[str, Extent] = {}
    for name, extent in tensors.items():
        layer, _, last = name.rpartition("mlp.")
        if last == "gate.weight":
            single[f"{layer}{block}.gate.weight"] = extent
        elif name.endswith(fused) and extent.strides is None:
            templates = [template for template, _ in per_expert[2 if last.endswith("gate_up_proj") else 1]]
            parts = _parts(extent, arch.num_experts, len(templates))
            for expert in range(arch.num_experts):
                single |= {layer + template.format(expert=expert): next(parts) for template in templates}
        else:
            single[name] = extent
    return single


def _parts(extent: Extent, experts: int, count: int) -> Iterator[Extent]:
    """The rows of every expert in `count` equal parts, in the order in which the file has them."""
    *outer, columns = extent.shape
    rows, rest = divmod(math.prod(outer), experts * count)
    if rest or len(outer) != 2 or outer[0] != experts:
        raise ValueError(
            f"{extent.path} has experts of shape {extent.shape} in one tensor, expected [{experts}, rows of all "
            f"projections, columns] for the {experts} experts of config.json; do config.json and weights belong "
            "together?"
        )
    size = rows * columns * extent.dtype.itemsize
    for number in range(experts * count):
        yield Extent(extent.path, extent.offset + number * size, (rows, columns), extent.dtype)
