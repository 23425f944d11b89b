"""Dealing samples to ranks, and where their sequences and columns stand, by literals.

Not covered: meshes of real process groups (only layout and coordinates are read), and grids on a GPU; how well packed
micro-batches are balanced (test_packing.py).
"""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.config import MicroBatchConfig
from megarlhf.layout import MeshLayout
from megarlhf.parallel.batching import FILLER, Batching, owners_of_outputs, padded_length, split_padded
from megarlhf.parallel.mesh import Mesh
from megarlhf.parallel.micro_batch import (
    FILLER_LENGTH,
    MicroBatchLayout,
    TokenSpans,
    gather_from_micro_batch,
    micro_batch_mask,
    prompts_computed,
    repeat_on_micro_batch,
    scatter_to_micro_batch,
)
from megarlhf.parallel.packing.partition import ForwardCost
from megarlhf.parallel.packing.rows import ROOT
from tests.refuses import refuses
from tests.tables import ragged

CPU = torch.device("cpu")


def mesh(rank=0, **sizes):
    layout = MeshLayout(**sizes)
    runtime = SimpleNamespace(rank=rank, world_size=layout.world_size)
    return Mesh(layout=layout, position=layout.coordinates(rank), groups=None, runtime=runtime)


def test_deal_fills_short_shares_up():
    """Ten samples on four ranks are 3, 3, 2, 2; micro-batches of two make two of them everywhere."""
    samples = list(range(10, 20))
    assert split_padded(samples, 4, 2) == [
        [[10, 11], [12, FILLER]], [[13, 14], [15, FILLER]], [[16, 17], [FILLER, FILLER]], [[18, 19], [FILLER, FILLER]],
    ]  # fmt: skip


def test_ranks_of_one_model_replica_get_the_same_samples():
    """tp 2 x dp 2 x pp 2: ranks 0, 1, 4, 5 are data-parallel rank 0; ranks 4 and 6 hand its outputs out."""
    lengths = torch.tensor([1, 1, 1])
    each = [batching(rank, samples=4, tp=2, dp=2, pp=2) for rank in range(8)]
    layouts = [one.layouts([(n,) for n in range(3)], lengths) for one in each]
    assert [[layout.sequences for layout in of_rank] for of_rank in layouts] == [
        [(0, 1) if rank in (0, 1, 4, 5) else (2,)] for rank in range(8)
    ]
    by_rank = each[0].layouts_by_rank([(n,) for n in range(3)], lengths)
    assert owners_of_outputs(each[0].mesh, by_rank) == [[], [], [], [], [0, 1], [], [2], []]


def test_nothing_to_deal():
    assert split_padded([], 1, 2) == [[]]
    assert split_padded([5], 2, 2) == [[[5, FILLER]], [[FILLER, FILLER]]]


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))
def test_deal_loses_nothing_and_all_ranks_run_the_same_forwards(num_samples, dp, micro_batch_samples):
    shares = split_padded(range(num_samples), dp, micro_batch_samples)
    assert len({len(batches) for batches in shares}) == 1
    rows = [row for batches in shares for batch in batches for row in batch]
    assert [row for row in rows if row != FILLER] == list(range(num_samples))
    assert {len(batch) for batches in shares for batch in batches} <= {micro_batch_samples}


@pytest.mark.parametrize("longest, tp, expected", [(5, 1, 5), (5, 4, 8), (8, 4, 8), (1, 2, 2)])
def test_grid_length_is_a_multiple_of_tp(longest, tp, expected):
    assert padded_length(longest, mesh(tp=tp)) == expected


def batching(rank=0, *, samples=None, tokens=None, **sizes):
    micro = MicroBatchConfig(micro_batch_samples=samples, max_tokens_per_micro_batch=tokens)
    return Batching(mesh=mesh(rank, **sizes), cost=ForwardCost(1.0, 0.0), micro=micro)


PADDED = MicroBatchLayout(sequences=(2, 0), lengths=(3, 2), starts=(0, 4), rows=3, columns=4, packed=False)
PACKED = MicroBatchLayout(sequences=(2, 0), lengths=(3, 2), starts=(0, 3), rows=1, columns=6, packed=True)
LENGTHS = torch.tensor([2, 9, 3])


