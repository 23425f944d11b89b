"""The parts of the rl loop that need no model: advantages, stop rules, mini-batches.

Not covered: the formulas at large (tests/algo), the loop itself (tests/distributed).
"""

import hashlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarlhf.config import AlgoConfig, StopConfig
from megarlhf.experience import Experience
from megarlhf.rollout.responses import sample_seed
from megarlhf.trainers.experience.plan import split_into_mini_batches
from megarlhf.trainers.rl.advantages import add_advantages
from megarlhf.trainers.rl.evaluation import StopRule
from megarlhf.trainers.rl.rollout import whole_requests
from tests.refuses import missing_names
from tests.tables import make_rollouts, ragged


def experience(*, rollout_logprobs=((-1.0, -2.0), (-0.5,)), rewards=(1.0, 3.0), groups=(0, 0)):
    """Two samples of one prompt, of two and one response tokens. kl (k1): .5 and .25; 0."""
    rollouts = make_rollouts(
        responses=ragged([4, 2], [2], dtype=torch.int64),
        logprobs=ragged(*rollout_logprobs),
        finished_N=torch.tensor([True, True]),
        version=7,
    )
    columns = {
        "old_logprobs": ragged([-1.0, -2.0], [-0.5]),
        "ref_logprobs": ragged([-1.5, -2.25], [-0.5]),
        "values": ragged([0.5, 0.25], [1.0]),
    }
    prompts = (torch.tensor([1, 5]), torch.tensor([1, 5]))
    table = Experience(prompts=prompts, groups_N=torch.tensor(groups), rollouts=rollouts, columns=columns)
    return table.with_per_sample({"rewards": torch.tensor(rewards)})


def algo(**changes):
    return AlgoConfig.model_validate({"whiten_advantages": False, "gamma": 1.0, "lam": 0.5, **changes})


def values(table, name):
    return table.columns[name].values_T.tolist()


def test_gae_with_kl_in_the_reward_by_hand():
    """Token rewards: -.1 x .5 = -.05 and -.1 x .25 + 1 = .975; 3. Values .5, .25; 1.

    A1 = .975 - .25 = .725; A0 = -.05 + .25 - .5 + .5 x .725 = .0625; the other sample: 3 - 1 = 2.
    """
    table = add_advantages(experience(), algo(kl={"coef": 0.1, "placement": "reward"}))
    assert values(table, "advantages") == pytest.approx([0.0625, 0.725, 2.0])
    assert values(table, "returns") == pytest.approx([0.5625, 0.975, 3.0])
    assert table.columns["advantages"].lengths_N.tolist() == [2, 1]


@pytest.mark.parametrize(
    "kl", [{"coef": 0.1, "placement": "loss", "estimator": "k3"}, {"coef": 0.0, "placement": "reward"}]
)
def test_gae_without_kl_in_the_reward(kl):
    """A1 = 1 - .25 = .75; A0 = .25 - .5 + .5 x .75 = .125."""
    assert values(add_advantages(experience(), algo(kl=kl)), "advantages") == pytest.approx([0.125, 0.75, 2.0])


def test_gae_takes_the_configured_estimator():
    """k2 = d^2 / 2: .125 and .03125 where k1 is .5 and .25. lam = gamma = 1: advantages are sums less values."""
    table = add_advantages(experience(), algo(lam=1.0, kl={"coef": 2.0, "placement": "reward", "estimator": "k2"}))
    assert values(table, "returns") == pytest.approx([1 - 0.25 - 0.0625, 1 - 0.0625, 3.0])


def test_whitening_is_over_the_response_tokens_of_the_step():
    """Of -.05 + ..., plainly (.125, .75, 2): mean 2.875 / 3, biased variance; padding does not count."""
    plain = torch.tensor([0.125, 0.75, 2.0], dtype=torch.float64)
    table = add_advantages(experience(), algo(whiten_advantages=True))
    expected = (plain - plain.mean()) / plain.var(unbiased=False).sqrt()
    assert values(table, "advantages") == pytest.approx(expected.tolist(), rel=1e-5)
    assert values(table, "returns") == pytest.approx([0.625, 1.0, 3.0]), "returns are not whitened"


