"""Whether the files of an mp_rank tree come from one save of one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarlhf.weights.checkpoint.formats.megatron.stored import stored_args

_SAME = ("iteration", "checkpoint_version")
_SAME_ARGS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "padded_vocab_size",
    "rotary_base",
    "norm_epsilon",
    "swiglu",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
"""Arguments that are equal on every rank of a run; ranks, seeds and paths differ."""


def require_one_run(contents: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raises ValueError that names the files which say something else than the first one."""
    first, *others = sorted(contents)
    expected = _run_of(contents[first], first)
    different = []
    for path in others:
        for key, value in _run_of(contents[path], path).items():
            if value != expected[key]:
                different.append(f"{path.parent.name} has {key} = {value!r}, {first.parent.name} {expected[key]!r}")
    if different:
        raise ValueError(
            f"{first.parent.parent} mixes files of two checkpoints: {'; '.join(different)}; copy it again from "
            "its source"
        )


def _run_of(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    stated = stored_args(content, path).values
    return {key: content.get(key) for key in _SAME} | {key: stated.get(key) for key in _SAME_ARGS}