def test_padded_sheets_by_hand():
    """Three sequences on two ranks, two to a micro-batch: rows as long as the longest of the step, a filler row."""
    groups, lengths = [(2,), (0,), (1,)], torch.tensor([2, 4, 3])
    first, second = (batching(rank, samples=2, dp=2).layouts(groups, lengths) for rank in (0, 1))
    assert first == [MicroBatchLayout((2, 0), (3, 2), (0, 4), rows=2, columns=4, packed=False)]
    assert second == [MicroBatchLayout((1,), (4,), (0,), rows=2, columns=4, packed=False)]
    assert first[0].packed_row(CPU) is None


def test_packed_sheets_by_hand():
    """Six tokens fit: 4 + 2 and 3 + 3. Longest first, no padding; on tp 4 rows are filled up to a multiple of four."""
    groups, lengths = [(0,), (1,), (2,), (3,)], torch.tensor([2, 3, 4, 3])
    assert batching(tokens=6).layouts(groups, lengths) == [
        MicroBatchLayout((2, 0), (4, 2), (0, 4), rows=1, columns=6, packed=True),
        MicroBatchLayout((1, 3), (3, 3), (0, 3), rows=1, columns=6, packed=True),
    ]
    (layout, _) = batching(tokens=6, tp=4).layouts(groups, lengths)
    assert (layout.lengths, layout.columns, layout.packed_row(CPU).lengths) == ((4, 2), 8, (4, 2, 2))


def test_groups_stay_together_and_in_order():
    """Pairs: a chosen and a rejected sequence each."""
    groups, lengths = [(0, 1), (2, 3)], torch.tensor([1, 5, 4, 3])
    assert [layout.sequences for layout in batching(tokens=7).layouts(groups, lengths)] == [(2, 3), (0, 1)]
    assert [layout.sequences for layout in batching(tokens=13).layouts(groups, lengths)] == [(2, 3, 0, 1)]
    assert [layout.sequences for layout in batching(samples=2).layouts(groups, lengths)] == [(0, 1, 2, 3)]
    with refuses("7 tokens", "6", "max_tokens_per_micro_batch"):
        batching(tokens=6).layouts(groups, lengths)


def test_a_rank_without_a_sequence_has_a_row_all_the_same():
    """One sequence on two ranks: the other runs as many forwards, over fillers, and owns nothing."""
    layouts = [batching(rank, tokens=9, tp=2, dp=2).layouts([(0,)], torch.tensor([5])) for rank in range(4)]
    assert layouts[0] == layouts[1] == [MicroBatchLayout((0,), (5,), (0,), rows=1, columns=6, packed=True)]
    assert layouts[2] == layouts[3] == [MicroBatchLayout((), (), (), rows=1, columns=2, packed=True)]
    (empty,) = layouts[2]
    assert empty.packed_row(CPU).lengths == (2,)
    assert empty.ends_K.tolist() == []
    spans = TokenSpans.whole(torch.tensor([5]))
    assert scatter_to_micro_batch(empty, ragged([1, 2, 3, 4, 5]), spans).tolist() == [[0, 0]]
    assert micro_batch_mask(empty, spans, CPU).tolist() == [[False, False]]
    assert gather_from_micro_batch(empty, torch.zeros(1, 2), spans) == {}
    assert batching(tokens=9, dp=2).layouts([], torch.tensor([5])) == []


def test_what_is_left_of_a_row_is_filled_with_short_sequences():
    layout = MicroBatchLayout((0,), (7,), (0,), rows=1, columns=3 * FILLER_LENGTH, packed=True)
    assert layout.packed_row(CPU).lengths == (7, FILLER_LENGTH, FILLER_LENGTH, FILLER_LENGTH - 7)


def test_positions_restart_at_every_border():
    row = PACKED.packed_row(CPU)
    assert row.positions_T.tolist() == [0, 1, 2, 0, 1, 0]
    assert row.cu_seqlens_q.tolist() == [0, 3, 5, 6]
    assert row.cu_seqlens_q.dtype == torch.int32
    assert row.max_seqlen_q == 3


