"""A mixture of experts in place of the MLP: router and experts, by the names that a family gives them."""

from __future__ import annotations

from megarlhf.architectures.entries import entry, rms_norm
from megarlhf.architectures.rules import split_columns, split_rows, stack_as_columns, stack_as_rows, whole
from megarlhf.architectures.shards import stacked
from megarlhf.architectures.table import Entry, Init, Place, Rule, Stack, Tensors


def experts(block: str, *, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """The norm, the router and silu(gate) x up, down of each expert.

    Megatron-Core does not fuse the norm before a router, whatever the spec. vLLM keeps all experts of a layer in two
    tensors.
    """
    expert = block + ".experts.{expert}."

    def projection(number: int, rule: Rule, *, init: Init, vllm: str, stack: Stack, tensors: Tensors) -> Entry:
        return Entry(
            tensors=tensors,
            init=init,
            per_expert=True,
            megatron=Place(f"mlp.experts.local_experts.{{expert}}.linear_fc{number}.weight", rule),
            grouped={
                "te": Place(f"mlp.experts.linear_fc{number}.weight{{expert}}", rule),
                "local": Place(f"mlp.experts.weight{number}", rule, stack),
            },
            vllm=Place(f"{block}.experts.routed_experts.{vllm}", rule, stacked),
        )

    gate_up = tuple((f"{expert}{name}.weight", ("expert_ffn", "hidden")) for name in (gate, up))
    down_only = ((f"{expert}{down}.weight", ("hidden", "expert_ffn")),)
    return (
        rms_norm("post_attention_layernorm", "pre_mlp_layernorm"),
        entry(f"{block}.gate.weight", ("experts", "hidden"), "normal", "mlp.router.weight", whole),
        projection(1, split_rows, init="normal", vllm="w13_weight", stack=stack_as_columns, tensors=gate_up),
        projection(2, split_columns, init="residual", vllm="w2_weight", stack=stack_as_rows, tensors=down_only),
    )
