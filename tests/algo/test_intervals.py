"""Figures of an evaluation: values by hand, estimators by brute force, intervals by simulation.

Not covered: that prompts are drawn independently, which no interval can know.
"""

import itertools
import math

import pytest
import torch

from megarlhf.algo.intervals import mean_of, pass_at_k, pass_at_k_of, ratio_of, share_of, t_95, ties_of, wins_of
from tests.refuses import refuses

NAN = math.nan


def test_pass_at_k_by_hand():
    """n = 5, c = 2: pass@1 = 2/5; pass@2 = 1 - C(3,2)/C(5,2) = 1 - 3/10; pass@4: of three wrong ones no four."""
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    """Every subset of every size of up to seven samples."""
    compared = 0
    for n in range(1, 8):
        for c in range(n + 1):
            right = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(right, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets)), (n, c, k)
                compared += 1
    assert compared == sum(n * (n + 1) for n in range(1, 8))


def test_pass_at_k_is_unbiased():
    """The mean over all outcomes of four samples, each right with probability 0.3, is the chance of two new ones;
    1 - (1 - c/n)^k, which is in use too, is not."""
    outcomes = list(itertools.product([0, 1], repeat=4))
    chance = {right: math.prod(0.3 if each else 0.7 for each in right) for right in outcomes}
    expected = 1 - 0.7**2
    assert sum(p * pass_at_k(4, sum(right), 2) for right, p in chance.items()) == pytest.approx(expected)
    biased = sum(p * (1 - (1 - sum(right) / 4) ** 2) for right, p in chance.items())
    assert abs(biased - expected) > 0.04


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_of_too_few_samples_is_refused(n, c, k):
    with refuses("1 <= k <= samples"):
        pass_at_k(n, c, k)


def test_samples_that_were_not_judged_are_no_wrong_ones():
    right_PN = torch.tensor([[1.0, 0.0, NAN, NAN], [0.0, 0.0, 0.0, 1.0], [NAN, NAN, NAN, 1.0]])
    values = pass_at_k_of(right_PN, 2).tolist()
    assert values[:2] == [1.0, 0.5]
    assert math.isnan(values[2])


def test_wins_by_hand():
    """Ours 1, 3 against theirs 1, 2: tie, loss, win, win = 2.5 of 4. The second prompt has one pair, a tie; the third
    none."""
    ours, theirs = (
        torch.tensor([[1.0, 3.0], [2.0, NAN], [1.0, 1.0]]),
        torch.tensor([[1.0, 2.0], [2.0, NAN], [NAN, NAN]]),
    )
    wins, ties = wins_of(ours, theirs), ties_of(ours, theirs)
    assert wins[:2].tolist() == [0.625, 0.5]
    assert ties[:2].tolist() == [0.25, 1.0]
    assert bool(wins[2].isnan())
    assert bool(ties[2].isnan())
    torch.testing.assert_close(wins + wins_of(theirs, ours), torch.tensor([1.0, 1.0, NAN]).double(), equal_nan=True)


def test_student_by_the_tables():
    for freedom, expected in ((1, 12.706), (4, 2.776), (5, 2.571), (9, 2.262), (11, 2.201), (29, 2.045), (120, 1.980)):
        assert t_95(freedom) == pytest.approx(expected, abs=6e-4), freedom


def test_intervals_by_hand():
    """1, 2, 3: mean 2, deviation 1, half 4.303/sqrt(3). 8 of 10 by Wilson: 0.490 to 0.943 (Newcombe 1998, table I has
    its neighbours)."""
    mean = mean_of(torch.tensor([1.0, NAN, 2.0, 3.0]))
    assert (mean.value, mean.prompts) == (2.0, 3)
    assert (mean.low, mean.high) == (pytest.approx(2 - 2.4842, abs=1e-3), pytest.approx(2 + 2.4842, abs=1e-3))
    share = share_of(torch.tensor([1.0] * 8 + [0.0] * 2))
    assert (share.value, share.low, share.high) == tuple(pytest.approx(x, abs=1e-3) for x in (0.8, 0.490, 0.943))
    ratio = ratio_of(torch.tensor([2.0, 6.0]), torch.tensor([1.0, 3.0]))
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_what_one_prompt_does_not_tell_is_none():
    assert mean_of(torch.tensor([2.0])).low is None
    assert share_of(torch.tensor([0.3])).high is None
    assert ratio_of(torch.tensor([2.0]), torch.tensor([4.0])).low is None
    one = share_of(torch.tensor([1.0]))
    assert one.low == pytest.approx(0.207, abs=1e-3)
    with refuses("mean of nothing"):
        mean_of(torch.tensor([NAN]))


