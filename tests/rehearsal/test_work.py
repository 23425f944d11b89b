"""FLOPs that no formula of shapes tells. Not covered: products and memory (test_operations, test_pricing)."""

from __future__ import annotations

import pytest
import torch

from megarlhf.rehearsal.interfaces import varlen_attn, varlen_attn_backward
from megarlhf.rehearsal.work import Meter
from tests.rehearsal.devices import a_device, unknown


class Free:
    """A price of nothing."""

    def operation_seconds(self, *args: object) -> float:
        return 0.0


HEADS, HEAD_DIM = 4, 8


@pytest.mark.parametrize("lengths", [[3, 7], [1, 1, 8], [10]])
def test_attention_of_a_packed_row_counts_pairs_of_each_sequence(lengths: list[int]) -> None:
    """Causal: half of 2 products x 2 of n^2 pairs of each head's numbers; in the backward five products."""
    with a_device() as device:
        meter = device.counter = Meter(Free(), phase="train", numbers=device.known.twin)
        query = unknown(10, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        begins = torch.tensor([0, *lengths]).cumsum(0).int().to(device.device)
        longest = max(lengths)
        out, statistics, state = varlen_attn(
            *(query, query, query, begins, begins, longest, longest, True, None, [-1, 0], False)
        )
        varlen_attn_backward(
            *(out, query, query, query, out, statistics, begins, begins, longest, longest, True, state, None, [-1, 0])
        )
    forward = 2 * sum(length**2 for length in lengths) * HEADS * HEAD_DIM
    assert meter.flops[0, "train", "attention"] == forward + int(2.5 * forward)
