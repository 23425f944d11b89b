"""The table of advantages on a small experience, against values worked out by hand.

Two prompts. The first has responses of two tokens, one token and one token with rewards 1, 3 and 2; the second one of
one token with reward 4. KL (k1) of the tokens: .5 and .25; 0; 1; 2. Not covered: `gae` and the packed arithmetic
(tests/trainers/test_rl_parts.py, tests/kernels), the formulas at large (tests/algo).
"""

from typing import get_args

import pytest
import torch

from megarlhf.config import AlgoConfig
from megarlhf.config.algo import AdvantageName
from megarlhf.experience import Experience
from megarlhf.trainers.rl.advantages import ADVANTAGES, add_advantages, whiten_per_mini_batch
from tests.tables import make_rollouts, ragged

REWARDS = (1.0, 3.0, 2.0, 4.0)


def experience(**per_sample):
    rollouts = make_rollouts(
        responses=ragged([4, 2], [2], [2], [2], dtype=torch.int64),
        logprobs=ragged([0.0, 0.0], [0.0], [0.0], [0.0]),
        finished_N=torch.ones(4, dtype=torch.bool),
        version=0,
    )
    columns = {
        "old_logprobs": ragged([-1.0, -2.0], [-0.5], [-1.0], [-1.0]),
        "ref_logprobs": ragged([-1.5, -2.25], [-0.5], [-2.0], [-3.0]),
        "values": ragged([0.5, 0.25], [1.0], [0.0], [0.0]),
    }
    table = Experience((torch.tensor([1]),) * 4, torch.tensor([0, 0, 0, 1]), rollouts, columns)
    return table.with_per_sample({"rewards": torch.tensor(REWARDS), **per_sample})


def advantages(table, kl_coef=None, **algo):
    made = add_advantages(table, AlgoConfig.model_validate({"whiten_advantages": False, **algo}), kl_coef)
    return made.columns["advantages"].values_T.tolist()


IN_REWARD = {"coef": 0.1, "placement": "reward"}


def test_every_name_is_in_the_table_and_says_what_it_needs():
    """Two tables, one of names that a file may give and one of what is computed, say the same."""
    assert set(get_args(AdvantageName)) == set(ADVANTAGES)
    for name, entry in ADVANTAGES.items():
        assert ("values" in entry.reads) == AlgoConfig.model_validate({"advantage": name}).needs_critic


def test_reinforce_by_hand():
    """Rewards of tokens less .1 x KL: -.05, .975; 3; 1.9; 3.8. With gamma .5 the first return is -.05 + .4875."""
    assert advantages(experience(), advantage="reinforce", gamma=0.5, kl=IN_REWARD) == pytest.approx(
        [0.4375, 0.975, 3.0, 1.9, 3.8]
    )


def test_reinforce_plus_plus_is_reinforce_whitened():
    """Over the five tokens; the unbiased variance shrinks by sqrt(4 / 5)."""
    plain_T = torch.tensor(advantages(experience(), advantage="reinforce"), dtype=torch.float64)
    assert plain_T.tolist() == [1.0, 1.0, 3.0, 2.0, 4.0]
    for variance, correction in (("biased", 0), ("unbiased", 1)):
        cfg = AlgoConfig.model_validate({"advantage": "reinforce++", "whiten_variance": variance})
        found = add_advantages(experience(), cfg).columns["advantages"].values_T
        expected_T = (plain_T - plain_T.mean()) / plain_T.var(correction=correction).sqrt()
        assert found.tolist() == pytest.approx(expected_T.tolist(), rel=1e-5)


def test_reinforce_plus_plus_baseline_by_hand():
    """Less the group's mean of 2; the KL of each token stays with the tokens from it on."""
    found = advantages(experience(), advantage="reinforce_plus_plus_baseline", kl=IN_REWARD)
    assert found == pytest.approx([-1 - 0.05 - 0.025, -1 - 0.025, 1.0, -0.1, -0.2])


def test_remax_by_hand():
    """Less the greedy response's reward: 2 for the first prompt, 5 for the second."""
    table = experience(greedy_rewards=torch.tensor([2.0, 2.0, 2.0, 5.0]))
    assert advantages(table, advantage="remax") == pytest.approx([-1.0, -1.0, 1.0, 0.0, -1.0])


