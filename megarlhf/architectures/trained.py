"""Tensors of a model that are trained."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from megarlhf.architectures.adapters import adapter_tensors, name_matches
from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import Head, head_name, logical_tensors, table_of
from megarlhf.architectures.table import iter_tensors


def trained_tensors(
    arch: Architecture, head: Head, *, freeze: Sequence[str] = (), train_only: Sequence[str] = ()
) -> frozenset[str]:
    """Hugging Face names of what is trained: of a model with an adapter the adapter, and a scalar head; otherwise all
    but what a pattern of `freeze` names, or only what one of `train_only` does. A pattern names a tensor, or its
    module, as `adapters.name_matches` says.

    Raises: ValueError for a pattern that names nothing, where nothing is left, and where one parameter of Megatron-Core
    would be trained in part.
    """
    tensors = logical_tensors(arch, head)
    if arch.adapter is not None:
        return adapter_tensors(arch) | ({head_name(arch, "scalar")} if head == "scalar" else set())
    if not (freeze or train_only):
        return frozenset(tensors)
    key, patterns = ("freeze", freeze) if freeze else ("train_only", train_only)
    named: set[str] = set()
    for pattern in patterns:
        matching = {name for name in tensors if _names(name, pattern)}
        if not matching and head == "lm" and arch.tied_embeddings and _names(head_name(arch, "lm"), pattern):
            (embedding, *_) = table_of(arch).embedding[0].tensors[0]
            raise ValueError(
                f"{key}: {pattern!r} is the head, and this model's head is its embedding (tied); name {embedding}, "
                "which is both"
            )
        if not matching:
            some = ", ".join(list(dict.fromkeys(_without_layer(name) for name in tensors))[:12])
            raise ValueError(
                f"{key}: {pattern!r} names no tensor of this model. Its tensors are, with * for a number, {some}"
                f"{', ...' if len(tensors) > 12 else ''}; give the end of a name, or a pattern with *"
            )
        named |= matching
    trained = frozenset(tensors.keys() - named if freeze else named)
    if not trained:
        raise ValueError(f"{key} = {list(patterns)} freezes every tensor, and nothing would be trained; freeze fewer")
    _require_whole_parameters(arch, head, trained, key)
    return trained


def count_trained(arch: Architecture, head: Head, trained: frozenset[str]) -> tuple[int, int]:
    """Elements that are trained, and of all tensors."""
    sizes = {name: math.prod(shape) for name, shape in logical_tensors(arch, head).items()}
    return sum(size for name, size in sizes.items() if name in trained), sum(sizes.values())


def in_words(number: int, total: int) -> str:
    """A description such as `trains 1,024 of 65,536 parameters (1.56 %)`."""
    return f"trains {number:,} of {total:,} parameters ({100 * number / total:.3g} %)"


def _names(name: str, pattern: str) -> bool:
    return name_matches(name, pattern) or name_matches(name.rpartition(".")[0], pattern)


def _without_layer(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _require_whole_parameters(arch: Architecture, head: Head, trained: frozenset[str], key: str) -> None:
    """Tensors of one entry share a parameter, which has a gradient as a whole or none."""
    tensors = iter_tensors(table_of(arch), arch, head)
    for first, entry in tensors:
        group = [first, *(tensor for tensor, _ in itertools.islice(tensors, len(entry.tensors) - 1))]
        on = [tensor.name for tensor in group if tensor.name in trained]
        if on and len(on) < len(group):
            off = next(tensor.name for tensor in group if tensor.name not in trained)
            raise ValueError(
                f"{key}: {on[0]} would be trained and {off} not, which are one parameter of Megatron-Core; name all of "
                f"{', '.join(tensor.name for tensor in group)}, or none"
            )