@pytest.mark.parametrize("scale, expected", [(False, 1.0), (True, 1 / (2**0.5 + 1e-6))])
def test_group_relative_by_hand(scale, expected):
    """Rewards 1 and 3: one below and one above their mean, with the unbiased std sqrt(2)."""
    cfg = algo(
        advantage="group_relative", scale_by_group_std=scale, kl={"coef": 0.1, "placement": "loss", "estimator": "k3"}
    )
    table = add_advantages(experience(), cfg)
    assert values(table, "advantages") == pytest.approx([-expected, -expected, expected])
    assert "returns" not in table.columns


def test_leave_one_out_with_kl_in_the_reward_by_hand():
    """A response's KL is the sum over its tokens: .75; rewards 1 - .1 x .75 = .925 and 3, each less the other."""
    table = add_advantages(experience(), algo(advantage="leave_one_out", kl={"coef": 0.1, "placement": "reward"}))
    assert values(table, "advantages") == pytest.approx([-2.075, -2.075, 2.075])


def test_an_advantage_without_a_branch_is_refused_and_not_another_one():
    unknown = AlgoConfig.model_construct(**{**dict(algo()), "advantage": "new"})
    with pytest.raises(KeyError, match="new"):
        add_advantages(experience(), unknown)


def test_samples_of_different_prompts_are_not_compared():
    table = add_advantages(experience(groups=(0, 1)), algo(advantage="leave_one_out"))
    assert values(table, "advantages") == [0, 0, 0]


def test_stop_on_kl():
    rule = StopRule(StopConfig(max_kl=0.5))
    assert not rule.watch_kl(0.5)
    assert rule.reason is None
    assert rule.watch_kl(0.7)
    assert missing_names(rule.reason, "kl 0.6", "last 2 steps", "train.stop.max_kl = 0.5") == []


def test_a_single_noisy_kl_does_not_stop():
    """The mean of the last two; what is smoothed is kept in a resume point."""
    rule = StopRule(StopConfig(max_kl=0.5, max_kl_steps=2))
    assert [rule.watch_kl(kl) for kl in (0.1, 0.8, 0.1)] == [False] * 3
    resumed = StopRule(StopConfig(max_kl=0.5, max_kl_steps=2))
    resumed.load_state_dict(rule.state_dict())
    assert not resumed.watch_kl(0.9)
    assert resumed.watch_kl(0.2)


def test_stop_when_the_validation_reward_stands_still():
    """Two evaluations without a rise; a rise in between starts the count anew, an accuracy does not."""
    rule = StopRule(StopConfig(validation_reward_patience=2))
    stopped = []
    for reward in (1.0, 0.9, 1.1, 1.1, 1.0):
        evaluation = {"eval_reward_mean": reward, "eval_accuracy": len(stopped)}
        rule.watch(evaluation)
        stopped.append(rule.watch_kl(100.0))
    assert stopped == [False, False, False, False, True]
    assert rule.reason == "stopped: eval_reward_mean has not improved for 2 evaluations"


def test_the_end_by_other_limits_does_not_count():
    """A run that goes on with a higher limit; what it has seen stays."""
    rule = StopRule(StopConfig(max_kl=0.5, validation_reward_patience=2))
    rule.watch({"eval_reward_mean": 1.0})
    assert rule.watch_kl(0.6)
    same, higher = (StopRule(StopConfig(max_kl=limit, validation_reward_patience=2)) for limit in (0.5, 9.0))
    for each in (same, higher):
        each.load_state_dict(rule.state_dict())
    assert same.reason == rule.reason
    assert higher.reason is None
    assert not higher.watch_kl(0.6)
    for reward in (0.9, 0.8):
        higher.watch({"eval_reward_mean": reward})
    assert higher.watch_kl(0.0)