def test_the_kl_is_subtracted_after_a_group_s_rewards_were_scaled():
    """Rewards -1, 1 and 0 over their deviation of 1; the responses' KL .75, 0 and 1 less their mean of .5833."""
    found = advantages(experience(), advantage="grpo", group_std_eps=0.0, kl=IN_REWARD)
    kl = [0.75 - 1.75 / 3, 0 - 1.75 / 3, 1 - 1.75 / 3]
    assert found == pytest.approx([-1 - 0.1 * kl[0], -1 - 0.1 * kl[0], 1 - 0.1 * kl[1], -0.1 * kl[2], 0.0])


def test_the_kl_may_be_charged_to_each_token_from_itself_on():
    """Of the first response .75 and .25; the groups compare rewards alone, and one alone in its group pays too."""
    by_token = {**IN_REWARD, "credit": "token"}
    found = advantages(experience(), advantage="rloo", kl=by_token)
    assert found == pytest.approx([-1.5 - 0.075, -1.5 - 0.025, 1.5, -0.1, -0.2])
    found = advantages(experience(), advantage="dr_grpo", kl={**by_token, "clamp": 0.4})
    assert found == pytest.approx([-1 - 0.065, -1 - 0.025, 1.0, -0.04, -0.04])


def test_the_deviation_of_all_rewards_of_the_step():
    """Of 1, 3, 2 and 4: the root of 5 / 3."""
    found = advantages(experience(), advantage="grpo", group_std_over="step", group_std_eps=0.0)
    assert found == pytest.approx([-((3 / 5) ** 0.5)] * 2 + [(3 / 5) ** 0.5, 0.0, 0.0])
    biased = {"group_std_over": "step", "group_std_eps": 0.0, "group_std": "biased"}
    assert advantages(experience(), advantage="grpo", **biased)[2] == pytest.approx((4 / 5) ** 0.5)


def test_samples_without_a_reward_are_in_no_deviation_of_all_rewards():
    """Of 10, 12 and 11 it is 1; the last one's 0 would make it 5.6."""
    rewarded = torch.tensor([True, True, True, False])
    table = experience(rewards=torch.tensor([10.0, 12.0, 11.0, 0.0]), rewarded=rewarded, trained=rewarded)
    found = advantages(table, advantage="grpo", group_std_over="step", group_std_eps=0.0)
    assert found[:3] == pytest.approx([-1.0, -1.0, 1.0])


def test_one_alone_in_its_group_gets_none_of_its_tokens_rewards():
    """With the form of REINFORCE++ that compares groups; it pays its KL, and with group_of_one: reward gets all."""
    columns = {
        "old_logprobs": ragged([-1.0], [-1.0], [-1.0] * 3),
        "ref_logprobs": ragged([-1.0], [-1.0], [-1.5] * 3),
        "token_rewards": ragged([1.0], [3.0], [1.0, 2.0, 3.0]),
    }
    rollouts = make_rollouts(ragged([1], [1], [1] * 3, dtype=torch.int64), columns["old_logprobs"], torch.ones(3) > 0)
    prompts = (torch.tensor([1]),) * 3
    table = Experience(prompts, torch.tensor([0, 0, 1]), rollouts, columns)
    table = table.with_per_sample({"rewards": torch.zeros(3)})
    found = advantages(table, advantage="reinforce++_baseline")
    assert found == pytest.approx([-1.0, 1.0, 0.0, 0.0, 0.0])
    with_kl = advantages(table, advantage="reinforce++_baseline", kl=IN_REWARD)
    assert with_kl == pytest.approx([-1.0, 1.0, -0.15, -0.1, -0.05])
    whole = advantages(table, advantage="reinforce++_baseline", group_of_one="reward")
    assert whole == pytest.approx([-1.0, 1.0, 6.0, 5.0, 3.0])


def test_a_small_kl_moves_groups_of_equal_rewards_little():
    """Divided by the deviation together with the rewards a coefficient of 1e-4 would make advantages near 1."""
    table = experience(rewards=torch.ones(4))
    found = advantages(table, advantage="grpo", kl={"coef": 1e-4, "placement": "reward"})
    assert max(map(abs, found)) == pytest.approx(1e-4 * 1.75 / 3)


def test_dr_grpo_and_rloo_by_hand():
    assert advantages(experience(), advantage="dr_grpo") == pytest.approx([-1.0, -1.0, 1.0, 0.0, 0.0])
    assert advantages(experience(), advantage="rloo") == pytest.approx([-1.5, -1.5, 1.5, 0.0, 0.0])
    alone = {"group_of_one": "reward"}
    assert advantages(experience(), advantage="rloo", **alone)[-1] == 4.0
    assert advantages(experience(), advantage="grpo", kl=IN_REWARD, **alone)[-1] == pytest.approx(3.8)


