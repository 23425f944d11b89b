"""Dealing samples to ranks, and the padded grid, by literals.

Not covered: meshes of real process groups (only layout and coordinates are read), and grids on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarlhf.layout import Layout
from megarlhf.parallel.batching import FILLER, deal, grid_length, lay_out, response_mask

CPU = torch.device("cpu")


def mesh(rank=0, **sizes):
    layout = Layout(**sizes)
    return SimpleNamespace(layout=layout, at=layout.coordinates(rank))


def test_deal_fills_short_shares_up():
    """Ten samples on four ranks are 3, 3, 2, 2; micro-batches of two make two of them everywhere."""
    samples = list(range(10, 20))
    dealt = [deal(samples, mesh(rank, dp=4), 2) for rank in range(4)]
    assert dealt == [
        [[10, 11], [12, FILLER]],
        [[13, 14], [15, FILLER]],
        [[16, 17], [FILLER, FILLER]],
        [[18, 19], [FILLER, FILLER]],
    ]


def test_ranks_of_one_model_replica_get_the_same_samples():
    """tp 2 x dp 2 x pp 2: ranks 0, 1, 4, 5 are data-parallel rank 0."""
    dealt = [deal([7, 8, 9], mesh(rank, tp=2, dp=2, pp=2), 4) for rank in range(8)]
    first, second = [[7, 8, FILLER, FILLER]], [[9, FILLER, FILLER, FILLER]]
    assert dealt == [first, first, second, second, first, first, second, second]


def test_nothing_to_deal():
    assert deal([], mesh(dp=1), 2) == []
    assert deal([5], mesh(1, dp=2), 2) == [[FILLER, FILLER]]


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))
def test_deal_loses_nothing_and_all_ranks_run_the_same_forwards(num_samples, dp, micro_batch_samples):
    dealt = [deal(range(num_samples), mesh(rank, dp=dp), micro_batch_samples) for rank in range(dp)]
    assert len({len(batches) for batches in dealt}) == 1
    rows = [row for batches in dealt for batch in batches for row in batch]
    assert [row for row in rows if row != FILLER] == list(range(num_samples))
    assert {len(batch) for batches in dealt for batch in batches} <= {micro_batch_samples}


@pytest.mark.parametrize("longest, tp, expected", [(5, 1, 5), (5, 4, 8), (8, 4, 8), (1, 2, 2)])
def test_grid_length_is_a_multiple_of_tp(longest, tp, expected):
    assert grid_length(longest, mesh(tp=tp)) == expected


def test_lay_out_places_rows_and_fills_the_rest():
    rows = [(0, torch.tensor([1, 2])), None, (2, torch.tensor([3.7, 4.2])), (4, torch.tensor([]))]
    grid_BS = lay_out(rows, 4, torch.float32, CPU, fill=-1)
    expected_BS = torch.tensor([[1, 2, -1, -1], [-1, -1, -1, -1], [-1, -1, 3.7, 4.2], [-1, -1, -1, -1]])
    assert torch.equal(grid_BS, expected_BS)
    assert lay_out(rows[:1], 3, torch.int64, CPU).tolist() == [[1, 2, 0]]


def test_response_mask_stands_one_before_the_response():
    """Prompt of 2, response of 3: tokens 2, 3, 4 are predicted at positions 1, 2, 3."""
    mask_BS = response_mask([(2, 3), None, (1, 1), (4, 2), (3, 0)], 6, CPU)
    assert mask_BS.int().tolist() == [
        [0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("span, words", [((0, 2), "empty prompt"), ((3, 4), "3 [+] 4 tokens on a grid of 6")])
def test_a_span_that_the_grid_cannot_hold_is_our_mistake(span, words):
    with pytest.raises(AssertionError, match=words):
        response_mask([span], 6, CPU)