@pytest.mark.parametrize("layout", [PADDED, PACKED])
def test_columns_stand_at_their_tokens(layout):
    """Sequence 2 is a prompt of one token and a response of two, sequence 0 one of each."""
    spans = TokenSpans.responses(torch.tensor([1, 5, 1]), torch.tensor([1, 4, 2]))
    tokens = scatter_to_micro_batch(
        layout, ragged([7, 8], range(9), [4, 5, 6], dtype=torch.int64), TokenSpans.whole(LENGTHS)
    )
    values = scatter_to_micro_batch(layout, ragged([0.5], [9, 9, 9, 9], [1.5, 2.5]), spans, fill=-1)
    lengths = repeat_on_micro_batch(layout, torch.tensor([1, 4, 2]), spans, CPU)
    if layout.packed:
        assert tokens.tolist() == [[4, 5, 6, 7, 8, 0]]
        assert values.tolist() == [[-1, 1.5, 2.5, -1, 0.5, -1]]
        assert micro_batch_mask(layout, spans, CPU).int().tolist() == [[0, 1, 1, 0, 1, 0]]
        assert lengths.tolist() == [[0, 2, 2, 0, 1, 0]]
        assert layout.ends_K.tolist() == [2, 4]
    else:
        assert tokens.tolist() == [[4, 5, 6, 0], [7, 8, 0, 0], [0, 0, 0, 0]]
        assert values.tolist() == [[-1, 1.5, 2.5, -1], [-1, 0.5, -1, -1], [-1, -1, -1, -1]]
        assert micro_batch_mask(layout, spans, CPU).int().tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
        assert lengths.tolist() == [[0, 2, 2, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
        assert layout.ends_K.tolist() == [2, 5]
    row_of = gather_from_micro_batch(layout, values, spans)
    assert {n: row.tolist() for n, row in row_of.items()} == {2: [1.5, 2.5], 0: [0.5]}


def test_a_response_of_no_tokens_takes_no_place():
    spans = TokenSpans.responses(torch.tensor([2, 5, 1]), torch.tensor([0, 4, 2]))
    assert micro_batch_mask(PACKED, spans, CPU).int().tolist() == [[0, 1, 1, 0, 0, 0]]
    row_of = gather_from_micro_batch(PACKED, torch.arange(6.0)[None], spans)
    assert {n: row.tolist() for n, row in row_of.items()} == {2: [1, 2], 0: []}


def test_an_empty_prompt_and_rows_of_another_length_are_our_mistakes():
    with refuses("span 1", error=AssertionError):
        TokenSpans.responses(torch.tensor([1, 0]), torch.tensor([2, 2]))
    with refuses("differ in length", error=AssertionError):
        scatter_to_micro_batch(PACKED, ragged([7, 8], range(9), [4, 5]), TokenSpans.whole(LENGTHS))


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 3), st.sampled_from([1, 2]), st.booleans())
def test_what_is_laid_out_is_picked_up_again(lengths, dp, tp, packed):
    """On all ranks together every sequence once, whatever the dealing; columns are a multiple of tp."""
    micro = {"tokens": 15} if packed else {"samples": 2}
    table = ragged(*(torch.rand(length).tolist() for length in lengths))
    spans = TokenSpans.whole(table.lengths_N)
    row_of = {}
    counts = set()
    for rank in range(0, dp * tp, tp):
        layouts = batching(rank, tp=tp, dp=dp, **micro).layouts([(n,) for n in range(len(lengths))], table.lengths_N)
        counts.add(len(layouts))
        for layout in layouts:
            assert layout.columns % tp == 0
            assert not packed or sum(layout.lengths) <= 15
            picked = gather_from_micro_batch(layout, scatter_to_micro_batch(layout, table, spans), spans)
            assert not picked.keys() & row_of.keys()
            row_of |= picked
    assert len(counts) == 1
    assert all(torch.equal(row_of[n], row) for n, row in enumerate(table.rows()))
    assert row_of.keys() == set(range(len(lengths)))


def tree_layout(**changes):
    """Prompts of three and of two tokens; sequence 5 is its prompt and nothing more; sequence 3 stands alone."""
    given = {
        "sequences": (4, 2, 0, 3, 1, 5), "lengths": (5, 4, 3, 4, 4, 2), "starts": (9, 11, 0, 5, 12, 3), "rows": 1,
        "columns": 16, "packed": True, "segments": (3, 2, 4, 2, 1, 2), "parents": (ROOT, ROOT, ROOT, 0, 0, 1),
        "last_segments": (3, 4, 0, 2, 5, 1),
    }  # fmt: skip
    return MicroBatchLayout(**{**given, **changes})


