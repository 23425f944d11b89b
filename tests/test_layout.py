"""Rank arithmetic by literals and by invariants.

Not covered: that Megatron-Core's own `RankGenerator` agrees, and expert parallelism, which has no axis here.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.layout import AXES, Coordinates, MeshLayout, split_chunks, split_evenly
from tests.refuses import refuses

CUBE = MeshLayout(tp=2, dp=2, pp=2)


@st.composite
def layouts(draw):
    """Of up to four along each axis, with an order of one, two or all blocks, or none."""
    sizes = {axis: draw(st.integers(1, 4)) for axis in AXES}
    world = MeshLayout(**sizes).world_size
    block = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return MeshLayout(**sizes, order=draw(st.none() | st.permutations(range(block)).map(tuple)))


@pytest.mark.parametrize(
    "axes, expected",
    [
        (["tp"], [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (["dp"], [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (["pp"], [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (["cp"], [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
        ([], [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
        (["tp", "pp"], [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (["tp", "dp"], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (["pp", "dp"], [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (["tp", "cp", "dp", "pp"], [(0, 1, 2, 3, 4, 5, 6, 7)]),
    ],
)
def test_groups_of_two_cubed(axes, expected):
    """Ranks count tp first, then dp, then pp: rank = tp + 2 dp + 4 pp."""
    assert CUBE.groups(axes) == expected


def test_an_order_permutes_each_block_alike():
    """Positions 0 1 2 3 are ranks 0 2 1 3, positions 4 5 6 7 ranks 4 6 5 7: groups list them by position."""
    layout = MeshLayout(tp=2, dp=2, pp=2, order=(0, 2, 1, 3))
    assert layout.groups(["tp"]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups(["dp"]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups(["pp"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups(["tp", "pp"]) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert layout.rank_at(tp=1, pp=1) == 6
    assert layout.coordinates(6) == Coordinates(tp=1, cp=0, dp=0, pp=1)
    assert MeshLayout(tp=4, order=(2, 0, 3, 1)).groups(["tp"]) == [(2, 0, 3, 1)]


@pytest.mark.parametrize("order", [(), (0, 0), (1, 2), (0, 1, 2), (-1, 0)])
def test_an_order_that_is_no_permutation_of_a_block_is_refused(order):
    with refuses(f"order = {order}", "8 ranks", "engine_order"):
        MeshLayout(tp=2, dp=2, pp=2, order=order)


def test_context_parallel_stands_between_tensor_and_data_parallel():
    layout = MeshLayout(tp=2, cp=2, dp=2)
    assert layout.groups(["cp"]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups(["dp"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups(["dp", "cp"]) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_coordinates_by_hand():
    layout = MeshLayout(tp=2, cp=3, dp=5, pp=7)
    assert layout.world_size == 210
    assert layout.coordinates(0) == Coordinates(tp=0, cp=0, dp=0, pp=0)
    assert layout.coordinates(209) == Coordinates(tp=1, cp=2, dp=4, pp=6)
    assert layout.coordinates(1 + 2 * (2 + 3 * (4 + 5 * 3))) == Coordinates(tp=1, cp=2, dp=4, pp=3)
    assert layout.rank_at(pp=1) == 30
    assert [layout.size(axis) for axis in AXES] == [2, 3, 5, 7]


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_refused(rank):
    with refuses(f"rank {rank}", "[0, 8)"):
        CUBE.coordinates(rank)


def test_an_axis_that_does_not_exist_is_our_mistake():
    with pytest.raises(AssertionError, match="vpp"):
        CUBE.groups(["vpp"])


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_rank_at_inverts_coordinates(layout):
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank_at(tp=c.tp, cp=c.cp, dp=c.dp, pp=c.pp) for c in at] == list(range(layout.world_size))


@settings(max_examples=50, deadline=None)
@given(layouts(), st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world_and_differ_on_their_axes_only(layout, axes):
    """Every rank is in one group; a group is as large as its axes' product, and equal elsewhere."""
    groups = layout.groups(sorted(axes))
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.world_size))
    expected = 1
    for axis in axes:
        expected *= layout.size(axis)
    for ranks in groups:
        assert len(ranks) == expected
        at = [layout.coordinates(rank) for rank in ranks]
        assert at == sorted(at, key=lambda c: (c.pp, c.dp, c.cp, c.tp)), "a place in the group is the coordinate"
        assert layout.order or list(ranks) == sorted(ranks)
        fixed = {tuple(getattr(layout.coordinates(rank), axis) for axis in AXES if axis not in axes) for rank in ranks}
        assert len(fixed) == 1


def test_layers_of_even_and_uneven_stages():
    assert split_chunks(8, 4) == [[range(2)], [range(2, 4)], [range(4, 6)], [range(6, 8)]]
    assert split_chunks(5, 1) == [[range(5)]]
    assert split_chunks(7, 3, 1, (3, 3, 1)) == [[range(3)], [range(3, 6)], [range(6, 7)]]


def test_virtual_stages_go_round_the_ranks():
    """Rank p has stages p, p + pp, and so on, whatever their sizes, which are in the order of the model."""
    assert split_chunks(8, 2, 2) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    assert split_chunks(6, 2, 3) == [[range(1), range(2, 3), range(4, 5)], [range(1, 2), range(3, 4), range(5, 6)]]
    assert split_chunks(7, 2, 2, (1, 2, 3, 1)) == [[range(1), range(3, 6)], [range(1, 3), range(6, 7)]]


@pytest.mark.parametrize(
    "arguments, names",
    [
        ((7, 2), ["7 layers", "pp = 2", "layers_per_stage", "add up to 7"]),
        ((2, 4), ["2 layers", "pp = 4"]),
        ((7, 2, 1, (3, 3)), ["[3, 3]", "7 layers", "add up to 6"]),
        ((7, 2, 1, (3, 3, 1)), ["[3, 3, 1]", "pp = 2"]),
        ((7, 2, 1, (7, 0)), ["[7, 0]", "positive"]),
        ((6, 2, 2), ["6 layers", "pp x vpp = 2 x 2 = 4", "4 numbers that add up to 6"]),
        ((6, 2, 2, (3, 3)), ["[3, 3]", "4 positive numbers", "2 x 2"]),
        ((6, 1, 2), ["vpp = 2 needs pp > 1", "got pp = 1"]),
    ],
)
def test_layers_that_do_not_fit_say_the_numbers_and_a_way_out(arguments, names):
    with refuses(*names):
        split_chunks(*arguments)


def test_split_evenly_by_hand():
    assert split_evenly(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    assert split_evenly(2, 3) == [range(1), range(1, 2), range(2, 2)]
    assert split_evenly(0, 2) == [range(0), range(0)]


@given(st.integers(0, 200), st.integers(1, 20))
def test_split_evenly_covers_in_order_with_lengths_at_most_one_apart(count, parts):
    pieces = split_evenly(count, parts)
    assert [n for piece in pieces for n in piece] == list(range(count))
    assert len(pieces) == parts
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
