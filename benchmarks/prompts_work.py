"""How much a training phase computes: counted by operation, and by the formula that packing levels micro-batches by.

Counted are products of matrices, with torch's own formulas, and attention on a CPU: for each channel of a head and pair
of a query and a key that it sees 4 floating-point operations in the forward (two products), and 10 in the backward
(five, one of them the scores again).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.packing_children import Message
from benchmarks.packing_workload import Workload
from benchmarks.peers import AnonymousPeak
from megarlhf.parallel.packing.partition import ForwardCost

PRODUCTS = {"_scaled_dot_product_flash_attention_for_cpu": 2, "_scaled_dot_product_flash_attention_for_cpu_backward": 5}
"""Of matrices, in attention."""
HELD_APART = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Environment of a child whose memory is looked at: what is freed goes back to the system at once."""


class Work(TorchDispatchMode):
    """Scope that adds up floating-point operations by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in PRODUCTS:
            query, key = args[1:3] if name.endswith("_backward") else args[:2]
            causal = bool(args[7] if name.endswith("_backward") else len(args) > 4 and args[4])
            self.flops["attention"] += 2 * PRODUCTS[name] * query.size(-1) * pairs_of(query, key, causal)
        elif (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops["matmul"] += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


def pairs_of(query_BNLD: torch.Tensor, key_BGKD: torch.Tensor, causal: bool) -> int:
    """Of a query and a key that it sees, over all heads."""
    queries, keys = query_BNLD.size(-2), key_BGKD.size(-2)
    assert not causal or queries == keys, f"causal attention of {queries} queries to {keys} keys is not counted"
    seen = queries * (queries + 1) // 2 if causal else queries * keys
    return query_BNLD.size(0) * query_BNLD.size(1) * seen


def looked_at(round: Callable[[], Any]) -> Message:
    """Two rounds: what the first computes, and the most memory that the second takes beside what was there before it,
    as weights, gradients and the optimizer's state. Not of one round: counting takes memory itself."""
    with Work() as work:
        round()
    with AnonymousPeak() as peak:
        round()
    return {"flops": dict(work.flops), "peak_bytes": peak.peak_bytes}


def by_formula(
    cost: ForwardCost, workload: Workload, *, shared: bool, forwards: int, head: int, head_rows: str = "responses"
) -> dict[str, float]:
    """Floating-point operations of a training phase with so many forwards before its forward and backward.

    head: those of the head's product for one row; it has the rows of response tokens, or of all tokens.
    """
    per_prompt = len(workload.responses) // len(workload.prompts)
    tokens = pairs = 0
    for n, prompt in enumerate(workload.prompts):
        rows = [len(row) for row in workload.responses[n * per_prompt : (n + 1) * per_prompt]]
        if shared:
            tokens += len(prompt) + sum(rows)
            pairs += cost.pairs(len(prompt)) + sum(
                cost.pairs(len(prompt) + row) - cost.pairs(len(prompt)) for row in rows
            )
        else:
            tokens += sum(len(prompt) + row for row in rows)
            pairs += sum(cost.pairs(len(prompt) + row) for row in rows)
    rows_of_head = workload.response_tokens if head_rows == "responses" else tokens
    return {
        "layers": (forwards + 3) * cost.per_token * tokens,
        "attention": (forwards + 3.5) * cost.per_pair * pairs,
        "head": float((forwards + 3) * head * rows_of_head),
    }
