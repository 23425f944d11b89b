"""A mixture of experts in place of the MLP: router and experts, by the names that a family gives them."""

from __future__ import annotations

from megarlhf.architectures.entries import entry
from megarlhf.architectures.rules import (
    split_columns,
    split_rows,
    stack_as_columns,
    stack_as_rows,
    stack_experts,
    whole,
)
from megarlhf.architectures.table import Entry, Place


def experts(block: str, *, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """The norm, the router and silu(gate) x up, down of each expert.

    Megatron-Core does not fuse the norm before a router, whatever the spec. vLLM keeps all experts of a layer in two
    tensors.
    """
    expert = block + ".experts.{expert}."
    fused = block + ".experts.routed_experts."
    local_expert = "mlp.experts.local_experts.{expert}."
    return (
        entry("post_attention_layernorm.weight", ("hidden",), "ones", "pre_mlp_layernorm.weight", whole),
        entry(f"{block}.gate.weight", ("experts", "hidden"), "normal", "mlp.router.weight", whole),
        Entry(
            tensors=(
                (f"{expert}{gate}.weight", ("expert_ffn", "hidden")),
                (f"{expert}{up}.weight", ("expert_ffn", "hidden")),
            ),
            init="normal",
            per_expert=True,
            megatron=Place(local_expert + "linear_fc1.weight", split_rows),
            grouped={
                "te": Place("mlp.experts.linear_fc1.weight{expert}", split_rows),
                "local": Place("mlp.experts.weight1", split_rows, stack_as_columns),
            },
            vllm=Place(fused + "w13_weight", split_rows, stack_experts),
        ),
        Entry(
            tensors=((f"{expert}{down}.weight", ("hidden", "expert_ffn")),),
            init="residual",
            per_expert=True,
            megatron=Place(local_expert + "linear_fc2.weight", split_columns),
            grouped={
                "te": Place("mlp.experts.linear_fc2.weight{expert}", split_columns),
                "local": Place("mlp.experts.weight2", split_columns, stack_as_rows),
            },
            vllm=Place(fused + "w2_weight", split_columns, stack_experts),
        ),
    )
