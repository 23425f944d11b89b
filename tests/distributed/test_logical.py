"""What the invariance matrix compares is whole: nothing missing, nothing counted twice, no replica with other bits."""

import numpy as np
import pytest

from megarlhf.placement import Box, Placement, RankPlacements
from tests.distributed.logical import Held, gradients_of, weights_of
from tests.refuses import refuses

ROWS_A, ROWS_B = [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]
NONE = [np.nan] * 4


def held(rank: int, values: list[float], *, row: int, first: bool) -> Held:
    """One row of a tensor of two rows and four columns."""
    at = Placement("weight", Box((row, 0), (row + 1, 4)), "storage", 0, (4, 1))
    placements = RankPlacements(rank, {"storage": (4,)}, (at,), {"weight": (2, 4)})
    return Held(placements, {"storage": np.array(values, np.float32)}, (first, first))


def four_ranks(*values: list[float]) -> list[Held]:
    """TP2 x DP2: ranks 0 and 1 have the rows, ranks 2 and 3 have them again."""
    return [held(rank, of, row=rank % 2, first=rank < 2) for rank, of in enumerate(values)]


def test_parts_of_a_gradient_make_a_whole() -> None:
    """Of each row one data-parallel rank has the first half of the sums, the other has the second."""
    ranks = four_ranks([0, 1, *NONE[:2]], [4, *NONE[:3]], [*NONE[:2], 2, 3], [NONE[0], 5, 6, 7])
    np.testing.assert_array_equal(gradients_of(ranks)["weight"], [ROWS_A, ROWS_B])


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ((ROWS_A, [4, *NONE[:3]], NONE, [*NONE[:2], 6, 7]), ["weight", "1 of 8 elements", "missing"]),
        ((ROWS_A, ROWS_B, NONE, [*NONE[:3], 7]), ["weight", "1 of 8 elements", "too often"]),
        ((ROWS_A, ROWS_B, [9, *NONE[:3]], NONE), ["weight", "1 elements of rank 2", "other bits"]),
    ],
    ids=["missing", "twice", "other bits"],
)
def test_a_gradient_that_is_not_whole_is_refused(values, what) -> None:
    with refuses(*what, error=AssertionError):
        gradients_of(four_ranks(*values))


def test_replicas_of_weights_agree_and_cover_all() -> None:
    whole = weights_of(four_ranks(ROWS_A, ROWS_B, ROWS_A, ROWS_B))
    np.testing.assert_array_equal(whole["weight"], [ROWS_A, ROWS_B])
    with refuses("rank 3", "other bits", error=AssertionError):
        weights_of(four_ranks(ROWS_A, ROWS_B, ROWS_A, [*ROWS_B[:3], 7.000001]))
    with refuses("4 of 8 elements", "nobody's", error=AssertionError):
        weights_of(four_ranks(ROWS_A, ROWS_B, ROWS_A, ROWS_B)[::2])
