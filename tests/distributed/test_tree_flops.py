"""A micro-batch does the work that the formula of trees says, to the operation: products, and pairs of attention.

Counted are the operations that torch runs, by the shapes that they are called with; nothing of ours counts. Not
covered: a GPU, whose operations are rehearsed (tests/rehearsal/test_rehearsed_trees.py).
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.columns import Ragged
from megarlhf.config import MicroBatchConfig, RoleConfig
from megarlhf.models.role import build_role
from megarlhf.parallel.loss import LossOutput
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch, TokenSpans, micro_batch_mask, scatter_to_micro_batch
from megarlhf.parallel.packing.partition import forward_cost
from megarlhf.parallel.vocab import next_token_logprobs
from megarlhf.runtime import Runtime

GROUPS = ((9, (7, 12, 1, 5)), (4, (6, 6)), (3, (11,)))
"""Tokens of a prompt, and of its responses."""
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class Counting(TorchDispatchMode):
    """Floating-point operations: two of each multiplication and addition of a product, four of each pair of a query
    and a key that is attended to in a forward, and number of a head. A backward makes five products, a forward two."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        tensors = [x for x in args if isinstance(x, Tensor)]
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            left, right = tensors[-2:]
            self.flops["products"] += 2 * left.numel() * right.shape[-1]
        elif name.startswith(FLASH):
            backward = name.endswith("_backward")
            query, key = tensors[backward : backward + 2]
            (queries, width), keys = query.shape[-2:], key.shape[-2]
            assert tensors[3 + 3 * backward :] == [], "a mask"
            causal = any(x is True for x in args)
            assert not causal or queries == keys
            pairs = queries * (queries + 1) // 2 if causal else queries * keys
            blocks = query.shape[0] * query.shape[1]
            self.flops["backward" if backward else "forward"] += (10 if backward else 4) * blocks * pairs * width
        else:
            assert "attention" not in name, name
            assert not any(word in name for word in ("matmul", "linear", "conv", "einsum", "_mm", "dot")), name
        return out


class OfResponses:
    """Their log-probs, summed."""

    names: tuple[str, ...] = ()

    def __init__(self, role: Any) -> None:
        self._role = role

    def __call__(self, output: Tensor, batch: MicroBatch) -> LossOutput:
        vocabulary = self._role.shard.vocabulary()
        logprobs_BS, _ = next_token_logprobs(
            vocabulary, output, batch.tokens_BS, batch.columns["mask"], predictors_S=batch.predictors_S
        )
        return LossOutput(logprobs_BS.sum(), torch.zeros(0))


def counted(runtime: Runtime, model: str, recompute: str, shares: bool) -> tuple[dict[str, int], int, int]:
    """Operations of a forward and a backward; segments and tokens of the row."""
    section = RoleConfig.model_validate({"model": {"path": model, "dtype": "fp32"}, "recompute": recompute})
    role = build_role("actor", section, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1)
    rows, groups, prompts = [], [], []
    for prompt, responses in GROUPS:
        groups.append(range(len(rows), len(rows) + len(responses)))
        rows += [torch.randint(4, 16, (prompt + response,)) for response in responses]
        prompts += [prompt] * len(responses)
    tokens = Ragged.from_rows(rows, torch.int64)
    micro = MicroBatchConfig(max_tokens_per_micro_batch=500, share_prompts=shares)
    shared = [prompt for prompt, _ in GROUPS]
    (layout,) = role.batching(micro).layouts(groups, tokens.lengths_N, shared=shared, divisible=True)
    prompts_N = torch.tensor(prompts)
    spans = TokenSpans.responses(prompts_N, tokens.lengths_N - prompts_N)
    columns = {"mask": micro_batch_mask(layout, spans, torch.device("cpu"))}
    tokens_BS = scatter_to_micro_batch(layout, tokens, TokenSpans.whole(tokens.lengths_N))
    with Counting() as counting:
        role.accumulate([MicroBatch(tokens_BS, columns, layout)], OfResponses(role))
    return dict(counting.flops), len(layout.segments), layout.columns


@pytest.mark.parametrize("recompute", ["none", "full", "core_attention"])
@pytest.mark.parametrize("shares", [True, False])
def test_operations_are_those_of_the_formula(shares, recompute, ranks, two_layers) -> None:
    """Twice a weight for each token of the tree, four times a channel for each pair, the vocabulary on rows of
    responses; each again where it is computed again; and in the backward."""
    flops, num_segments, columns = ranks.run(1, counted, str(two_layers["other"]), recompute, shares)[0]
    arch = architecture_from_hf(two_layers["other"])
    hidden, channels, kv = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    weights = arch.num_layers * (hidden * (channels + 2 * kv) + channels * hidden + 3 * hidden * arch.ffn_size)
    tokens = pairs = labels = 0
    for prompt, responses in GROUPS:
        copies = 1 if shares else len(responses)
        tokens += copies * prompt + sum(responses)
        pairs += copies * prompt * (prompt + 1) // 2
        pairs += sum(prompt * length + length * (length + 1) // 2 for length in responses)
        labels += sum(responses)
    assert columns == tokens, "a row is filled up: fillers cost too"
    assert (num_segments > 0) == shares
    again_layers, again_attention = recompute == "full", recompute != "none"
    products = (3 + again_layers) * 2 * tokens * weights + 3 * 2 * labels * hidden * arch.vocab_size
    of_attention = 4 * pairs * arch.num_layers * channels
    assert flops == {
        "products": products, "forward": (1 + again_attention) * of_attention, "backward": of_attention * 5 // 2,
    }  # fmt: skip
    # By what micro-batches are balanced: the same of the layers' forward.
    cost = forward_cost(arch)
    whole = (
        cost.of_tree(prompt, responses) if shares else sum(cost.of(prompt + response) for response in responses)
        for prompt, responses in GROUPS
    )
    assert sum(whole) == 2 * tokens * weights + of_attention


def test_what_sharing_saves_is_what_costs_differ_by(ranks, two_layers) -> None:
    """Prompts that are not computed again, to the operation; the vocabulary is looked up as often."""
    shared, apart = (ranks.run(1, counted, str(two_layers["other"]), "none", each)[0][0] for each in (True, False))
    arch = architecture_from_hf(two_layers["other"])
    cost = forward_cost(arch)
    spared = sum((len(responses) - 1) * cost.of(prompt) for prompt, responses in GROUPS)
    spared_pairs = sum((len(responses) - 1) * cost.pairs(prompt) for prompt, responses in GROUPS) * cost.per_pair
    assert apart["forward"] - shared["forward"] == spared_pairs
    assert apart["products"] - shared["products"] == 3 * (spared - spared_pairs)
