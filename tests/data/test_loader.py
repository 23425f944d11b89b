"""The order of batches: permutations, the same from any start, different by seed and epoch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarlhf.data.loader import ShuffledBatches

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
    first, second = (
        ShuffledBatches(num_samples, size, seed),
        ShuffledBatches(num_samples, min(other, num_samples), seed),
    )
    drawn = [n for step in range(steps) for n in first.indices(step)]
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
    with pytest.raises(ValueError, match=r"train.x = 6: .* 5 samples of .* twice; set train.x to at most 5"):
        ShuffledBatches(5, 6, seed=0, key="train.x")
    with pytest.raises(ValueError, match="at least one"):
        ShuffledBatches(0, 0, seed=0)
