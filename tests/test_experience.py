"""Ragged columns, and their way from the ranks that own rows to those that read them.

Not covered: columns on a GPU, and what a process that dies in `redistribute` does to the others.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megarlhf.columns import ColumnSharding, Ragged, Traffic, redistribute
from megarlhf.experience import Experience
from megarlhf.layout import MeshLayout
from megarlhf.parallel.mesh import Mesh
from megarlhf.rollouts import Rollouts, Stretches, VersionRuns
from tests.ranks import RankPool
from tests.refuses import refuses
from tests.tables import make_rollouts, ragged

ROWS = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([]), torch.tensor([4.0])]


def test_rows_end_to_end_with_an_empty_row():
    table = Ragged.from_rows(ROWS, torch.float32)
    assert table.lengths_N.tolist() == [3, 0, 1]
    assert table.num_tokens == 4
    assert table.values_T.tolist() == [1, 2, 3, 4]
    assert [row.tolist() for row in table.rows()] == [[1, 2, 3], [], [4]]
    assert table.cu_seqlens.tolist() == [0, 3, 3, 4]
    assert table.cu_seqlens.dtype == torch.int64


def test_ragged_keeps_the_dtype_asked_for():
    assert ragged([1, 2], [3], dtype=torch.int64).values_T.dtype == torch.int64


def test_one_number_a_row_spread_over_its_tokens():
    table = Ragged.from_rows(ROWS, torch.float32)
    spread = table.repeat_per_token(torch.tensor([2.0, 7.0, -3.0]))
    assert spread.values_T.tolist() == [2, 2, 2, -3]
    assert spread.lengths_N.tolist() == [3, 0, 1]
    assert ragged([1.0, 1.0], [1.0]).repeat_per_token(torch.tensor([2.0, -3.0])).values_T.tolist() == [2, 2, -3]


@pytest.mark.parametrize("rows", [[], [torch.tensor([]), torch.tensor([])]], ids=["no rows", "empty rows"])
def test_a_table_without_tokens(rows):
    table = Ragged.from_rows(rows, torch.float32)
    assert table.num_tokens == 0
    assert table.cu_seqlens.tolist() == [0] * (len(rows) + 1)
    assert table.repeat_per_token(torch.ones(len(rows))).values_T.shape == (0,)
    assert [len(row) for row in table.rows()] == [0] * len(rows)


def test_experience_counts_and_grows_without_change_of_the_old():
    rollouts = make_rollouts(
        responses=ragged([5, 6], [7], dtype=torch.int64),
        logprobs=ragged([-1.0, -2.0], [-3.0]),
        finished_N=torch.tensor([True, False]),
        version=0,
    )
    prompts = (torch.tensor([1]), torch.tensor([1, 2, 3]))
    before = Experience(prompts=prompts, groups_N=torch.tensor([0, 1]), rollouts=rollouts)
    assert (before.num_samples, before.prompt_lengths_N.tolist()) == (2, [1, 3])
    assert [row.tolist() for row in before.sequences.rows()] == [[1, 5, 6], [1, 2, 3, 7]]
    after = before.with_columns({"values": ragged([0.1, 0.2], [0.3])}).with_per_sample({"rewards": torch.zeros(2)})
    assert (list(before.columns), list(before.per_sample)) == ([], [])
    assert (list(after.columns), list(after.per_sample)) == (["values"], ["rewards"])


def two_turns():
    """A sample that wrote 5 6, was answered 90 91 92 and wrote 7, beside one that wrote 8 alone. Version 3 drew the
    first sample's first two tokens, version 4 the rest."""
    sampled = ragged([5, 6, 7], [8], dtype=torch.int64)
    rollouts = Rollouts(
        responses=sampled,
        logprobs=ragged([-1.0, -2.0, -3.0], [-4.0]),
        finished_N=torch.tensor([True, False]),
        versions=VersionRuns(ragged([3, 4], [4], dtype=torch.int64), ragged([2, 1], [1], dtype=torch.int64)),
        stretches=Stretches(ragged([2, 3, 1], [1], dtype=torch.int64), ragged([90, 91, 92], [], dtype=torch.int64)),
    )
    return Experience((torch.tensor([1, 2]), torch.tensor([3])), torch.tensor([0, 1]), rollouts)


def rows(table):
    return [row.tolist() for row in table.rows()]