def test_all_right_is_not_taken_for_certain_and_all_ties_are_one_half():
    assert share_of(torch.ones(20)).low == pytest.approx(0.839, abs=1e-3)
    ties = share_of(torch.full((20,), 0.5))
    assert (ties.low, ties.value, ties.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("count", [1, 7, 64, 333])
def test_none_and_all_are_ends_of_their_intervals(count):
    assert share_of(torch.zeros(count)).low == 0.0
    assert share_of(torch.ones(count)).high == 1.0


def coverage(draw, interval, truth, trials=1500):
    inside = 0
    for seed in range(trials):
        estimate = interval(draw(torch.Generator().manual_seed(seed)))
        inside += estimate.low <= truth <= estimate.high
    return inside / trials


def uniform(generator, *shape):
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def right_of(generator, prompts, samples):
    """Samples of prompts of different difficulty: right with a probability that is uniform over prompts."""
    return (uniform(generator, prompts, samples) < uniform(generator, prompts, 1)).double()


@pytest.mark.parametrize(
    ("draw", "interval", "truth"),
    [
        (lambda g: (uniform(g, 40) < 0.1).double(), share_of, 0.1),
        (lambda g: (uniform(g, 40) < 0.5).double(), share_of, 0.5),
        # The mean over prompts of p and of 1 - (1 - p)^2, for uniform p.
        (lambda g: right_of(g, 40, 4).mean(1), share_of, 1 / 2),
        (lambda g: pass_at_k_of(right_of(g, 40, 4), 2), share_of, 2 / 3),
        (lambda g: torch.randn(10, generator=g, dtype=torch.float64), mean_of, 0.0),
        (lambda g: -uniform(g, 60).log(), mean_of, 1.0),
        # Two policies whose rewards are uniform in [0, 1] and in [0, 2]: the first wins with probability 1/4.
        (lambda g: wins_of(uniform(g, 40, 3), 2 * uniform(g, 40, 3)), share_of, 1 / 4),
    ],
    ids=["share 0.1", "share 0.5", "average@4", "pass@2", "normal", "exponential", "win rate"],
)
def test_intervals_cover_the_truth_as_often_as_they_say(draw, interval, truth):
    """95 of 100; 1500 trials have a standard error of 0.6 of 100. Skewed values cost some."""
    assert 0.925 <= coverage(draw, interval, truth) <= 0.975


def test_counting_samples_as_prompts_would_not():
    """The mistake that the unit guards against: 40 prompts x 4 samples taken for 160 independent ones."""
    assert coverage(lambda g: right_of(g, 40, 4).flatten(), share_of, 1 / 2) < 0.90


def test_the_interval_of_a_ratio_covers_it():
    """Texts of 1 to 50 tokens whose mean nll depends on the length: 1 + length / 50 nats a token; the ratio is over
    tokens, E[length (1 + length / 50)] / E[length] for uniform length."""
    lengths = torch.arange(1, 51).double()
    truth = float((lengths * (1 + lengths / 50)).sum() / lengths.sum())

    def interval(rows_P2):
        return ratio_of(rows_P2[:, 0], rows_P2[:, 1])

    def draw(generator):
        lengths_P = torch.randint(1, 51, (60,), generator=generator).double()
        noise_P = torch.randn(60, generator=generator, dtype=torch.float64)
        return torch.stack([lengths_P * (1 + lengths_P / 50 + 0.3 * noise_P), lengths_P], 1)

    assert 0.925 <= coverage(draw, interval, truth) <= 0.975