def test_what_sequences_share_stands_once():
    layout, lengths = tree_layout(), torch.tensor([3, 4, 4, 4, 5, 2])
    assert layout.num_tokens == 14
    places = [each.tolist() for each in layout.tokens_R.split(layout.lengths)]
    assert places == [[0, 1, 2, 9, 10], [0, 1, 2, 11], [0, 1, 2], [5, 6, 7, 8], [3, 4, 12, 13], [3, 4]]
    assert layout.ends_K.tolist() == [10, 11, 2, 8, 13, 4]
    row = layout.packed_row(CPU)
    assert row.lengths == (3, 2, 4, 2, 1, 2, 2)
    assert row.parents == (ROOT, ROOT, ROOT, 0, 0, 1, ROOT)
    assert row.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 3, 4, 3, 2, 3, 0, 1]
    tokens = ragged([1, 2, 3], [4, 5, 6, 7], [1, 2, 3, 8], [9, 10, 11, 12], [1, 2, 3, 13, 14], [4, 5])
    grid = scatter_to_micro_batch(layout, tokens, TokenSpans.whole(lengths))
    assert grid.tolist() == [[1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14, 8, 6, 7, 0, 0]]
    responses = TokenSpans.responses(torch.tensor([3, 2, 3, 2, 3, 2]), torch.tensor([0, 2, 1, 2, 2, 0]))
    numbers = repeat_on_micro_batch(layout, torch.tensor([9, 1, 2, 3, 4, 9]), responses, CPU)
    assert numbers.tolist() == [[0] * 7 + [3, 3, 4, 4, 2, 1, 1, 0, 0]]
    picked = gather_from_micro_batch(layout, grid, responses)
    assert {n: row.tolist() for n, row in picked.items()} == {4: [13, 14], 2: [8], 0: [], 3: [11, 12], 1: [6, 7], 5: []}


def test_one_token_predicts_the_first_of_every_continuation():
    """And the second level's first token is predicted by the end of the first level's."""
    predictors = tree_layout().predictors_S
    assert predictors[[1, 2, 4, 6, 7, 8]].tolist() == [0, 1, 3, 5, 6, 7], "inside of segments the one to the left"
    assert predictors[[9, 11, 12]].tolist() == [2, 2, 4]
    deep = tree_layout(
        sequences=(0, 1), lengths=(5, 3), starts=(5, 3), segments=(1, 2, 2, 2), parents=(ROOT, 0, 0, 1), columns=8,
        last_segments=(3, 2),
    )  # fmt: skip
    assert [each.tolist() for each in deep.tokens_R.split(deep.lengths)] == [[0, 1, 2, 5, 6], [0, 3, 4]]
    assert deep.predictors_S[[1, 3, 5]].tolist() == [0, 0, 2]
    assert deep.packed_row(CPU).positions_T.tolist() == [0, 1, 2, 1, 2, 3, 4, 0]
    assert PACKED.predictors_S is None


def sharing(tokens, dp=1, rank=0, **sizes):
    micro = MicroBatchConfig(max_tokens_per_micro_batch=tokens)
    return Batching(mesh=mesh(rank, dp=dp, **sizes), cost=ForwardCost(1.0, 0.0), micro=micro, share=True)


def test_responses_to_a_prompt_share_it_where_they_meet():
    """Two responses of 2 and 3 tokens to a prompt of 4, an empty one, and a sample that is alone: 4 + 2 + 3 and 5."""
    groups, lengths = [(0, 1, 2), (3,)], torch.tensor([6, 7, 4, 5])
    (layout,) = sharing(14).layouts(groups, lengths, shared=[4, 2], divisible=True)
    assert (layout.num_tokens, sum(layout.lengths)) == (14, 22)
    assert sorted(layout.sequences) == [0, 1, 2, 3]
    assert sorted(layout.segments) == [2, 3, 4, 5]
    assert layout.parents.count(ROOT) == 2
    assert prompts_computed([[layout]]) == (2, 2)
    (apart,) = batching(tokens=22).layouts([(0,), (1,), (2,), (3,)], lengths)
    assert prompts_computed([[apart]]) == (4, 0)


def test_what_cannot_be_shared_is_laid_out_as_ever():
    """Groups of one, rows that are padded, context parallelism, sharing switched off, equal prompts of other groups."""
    lengths, alone = torch.tensor([6, 7, 6]), [(0,), (1,), (2,)]
    plain = batching(tokens=20).layouts(alone, lengths)
    assert sharing(20).layouts(alone, lengths, shared=[4, 4, 4], divisible=True) == plain
    assert batching(tokens=20).layouts(alone, lengths, shared=[4, 4, 4], divisible=True) == plain
    assert not any(layout.segments for layout in plain)
    padded = MicroBatchConfig(micro_batch_samples=2)
    assert not Batching(mesh=mesh(0), cost=ForwardCost(1.0, 0.0), micro=padded, share=True).shares
    assert not sharing(20, cp=2).shares
    assert sharing(20).shares


