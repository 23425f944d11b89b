"""The order of batches: permutations, the same from any start, different by seed and epoch."""

from hypothesis import given
from hypothesis import strategies as st

from megarlhf.data.samples.order import MixedBatches, ShuffledBatches
from tests.refuses import refuses

SIZES = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(SIZES, st.integers(0, 3))
def test_each_epoch_is_a_permutation(sizes, seed):
    """Three epochs, whatever the batch size; nothing dropped or repeated at the borders."""
    num_samples, batch_size = sizes
    batches = ShuffledBatches(num_samples, batch_size, seed)
    drawn = [index for step in range(3 * num_samples) for index in batches.indices(step)]
    assert len(drawn) == 3 * num_samples * batch_size
    for start in range(0, 3 * num_samples, num_samples):
        epoch = drawn[start : start + num_samples]
        assert sorted(epoch) == list(range(num_samples))


@given(SIZES, st.integers(0, 3), st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_resume_needs_the_step_only(sizes, seed, steps):
    """A fresh object, asked in any order, agrees with one that went through all steps."""
    walked = ShuffledBatches(*sizes, seed)
    sequence = [walked.indices(step) for step in range(41)]
    assert [ShuffledBatches(*sizes, seed).indices(step) for step in steps] == [sequence[s] for s in steps]
    assert [walked.indices(step) for step in steps] == [sequence[s] for s in steps]


@given(SIZES, st.integers(1, 12), st.integers(0, 9), st.integers(0, 3))
def test_another_batch_size_goes_on_where_the_first_one_stopped(sizes, other, steps, seed):
    """No sample is left out and none comes twice in an epoch; with the same size the order is as if nothing was."""
    num_samples, size = sizes
    first, second = (ShuffledBatches(num_samples, n, seed) for n in (size, min(other, num_samples)))
    drawn = [n for step in range(steps) for n in first.take(step)]
    second.load_state_dict(first.state_dict())
    drawn += [n for step in range(steps, steps + 2 * num_samples) for n in second.indices(step)]
    for start in range(0, len(drawn) - num_samples, num_samples):
        assert sorted(drawn[start : start + num_samples]) == list(range(num_samples))
    again = ShuffledBatches(num_samples, size, seed)
    again.load_state_dict(first.state_dict())
    assert again.indices(steps) == first.indices(steps)
    assert again.state_dict() == first.state_dict()


def test_the_order_is_pinned():
    """Written out once: a change of it would break the resume of runs that are under way."""
    batches = ShuffledBatches(8, 3, seed=0)
    assert [batches.indices(step) for step in range(3)] == [[0, 2, 1], [4, 6, 7], [3, 5, 6]]


def test_seeds_and_epochs_differ():
    """Also epoch 1 of seed 0 from epoch 0 of seed 1."""
    orders = {tuple(ShuffledBatches(50, 50, seed).indices(epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_impossible_sizes():
    with refuses("train.x = 6", "5 samples", "data.train", "at most 5"):
        ShuffledBatches(5, 6, seed=0, key="train.x")
    with refuses("at least one"):
        ShuffledBatches(0, 0, seed=0)


def counts_of(indices, sizes):
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [sum(end - size <= index < end for index in indices) for size, end in zip(sizes, ends, strict=True)]


def test_each_set_gives_its_share_after_any_number_of_samples():
    """To within one, also of a small weight; in batches of one, whose order any other size has too."""
    sizes, weights = [50, 30, 7], [6.0, 3.0, 0.5]
    batches = MixedBatches(sizes, weights, 1, seed=3)
    drawn = [batches.indices(step)[0] for step in range(400)]
    for end in range(1, 401):
        for count, weight in zip(counts_of(drawn[:end], sizes), weights, strict=True):
            assert abs(count - end * weight / 9.5) <= 1.0
    for size in (3, 16):
        larger = MixedBatches(sizes, weights, size, seed=3)
        assert [index for step in range(20) for index in larger.indices(step)] == drawn[: 20 * size]
    begun = MixedBatches(sizes, weights, 1, seed=4).indices(0) + MixedBatches(sizes, weights, 9, 4).indices(0)
    assert begun != drawn[:10]


def test_a_set_that_is_exhausted_begins_again_in_another_order():
    """And the others do not: their passes are their own."""
    sizes = [40, 6]
    batches = MixedBatches(sizes, [1.0, 1.0], 4, seed=0)
    drawn = [index for step in range(12) for index in batches.indices(step)]
    small = [index for index in drawn if index >= 40]
    assert len(small) == 24
    passes = [small[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(each) == list(range(40, 46)) for each in passes)
    assert len({tuple(each) for each in passes}) > 1
    large = [index for index in drawn if index < 40]
    assert len(large) == len(set(large)) == 24, "not yet through"
    assert batches.passes(12) == [(24, 0.6), (24, 4.0)]


def test_a_mixture_goes_on_where_it_was_also_with_another_batch_size():
    sizes, weights = [50, 30], [2.0, 1.0]
    first = MixedBatches(sizes, weights, 6, seed=1)
    begun = [index for step in range(7) for index in first.take(step)]
    second = MixedBatches(sizes, weights, 10, seed=1)
    second.load_state_dict(first.state_dict())
    went_on = [index for step in range(7, 10) for index in second.indices(step)]
    one = MixedBatches(sizes, weights, 1, seed=1)
    assert begun + went_on == [one.indices(step)[0] for step in range(72)]
    assert second.indices(8) == went_on[10:20], "asked again"


def test_a_batch_that_would_hold_a_sample_of_a_set_twice_is_refused():
    with refuses("train.x = 8", "set 2", "data.train", "6 samples", "has 5"):
        MixedBatches([50, 5], [1.0, 3.0], 8, 0, "train.x")
    MixedBatches([50, 6], [1.0, 3.0], 8, 0, "train.x")
