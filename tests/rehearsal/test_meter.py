"""FLOPs and bytes that no formula of shapes tells. Not covered: products and memory (test_operations, test_pricing)."""

from __future__ import annotations

import pytest
import torch

from megarlhf.kernels import linear_token_logprobs
from megarlhf.models.attention.tree import CpuFlash, Varlen, _varlen_kernels, merged_attention
from megarlhf.parallel.packing.rows import packed_row
from megarlhf.rehearsal.cost_model.meter import Meter
from megarlhf.rehearsal.fake_device.device import FakeDevice
from megarlhf.rehearsal.fake_device.torch_patches import varlen_attn, varlen_attn_backward
from megarlhf.rehearsal.transformer_engine.optimizer import FusedAdam
from tests.rehearsal.devices import a_device, a_rank, unknown


def metered(device: FakeDevice, price: Flat, phase: str = "train") -> Meter:
    device.counter = Meter(price, phase=phase, values=device.known.twin)
    return device.counter


class Flat:
    """One price for all operations, which notes their bytes."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.nbytes: list[int] = []

    def operation_seconds(self, work: str, flops: float, nbytes: int, *args: object) -> float:
        self.nbytes.append(nbytes)
        return self.seconds


HEADS, HEAD_DIM = 4, 8


@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_chunks_counts_the_keys_before_them(causal) -> None:
    """Chunks of 2 and 3 queries with 4 and 9 keys, the last aligned: 3 + 4 and 7 + 8 + 9 pairs, or all."""
    with a_device() as device:
        meter = metered(device, Flat())
        query, key = (unknown(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16) for tokens in (5, 13))
        queries, keys = (torch.tensor(x).int().to(device.device) for x in ([0, 2, 5], [0, 4, 13]))
        varlen_attn(query, key, key, queries, keys, 3, 9, causal, None, [-1, 0 if causal else -1], False)
    pairs = 7 + 24 if causal else 8 + 27
    assert meter.flops[0, "train", "attention"] == 4 * pairs * HEADS * HEAD_DIM


@pytest.mark.parametrize("lengths", [[3, 7], [1, 1, 8], [10]])
def test_attention_of_a_packed_row_counts_pairs_of_each_sequence(lengths) -> None:
    """Causal: 2 products x 2 of n (n + 1) / 2 pairs of each head's numbers; in the backward four products. A fifth is
    made again there, which takes time and is not counted."""
    with a_device() as device:
        meter = metered(device, Flat())
        query = unknown(10, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        begins = torch.tensor([0, *lengths]).cumsum(0).int().to(device.device)
        longest = max(lengths)
        out, statistics, state = varlen_attn(
            *(query, query, query, begins, begins, longest, longest, True, None, [-1, 0], False)
        )
        varlen_attn_backward(
            *(out, query, query, query, out, statistics, begins, begins, longest, longest, True, state, None, [-1, 0])
        )
    forward = 2 * sum(length * (length + 1) for length in lengths) * HEADS * HEAD_DIM
    assert meter.flops[0, "train", "attention"] == forward + 2 * forward


@pytest.mark.parametrize("kernel", ["a CPU's", "varlen_attn's"])
def test_attention_of_trees_counts_each_pair_once(kernel) -> None:
    """A segment of L tokens behind P of its ancestors: L (L + 1) / 2 + P L pairs. A root stands between those that are
    continued, and two behind the last level."""
    lengths, parents = (5, 4, 3, 6, 6, 2, 7, 1, 8, 8), (-1, -1, -1, 0, 0, 2, 3, 5, -1, -1)
    before = (0, 0, 0, 5, 5, 3, 5 + 6, 3 + 2, 0, 0)
    with a_device() as device:
        meter = metered(device, Flat())
        query, key, value = (
            unknown(50, heads, HEAD_DIM, dtype=torch.bfloat16).requires_grad_() for heads in (HEADS, 2, 2)
        )
        trees = packed_row(lengths, device.device, parents=parents).trees
        ops = _varlen_kernels()
        assert ops is not None
        out = merged_attention(
            query, key, value, trees, CpuFlash() if kernel == "a CPU's" else Varlen(*ops), scale=None
        )
        pairs = sum(length * (length + 1) // 2 + length * past for length, past in zip(lengths, before, strict=True))
        forward = 4 * pairs * HEADS * HEAD_DIM
        assert meter.flops[0, "train", "attention"] == forward
        out.backward(torch.empty_like(out))
        assert meter.flops[0, "train", "attention"] == forward + 2 * forward


@pytest.mark.parametrize(("causal", "queries"), [(True, 16), (False, 32)])
def test_a_rectangle_takes_as_long_as_a_causal_square_of_as_many_pairs(causal, queries) -> None:
    """What is measured is causal: of the shape of twice the queries half of the pairs are seen."""
    shapes = []

    class Shaped(Flat):
        def operation_seconds(self, work: str, *args: object) -> float:
            shapes.extend([args[3]] if work == "attention" else [])
            return 0.0

    with a_device() as device:
        metered(device, Shaped())
        query, key = (unknown(3, HEADS, 16, HEAD_DIM, dtype=torch.float32) for _ in range(2))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, key, 0.0, causal)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(out, query, key, key, out, lse, 0.0, causal)
        )
    assert shapes == [(3 * HEADS, queries, 16, HEAD_DIM)] * 2


def test_adam_reads_its_state_and_writes_it() -> None:
    """Of a parameter in fp32: its gradient, itself and two moments are read, the last three written, 28 bytes."""
    with a_device() as device:
        parameter = torch.nn.Parameter(unknown(1000, dtype=torch.float32))
        parameter.grad = unknown(1000, dtype=torch.float32)
        optimizer = FusedAdam([parameter])
        optimizer.step()
        price = Flat()
        metered(device, price, "optimizer")
        optimizer.step()
    assert price.nbytes == [28 * 1000]


@pytest.mark.parametrize(("save_bytes", "again"), [(0, 1), (2**20, 0)])
def test_logits_that_are_made_again_are_no_flops_of_the_model(save_bytes, again) -> None:
    """Three products with and without them; what is not kept takes time again."""
    tokens, hidden, vocab = 6, 16, 64
    with a_rank(0, 1) as device:
        meter = metered(device, Flat(1.0))
        hidden_TH = unknown(tokens, hidden, dtype=torch.float32).requires_grad_()
        weight_VH = torch.nn.Parameter(unknown(vocab, hidden, dtype=torch.float32))
        labels_T = torch.zeros(tokens, dtype=torch.int64, device=device.device)
        logprobs_T, _ = linear_token_logprobs(
            hidden_TH, weight_VH, labels_T, save_bytes=save_bytes, backend="chunked", return_entropy=False
        )
        logprobs_T.sum().backward()
    assert meter.flops[0, "train", "matmul"] == 3 * 2 * tokens * hidden * vocab
    assert meter.recomputed_seconds[0, "train"] == again