def test_columns_are_of_sampled_tokens_and_sequences_of_all():
    """Positions are in the sequence: behind a prompt of two tokens the stretches begin at 2 and 7 - 0 = 2 + 2 + 3."""
    table = two_turns()
    assert rows(table.sequences) == [[1, 2, 5, 6, 90, 91, 92, 7], [3, 8]]
    assert table.response_lengths_N.tolist() == [3, 1]
    starts, lengths = table.sampled_stretches
    assert (starts.tolist(), rows(lengths)) == ([2, 7, 1], [[2, 1], [1]])
    single = replace(table, rollouts=replace(table.rollouts, stretches=None))
    assert rows(single.sequences) == [[1, 2, 5, 6, 7], [3, 8]]
    starts, lengths = single.sampled_stretches
    assert (starts.tolist(), rows(lengths)) == ([2, 1], [[3], [1]])


def test_chosen_samples_keep_their_stretches_and_versions():
    table = two_turns()
    joined = Rollouts.joined([(table.rollouts, [1]), (table.rollouts, [0, 1])])
    assert rows(joined.written) == [[8], [5, 6, 90, 91, 92, 7], [8]]
    assert rows(joined.versions.per_token()) == [[4], [3, 3, 4], [4]]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"logprobs": ragged([-1.0, -2.0], [-4.0])}, "log-probs of other lengths"),
        ({"versions": VersionRuns.constant(4, torch.tensor([2, 2]))}, "versions of other lengths"),
        ({"stretches": Stretches(ragged([2, 3, 2], [1], dtype=torch.int64), ragged([], []))}, "sampled stretches of"),
        ({"finished_N": torch.tensor([True])}, "finished_N is of another number"),
    ],
    ids=["logprobs", "versions", "stretches", "finished"],
)
def test_columns_of_other_lengths_than_the_sampled_tokens_are_refused(changed, words):
    with pytest.raises(AssertionError, match=words):
        replace(two_turns().rollouts, **changed)


def test_the_last_turn_is_read_as_the_response():
    table = two_turns()
    counts = [int(row[-1]) for row in table.rollouts.stretches.lengths.rows()]
    for turn, row, count in zip(table.rollouts.last_turns, table.rollouts.responses.rows(), counts, strict=True):
        assert torch.equal(turn, row[len(row) - count :])
    single = replace(table.rollouts, stretches=None)
    assert all(map(torch.equal, single.last_turns, single.responses.rows()))


def test_a_token_of_another_version_than_promised_is_refused():
    runs = two_turns().rollouts.versions
    VersionRuns.constant(4, torch.tensor([2, 0])).require(4)
    again = VersionRuns.from_rows([((3, 2), (4, 1)), ((4, 1),)])
    assert (rows(again.versions), rows(again.lengths)) == (rows(runs.versions), rows(runs.lengths))
    VersionRuns.from_rows([]).require(4)
    with refuses("version 3, expected version 4", error=RuntimeError):
        runs.require(4)


def test_a_table_comes_back_from_a_resume_point_also_from_one_of_before():
    table = two_turns().with_columns({"values": ragged([0.1, 0.2, 0.3], [0.4])})
    state = table.state_dict()
    back = Experience.from_state_dict(state)
    assert rows(back.sequences) == rows(table.sequences)
    assert rows(back.rollouts.versions.per_token()) == [[3, 3, 4], [4]]
    assert torch.equal(back.columns["values"].values_T, table.columns["values"].values_T)
    new = {"versions", "version_lengths", "stretches", "observed"}
    before = {name: value for name, value in state.items() if name not in new} | {"weight_version": 6}
    old = Experience.from_state_dict(before)
    assert rows(old.rollouts.versions.per_token()) == [[6, 6, 6], [6]]
    assert old.rollouts.stretches is None


LENGTHS = [2, 0, 3, 1]
OWNERS = [[3, 0], [2, 1]]
FAULTS = {
    "nobody's": ([{0: 2, 1: 0}, {2: 3}], [[0, 1], [2]]),
    "twice": ([{0: 2, 1: 0, 2: 3}, {2: 3, 3: 1}], [[0, 1, 2], [2, 3]]),
    "unknown": ([{0: 2, 1: 0, 4: 1}, {2: 3, 3: 1}], [[0, 1, 4], [2, 3]]),
    "missing": ([{0: 2, 1: 0}, {2: 3}], [[0, 1], [2, 3]]),
    "another's": ([{0: 2, 1: 0, 2: 3}, {2: 3, 3: 1}], [[0, 1], [2, 3]]),
    "wrong length": ([{0: 2, 1: 0}, {2: 4, 3: 1}], [[0, 1], [2, 3]]),
}
"""By name: lengths of the rows that each rank hands in, and the owners that are stated."""