def test_a_prompt_with_one_response_that_exceeds_the_budget_is_refused_as_any_sequence():
    """The others would fit: nothing is dropped, and nothing is cut."""
    with refuses("13 tokens", "at most 12", "max_tokens_per_micro_batch"):
        sharing(12).layouts([(0, 1)], torch.tensor([13, 11]), shared=[10], divisible=True)
    with refuses("at most 12"):
        sharing(12).layouts([(0, 1)], torch.tensor([12, 11]), shared=[10])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=5)), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_trees_that_are_laid_out_are_picked_up_again(families, dp):
    """On all ranks together every sequence once; what is shared has the same place for each; predictors are the tokens
    before."""
    groups, shared, rows = [], [], []
    for number, (prompt, responses) in enumerate(families):
        groups.append(tuple(range(len(rows), len(rows) + len(responses))))
        shared.append(prompt)
        rows += [[100.0 * number + n for n in range(prompt)] + [torch.rand(()).item()] * r for r in responses]
    table = ragged(*rows)
    spans, found, computed = TokenSpans.whole(table.lengths_N), {}, 0
    for rank in range(dp):
        for layout in sharing(16, dp=dp, rank=rank).layouts(groups, table.lengths_N, shared=shared, divisible=True):
            assert layout.num_tokens <= 16
            computed += layout.num_tokens
            grid = scatter_to_micro_batch(layout, table, spans)
            picked = gather_from_micro_batch(layout, grid, spans)
            assert not picked.keys() & found.keys()
            found |= picked
            if layout.segments:
                for places in layout.tokens_R.split(layout.lengths):
                    assert torch.equal(layout.predictors_S[places[1:]], places[:-1])
                row = layout.packed_row(CPU)
                places, lengths = layout.tokens_R, torch.tensor(layout.lengths)
                assert torch.equal(row.positions_T[places], torch.cat([torch.arange(int(n)) for n in lengths]))
    assert {n: row.tolist() for n, row in found.items()} == {n: row.tolist() for n, row in enumerate(table.rows())}
    assert computed <= sum(map(len, rows))


def test_several_spans_of_a_sequence_reach_the_grid_and_come_back():
    """Random spans of random sequences against a loop, on padded rows, packed rows and a row with a shared beginning.
    The tree: two sequences share their first three tokens."""
    generator = random.Random(0)
    padded = MicroBatchLayout((2, 0), (6, 7), (0, 8), rows=2, columns=8, packed=False)
    packed = MicroBatchLayout((2, 0), (6, 7), (0, 6), rows=1, columns=16, packed=True)
    tree = MicroBatchLayout(
        (2, 0), (6, 7), (3, 6), rows=1, columns=16, packed=True,
        segments=(3, 3, 4), parents=(ROOT, 0, 0), last_segments=(1, 2),
    )  # fmt: skip
    places = {
        padded: {2: range(6), 0: range(8, 15)},
        packed: {2: range(6), 0: range(6, 13)},
        tree: {2: [0, 1, 2, 3, 4, 5], 0: [0, 1, 2, 6, 7, 8, 9]},
    }
    lengths = [7, 5, 6]
    for _ in range(50):
        chosen = [sorted(generator.sample(range(3, n), generator.randint(0, n - 3))) for n in lengths]
        spans = [_spans(positions) for positions in chosen]
        table = ragged(*([10.0 * n + p for p in positions] for n, positions in enumerate(chosen)))
        first = torch.tensor([start for own in spans for start, _ in own], dtype=torch.int64)
        counted = ragged(*([count for _, count in own] for own in spans), dtype=torch.int64)
        selection = TokenSpans(first, counted)
        for layout, of_sequence in places.items():
            grid = scatter_to_micro_batch(layout, table, selection, fill=-1.0)
            expected = [-1.0] * grid.numel()
            for n, where in of_sequence.items():
                for position in chosen[n]:
                    expected[where[position]] = 10.0 * n + position
            assert grid.flatten().tolist() == expected
            back = gather_from_micro_batch(layout, grid, selection)
            assert {n: row.tolist() for n, row in back.items()} == {n: table.rows()[n].tolist() for n in (2, 0)}


def _spans(positions):
    """[3, 4, 6] -> [(3, 2), (6, 1)]; a sequence without any has one empty span."""
    spans = []
    for position in positions:
        if spans and sum(spans[-1]) == position:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((position, 1))
    return spans or [(3, 0)]