def test_without_a_rule_or_an_evaluation_nothing_stops():
    rule = StopRule(StopConfig())
    assert not any(rule.watch_kl(kl) for kl in (0.0, 1e9, float("nan")))
    patient = StopRule(StopConfig(validation_reward_patience=1))
    patient.watch({})
    assert not patient.watch_kl(0.0)


SHUFFLES = ("samples", "groups", "none")


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.integers(1, 60),
    st.sampled_from(SHUFFLES),
    st.integers(0, 2**60),
)
def test_mini_batches_deal_every_sample_once(groups, size, shuffle, seed):
    mini_batches = split_into_mini_batches(groups, size, shuffle=shuffle, seed=seed)
    assert sorted(sample for samples in mini_batches for sample in samples) == list(range(len(groups)))
    assert {len(samples) for samples in mini_batches[:-1]} <= {size}
    assert mini_batches == split_into_mini_batches(groups, size, shuffle=shuffle, seed=seed)


def test_mini_batches_in_order_and_shuffled():
    assert split_into_mini_batches([0] * 5, 2, shuffle="none", seed=1) == [[0, 1], [2, 3], [4]]
    for shuffle, unit in (("samples", 1), ("groups", 4)):
        groups = [n // unit for n in range(32)]
        shuffled = [split_into_mini_batches(groups, 32, shuffle=shuffle, seed=seed)[0] for seed in range(3)]
        assert len({tuple(order) for order in [*shuffled, list(range(32))]}) == 4


def test_shuffled_samples_are_a_permutation_of_torch_whatever_their_groups():
    """That of the versions in which `train.shuffle` was true: a step in progress goes on with the same mini-batches."""
    order = torch.randperm(6, generator=torch.Generator().manual_seed(7)).tolist()
    for groups in ([0] * 6, [0, 0, 1, 1, 2, 2]):
        assert split_into_mini_batches(groups, 4, shuffle="samples", seed=7) == [order[:4], order[4:]]


def test_shuffled_groups_stay_together_and_in_order():
    """Of 2, 3, 1 and 2 samples: two mini-batches of 4, whose boundary divides at most one group."""
    groups = [5, 5, 2, 2, 2, 9, 4, 4]
    of_group = {5: [0, 1], 2: [2, 3, 4], 9: [5], 4: [6, 7]}
    orders = set()
    for seed in range(20):
        first, second = split_into_mini_batches(groups, 4, shuffle="groups", seed=seed)
        order = [group for group, _ in itertools.groupby([*first, *second], key=groups.__getitem__)]
        assert [sample for group in order for sample in of_group[group]] == [*first, *second]
        orders.add(tuple(order))
    assert len(orders) > 5


def test_every_sample_of_every_step_has_a_seed_of_its_own() -> None:
    """Also the samples of one prompt; the same in every process (Python's own hash is not)."""
    seeds = {sample_seed(run, step, n) for run in (0, 1) for step in range(20) for n in range(200)}
    assert len(seeds) == 2 * 20 * 200
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert sample_seed(0, 0, 0) == int.from_bytes(hashlib.blake2b(b"0/0/0", digest_size=8).digest(), "little") >> 2


def test_the_rows_of_a_group_are_drawn_with_different_seeds() -> None:
    """Prompts repeated, one seed a row, other ones in the next step and in a refill."""
    cfg = SimpleNamespace(
        rollout=SimpleNamespace(num_samples_per_prompt=3, max_response_tokens=4), run=SimpleNamespace(seed=5)
    )
    prompts = [SimpleNamespace(tokens=[1, 7]), SimpleNamespace(tokens=[1, 8])]
    asked = [whole_requests(cfg, prompts, 0), whole_requests(cfg, prompts, 1), whole_requests(cfg, prompts, 1, 1)]
    assert [row.tolist() for row in asked[0].prompts] == [[1, 7]] * 3 + [[1, 8]] * 3
    assert [part.max_tokens for part in asked[0].parts] == [4] * 6
    assert len({seed for requests in asked for seed in requests.seeds}) == 18