def two_ranks(runtime):
    """Rank 0 owns rows 3 and 0, rank 1 rows 2 and 1; then each fault in turn, in the same world."""
    lengths_N = torch.tensor(LENGTHS)
    rows = {0: torch.tensor([0, 1]), 1: torch.tensor([]), 2: torch.tensor([20, 21, 22]), 3: torch.tensor([30])}
    owned = [{3: rows[3], 0: rows[0]}, {2: rows[2], 1: rows[1]}][runtime.rank]
    table = redistribute(owned, lengths_N, torch.empty(0, dtype=torch.float64), OWNERS)
    faults = {}
    for name, (lengths, owners) in FAULTS.items():
        rows = {n: torch.zeros(size) for n, size in lengths[runtime.rank].items()}
        try:
            redistribute(rows, lengths_N, torch.empty(0), owners)
        except ValueError as error:
            faults[name] = str(error)
        dist.barrier()
    return table.values_T.tolist(), str(table.values_T.dtype), table.lengths_N.tolist(), faults


def test_every_rank_receives_all_rows_and_every_rank_sees_a_fault(ranks: RankPool):
    """A fault that only one rank saw would leave the other in the next collective until its timeout."""
    first, second = ranks.run(2, two_ranks)
    assert first == second
    values, dtype, lengths, faults = first
    assert (values, dtype, lengths) == ([0, 1, 20, 21, 22, 30], "torch.float64", LENGTHS)
    assert faults == {
        "nobody's": "3 rows for 4 samples, expected each once; missing: [3]",
        "twice": "5 rows for 4 samples, expected each once; owned twice: [2]",
        "unknown": "5 rows for 4 samples, expected each once; unknown: [4]",
        "missing": "rank 1: 1 rows are given, expected 2; missing: [3], beside them: []",
        "another's": "rank 0: 3 rows are given, expected 2; missing: [], beside them: [2]",
        "wrong length": "rank 1: row 2 has 4 values, the index says 3",
    }


def three_ranks(runtime):
    """Rank 1 owns nothing."""
    owned = [{1: torch.tensor([0.1, 0.2])}, {}, {0: torch.tensor([0.3])}][runtime.rank]
    return redistribute(owned, torch.tensor([1, 2]), torch.empty(0), [[1], [], [0]]).values_T.tolist()


def test_a_rank_may_own_nothing(ranks: RankPool):
    results = ranks.run(3, three_ranks)
    assert results[0] == pytest.approx([0.3, 0.1, 0.2])
    assert results[0] == results[1] == results[2]


def test_rows_that_are_not_kept_are_empty():
    kept = ragged([1.0, 2.0], [3.0], [4.0, 5.0]).only(torch.tensor([True, False, True]))
    assert (kept.values_T.tolist(), kept.lengths_N.tolist()) == ([1, 2, 4, 5], [2, 0, 2])
    assert kept.repeat_per_token(torch.tensor([7.0, 8.0, 9.0])).values_T.tolist() == [7, 7, 9, 9]


HELD = [[True, False, False, False], [False, False, True, True], [True, True, False, True]]
"""By rank and row: rank 1 owns all rows of LENGTHS, and reads two of them."""


def spread(runtime):
    """A column from one rank to its readers, what each has of it, and what follows from all of it."""
    lengths_N, holding = torch.tensor(LENGTHS), ColumnSharding(torch.tensor(HELD), Traffic(3))
    rows = {n: 10.0 * n + torch.arange(length) for n, length in enumerate(LENGTHS)}
    owned = rows if runtime.rank == 1 else {}
    sent = []
    all_to_all = dist.all_to_all_single

    def counted(out, given, *sizes):
        sent.append((given.nbytes, out.nbytes))
        return all_to_all(out, given, *sizes)

    dist.all_to_all_single = counted
    try:
        column = redistribute(owned, lengths_N, torch.empty(0), [[], [2, 0, 3, 1], []], holding)
    finally:
        dist.all_to_all_single = all_to_all
    prompts, zeros = tuple(torch.ones(4, 1, dtype=torch.int64)), Ragged(torch.zeros(sum(LENGTHS)), lengths_N)
    rollouts = make_rollouts(zeros, zeros, torch.ones(4, dtype=torch.bool), version=0)
    table = Experience(prompts, torch.arange(4), rollouts, {"values": column}, holding=holding)
    numbers_N = table.gather_per_sample(torch.tensor([row.sum() if len(row) else 0.0 for row in column.rows()]))
    whole = table.replicated()
    return {
        "rows": [row.tolist() for row in column.rows()],
        "bytes": sent[0],
        "received": holding.traffic.received_W.tolist(),
        "sums": numbers_N.tolist(),
        "largest": table.largest_values(column.values_T, 3).tolist(),
        "whole": (whole.columns["values"].values_T.tolist(), whole.holding),
    }


