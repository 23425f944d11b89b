"""What an operation touches, by hand, and how estimates are held against runs. Not covered: all other operations."""

import math
from typing import Any

import pytest
import torch

from benchmarks.rehearsal.time import TimeRow, ranking, sft, time_error_median
from megarlhf.rehearsal.cost_model.operations import memory_class, stored_bytes, touched_bytes, work_of

A, B = torch.zeros(10, 4), torch.zeros(10, 4)
ROWS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "args", "out", "kind", "nbytes"),
    [
        ("add", (A, B), A.clone(), "copy", 3 * 160),
        ("add_", (A, B), A, "copy", 3 * 160),
        ("copy_", (A, B), A, "copy", 2 * 160),
        ("copy_", (A, B.bfloat16()), A, "cast", 160 + 80),
        ("_to_copy", (A,), A.bfloat16(), "cast", 160 + 80),
        ("zero_", (A,), A, "fill", 160),
        ("silu", (A,), A.clone(), "math", 2 * 160),
        ("mean", (A,), A.mean(-1), "reduce", 160 + 40),
        ("linalg_vector_norm", (A,), torch.zeros(()), "norm", 160 + 4),
        ("linalg_vector_norm", (A, math.inf), torch.zeros(()), "largest", 160 + 4),
        ("embedding", (A, ROWS), A[:3].clone(), "index", 2 * 48 + 24),
    ],
)
def test_kind_and_bytes(name, args, out, kind, nbytes):
    """A tensor that is written in place is among arguments and results; of a lookup only the named rows are read."""
    tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
    assert work_of(name) == "memory"
    assert memory_class(name, args, out) == kind
    assert touched_bytes(name, args, out, tensors) == nbytes


def test_an_expanded_tensor_is_there_once():
    assert stored_bytes(torch.zeros(1, 4).expand(10, 4)) == 16
    assert stored_bytes(torch.zeros(0, 4)) == 0
    assert (work_of("addmm"), work_of("_scaled_dot_product_flash_attention_for_cpu")) == ("matmul", "attention")


def row(estimate: float, measured: float, hidden: int = 64, **layout: Any) -> TimeRow:
    return TimeRow(case=sft(hidden, **layout), phase="step", estimate=estimate, measured=measured)


def test_median_of_errors_and_ranking_of_layouts():
    """Errors 10%, 90% and 20%. Of one size 10 and 5 differ by more than 25% and are ranked wrongly (9 < 9.5), 10 and 9
    differ by less, 9 and 5 are ranked rightly; another size is not compared with them."""
    two, pipelined = {"world_size": 2}, {"world_size": 2, "parallel": {"pp": 2}}
    rows = [row(9.0, 10.0), row(9.5, 5.0, **two), row(10.8, 9.0, **pipelined), row(1.0, 1.0, hidden=128)]
    assert [each.error for each in rows] == pytest.approx([-0.1, 0.9, 0.2, 0.0])
    assert time_error_median(rows[:3]) == pytest.approx(0.2)
    assert ranking(rows) == (1, 2)
    assert ranking(rows[:1]) == (0, 0)