def test_rewards_of_tokens_reach_every_advantage():
    """Of .5 at the first token of the first response: GAE sees it there, a group's reward is the sum."""
    table = experience().with_columns({"token_rewards": ragged([0.5, 0.0], [0.0], [0.0], [0.0])})
    assert advantages(table, advantage="reinforce") == pytest.approx([1.5, 1.0, 3.0, 2.0, 4.0])
    assert advantages(table, advantage="gae", lam=1.0) == pytest.approx([1.0, 0.75, 2.0, 2.0, 4.0])
    mean = 6.5 / 3
    assert advantages(table, advantage="dr_grpo") == pytest.approx([1.5 - mean, 1.5 - mean, 3 - mean, 2 - mean, 0.0])
    found = advantages(table, advantage="reinforce_plus_plus_baseline")
    assert found == pytest.approx([1.5 - mean, 1.0 - mean, 3 - mean, 2 - mean, 0.0])
    with_kl = advantages(table, advantage="reinforce", kl=IN_REWARD)
    assert with_kl == pytest.approx([1.425, 0.975, 3.0, 1.9, 3.8])


def test_a_clamped_and_an_absolute_kl_in_the_reward():
    """A KL of 2 counts as 1; of -.5 and .25 the sizes."""
    clamped = advantages(experience(), advantage="reinforce", kl=IN_REWARD | {"clamp": 1.0})
    assert clamped == pytest.approx([0.925, 0.975, 3.0, 1.9, 3.9])
    table = experience().with_columns({"ref_logprobs": ragged([-0.5, -2.25], [-0.5], [-1.0], [-1.0])})
    size = advantages(table, advantage="reinforce", kl=IN_REWARD | {"estimator": "abs"})
    assert size == pytest.approx([0.925, 0.975, 3.0, 2.0, 4.0])


def test_the_coefficient_in_force_counts():
    """Not the configured one: a controller may have changed it."""
    plain = advantages(experience(), 0.0, advantage="reinforce", kl=IN_REWARD)
    assert plain == pytest.approx([1.0, 1.0, 3.0, 2.0, 4.0])
    assert advantages(experience(), 0.2, advantage="reinforce", kl=IN_REWARD)[-1] == pytest.approx(3.6)


def test_what_is_left_out_of_the_losses_does_not_count_in_whitening():
    """The last response is left out: mean and deviation are of the other four tokens."""
    table = experience(trained=torch.tensor([True, True, True, False]))
    found = advantages(table, advantage="reinforce", whiten_advantages=True)
    kept_T = torch.tensor([1.0, 1.0, 3.0, 2.0])
    expected_T = (kept_T - kept_T.mean()) / kept_T.var(correction=0).sqrt()
    assert found == pytest.approx([*expected_T.tolist(), 0.0], rel=1e-5)


def test_whitening_of_a_mini_batch_by_itself():
    """The two mini-batches have other means; a step's whitening is then left to them."""
    cfg = AlgoConfig.model_validate({"advantage": "reinforce++", "whiten_over": "mini_batch"})
    table = add_advantages(experience(), cfg)
    assert table.columns["advantages"].values_T.tolist() == [1.0, 1.0, 3.0, 2.0, 4.0]
    first, second = ([row.tolist() for row in whiten_per_mini_batch(table, part, cfg).columns["advantages"].rows()]
                     for part in ([0, 1], [2, 3]))  # fmt: skip
    root = 2**0.5
    assert first[0] + first[1] == pytest.approx([-1 / root, -1 / root, root], rel=1e-5)
    assert second[2] + second[3] == pytest.approx([-1.0, 1.0], rel=1e-5)
    once = AlgoConfig.model_validate({"advantage": "reinforce++"})
    assert whiten_per_mini_batch(table, [0, 1], once) is table


def test_the_critic_may_learn_returns_of_its_own_lambda():
    """With lambda 1 the returns are the rewards to come, whatever the values are; the advantages keep theirs."""
    table = experience()
    plain = add_advantages(table, AlgoConfig(advantage="gae", lam=0.5, whiten_advantages=False))
    own = add_advantages(table, AlgoConfig(advantage="gae", lam=0.5, critic_lam=1.0, whiten_advantages=False))
    assert own.columns["returns"].values_T.tolist() == pytest.approx([1.0, 1.0, 3.0, 2.0, 4.0])
    assert plain.columns["returns"].values_T[0] != pytest.approx(1.0)
    assert torch.equal(own.columns["advantages"].values_T, plain.columns["advantages"].values_T)