def test_a_rank_receives_the_rows_that_it_reads_and_every_rank_what_follows_from_all(ranks: RankPool):
    """Rank 1 sends row 0 twice, and 3 once: 2 + 2 + 1 values of 4 bytes; row 1 is empty, and row 2 its own."""
    found = ranks.run(3, spread)
    assert [each["rows"] for each in found] == [
        [[0, 1], [], [], []],
        [[], [], [20, 21, 22], [30]],
        [[0, 1], [], [], [30]],
    ]
    assert [each["bytes"] for each in found] == [(0, 8), (20, 0), (0, 12)]
    for each in found:
        assert each["received"] == [8, 0, 12]
        assert each["sums"] == [1.0, 0.0, 63.0, 30.0]
        assert each["largest"] == [30.0, 22.0, 21.0]
        assert each["whole"] == ([0, 1, 20, 21, 22, 30], None)


def received(runtime):
    """Bytes that a rank receives of a column of 48 000, all of it on rank 0, where every rank reads all."""
    nbytes = []
    exchange, gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def exchanged(out, given, *sizes):
        nbytes.append(out.nbytes if runtime.rank else 0)
        return exchange(out, given, *sizes)

    def gathered(whole, part):
        nbytes.append(whole.nbytes - part.nbytes)
        return gather(whole, part)

    dist.all_to_all_single, dist.all_gather_into_tensor = exchanged, gathered
    try:
        rows = {0: torch.arange(12_000.0)} if runtime.rank == 0 else {}
        column = redistribute(rows, torch.tensor([12_000]), torch.empty(0), [[0], *[[]] * (dist.get_world_size() - 1)])
    finally:
        dist.all_to_all_single, dist.all_gather_into_tensor = exchange, gather
    assert torch.equal(column.values_T, torch.arange(12_000.0))
    return sum(nbytes)


def test_where_all_read_all_a_rank_receives_the_column_once(ranks: RankPool):
    """A quarter that it was sent, and the other three; not four times the largest share, as padded shares would be."""
    assert ranks.run(4, received) == [36_000, 48_000, 48_000, 48_000]


def test_of_512_ranks_those_receive_a_column_that_train_on_it():
    """TP8 PP8 DP8, 1024 samples of 8301 tokens: a column of 34 MB. The 8 ranks of each last stage read the eighth that
    they train on, which the first of them owns where it is of the same layout. All of it together is seven times the
    column, and no rank receives more than an eighth of it. Gathered as padded shares, every rank received 511 shares of
    an eighth: 2.2 GB."""
    layout, size = MeshLayout(tp=8, pp=8, dp=8), 8301
    lengths_N, resident_WN = torch.full((1024,), size), torch.zeros(512, 1024, dtype=torch.bool)
    owners = [[] for _ in range(512)]
    for dp in range(8):
        samples = list(range(128 * dp, 128 * (dp + 1)))
        ranks = Mesh(layout, None, None, None).last_stage(dp)
        resident_WN[torch.tensor(ranks)[:, None], torch.tensor(samples)] = True
        owners[ranks[0]] = samples
    holding, column = ColumnSharding(resident_WN, Traffic(512)), 1024 * size * 4
    received_W = holding.incoming_bytes(lengths_N, owners, 4)
    assert column == pytest.approx(34e6, rel=0.01)
    assert int(received_W.sum()) == 7 * column
    assert received_W.unique().tolist() == [0, column // 8]
    assert int((received_W > 0).sum()) == 56
    # Owned by a reward model's or a reference's ranks.
    assert int(holding.incoming_bytes(lengths_N, [range(1024), *[[]] * 511], 4).sum()) == 8 * column


def test_every_sample_is_with_some_rank():
    with pytest.raises(AssertionError, match="columns are on no rank"):
        ColumnSharding(torch.tensor([[True, False], [True, False]]), Traffic(2))
