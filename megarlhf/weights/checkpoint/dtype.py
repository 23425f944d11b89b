"""`model.dtype: auto`: the dtype in which a model is stored."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import get_args

from megarlhf.architectures.hf_config import read_config
from megarlhf.architectures.placements import Head, head_name
from megarlhf.config import Dtype, ModelConfig
from megarlhf.weights.checkpoint.open_checkpoint import Checkpoint, detect_format, open_checkpoint

NAMES: dict[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16"}
"""Dtypes by torch's names."""


@dataclass(frozen=True)
class ResolvedDtype:
    """A role's dtype, and where it comes from."""

    name: Dtype
    why: str


def resolve_dtype(role: str, model: ModelConfig, head: Head) -> ResolvedDtype:
    """The dtype of a role's parameters. `auto` reads the headers of the checkpoint: those of the tensors that a model
    with this head takes from it.

    With `random_init`, and for a directory without weights (a plan needs none), it is what config.json says (`dtype`
    or `torch_dtype`), otherwise fp32.

    Raises: ValueError when that is fp16 or anything else than fp32 and bf16, or when tensors differ in dtype.
    """
    if model.dtype != "auto":
        return ResolvedDtype(model.dtype, "as configured")
    if model.random_init or not has_weights(model):
        path = model.hf_directory() / "config.json"
        config = read_config(path.parent)
        dtype = config.get("dtype") or config.get("torch_dtype")
        if dtype is None:
            return ResolvedDtype("fp32", "by default")
        note_by_dtype, where, why = {str(dtype).removeprefix("torch."): ""}, f"{path} says", "as config.json says"
    else:
        sizes = _bytes_by_dtype(open_checkpoint(model.path, hf=model.hf, head=head), head)
        note_by_dtype = {name: f" ({size} bytes)" for name, size in sizes.most_common()}
        where, why = f"{model.path} is stored in", "as stored"
    if len(note_by_dtype) == 1 and (only := next(iter(note_by_dtype))) in NAMES:
        return ResolvedDtype(NAMES[only], why)
    raise ValueError(
        f"{role}.model.dtype = auto, but {where} {', '.join(name + size for name, size in note_by_dtype.items())}; set "
        f"{role}.model.dtype to {' or '.join(get_args(Dtype))}: fp32 keeps the values of fp16 and bf16, bf16 rounds "
        "those of fp16 and fp32"
    )


def _bytes_by_dtype(checkpoint: Checkpoint, head: Head) -> Counter[str]:
    """Bytes by dtype of the stored tensors that a model with this head takes. A head of the other kind is not taken."""
    unused = None if checkpoint.head == head else head_name(checkpoint.arch, checkpoint.head)
    sizes: Counter[str] = Counter()
    for part, extents in zip(checkpoint.weights.parts, checkpoint.weights.extents, strict=True):
        for storage in {placement.storage for placement in part.placements if placement.tensor != unused}:
            sizes[str(extents[storage].dtype).removeprefix("torch.")] += extents[storage].num_bytes
    return sizes


def has_weights(model: ModelConfig) -> bool:
    """Whether there is a checkpoint; one that cannot be read is refused when it is loaded."""
    try:
        detect_format(model.path)
    except ValueError:
        return False
    return True
