"""Dynamic sampling: which groups teach something, what replaces the others, and what is put together.

Not covered: a whole run (tests/distributed/test_dynamic_sampling.py).
"""

import math
from dataclasses import replace

import pytest
import torch

from megarlhf.config import DynamicSamplingConfig, RewardConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.experience import Experience
from megarlhf.trainers.experience.reward_outputs import RewardOutput
from megarlhf.trainers.rl.dynamic_sampling import ScoredRollout, groups_with_signal, select
from megarlhf.trainers.rl.rollout import other_numbers
from tests.tables import make_rollouts, ragged

NAN = math.nan
ON = DynamicSamplingConfig(max_refills=2)
PLAIN = (RewardConfig(kind="rule", rule="exact_match"),)


def drawn(*rewards, first_prompt=0, token_values=None):
    """Groups of two; `rewards` are by reward, by sample. Response n of all rounds is token 100 x prompt + n."""
    groups = len(rewards[0]) // 2
    prompts = [PromptSample([n], f"p{n}", {}, n) for n in range(first_prompt, first_prompt + groups)]
    rows = [[100 * prompt.index + n] for prompt in prompts for n in range(2)]
    rollouts = make_rollouts(
        responses=ragged(*rows, dtype=torch.int64),
        logprobs=ragged(*[[-float(row[0])] for row in rows]),
        finished_N=torch.tensor([row[0] % 2 == 0 for row in rows]),
        version=3,
    )
    said = [
        RewardOutput(torch.tensor(values), torch.tensor(values).isnan(), token_values=token_values or {})
        for values in rewards
    ]
    tokens = tuple(torch.tensor(prompt.tokens) for prompt in prompts for _ in range(2))
    return ScoredRollout(prompts, Experience(tokens, torch.arange(groups).repeat_interleave(2), rollouts), said)


def test_groups_of_equal_rewards_have_no_signal():
    """Samples to which no reward applies are not compared."""
    found = drawn([1.0, 1.0, 0.0, 1.0, NAN, 1.0, NAN, NAN])
    assert groups_with_signal(found, PLAIN, ON) == [1]


def test_what_is_compared_is_the_weighted_sum():
    """Two rewards that cancel; a clip that makes equal; each normalised by itself they differ all the same."""
    found = drawn([1.0, 0.0, 5.0, 7.0], [0.0, 1.0, 0.0, 0.0])
    rewards = [RewardConfig(kind="rule", rule="exact_match", clip=4.0), RewardConfig(kind="rule", rule="exact_match")]
    assert groups_with_signal(found, rewards, ON) == []
    rewards[1] = RewardConfig(kind="rule", rule="exact_match", normalise="group")
    assert groups_with_signal(found, rewards, ON) == [0]


def test_rewards_of_tokens_count():
    """They are part of what a reward says."""
    assert groups_with_signal(drawn([0.0, 0.0, 0.5, 0.0], token_values={2: (0.5,)}), PLAIN, ON) == [1]


def test_a_sample_whose_reward_failed_is_not_compared():
    """Its other reward alone would differ from the sums of its group."""
    found = drawn([1.0, NAN, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0])
    failed = ScoredRollout(found.prompts, found.experience, [replace(found.rewards[0]), replace(found.rewards[1])])
    failed.rewards[1].failed_N[:] = False
    assert groups_with_signal(failed, PLAIN * 2, ON) == [1]
    failed.rewards[0].failed_N[:] = False
    assert groups_with_signal(failed, PLAIN * 2, ON) == [0, 1], "where it does not apply the sums count"


def test_a_range_of_mean_rewards():
    """0.5 is inside, 1.5 is not, and neither is the border."""
    found = drawn([0.0, 1.0, 1.0, 2.0, 0.5, 1.5])
    narrow = DynamicSamplingConfig(max_refills=1, reward_range=(0.0, 1.0))
    assert groups_with_signal(found, PLAIN, narrow) == [0]


def test_dropped_groups_are_replaced_by_those_of_other_prompts():
    """Two of three are missing; the first further round has one of use, the second the other."""
    rounds = {1: drawn([0.0, 1.0, 0.0, 0.0], first_prompt=3), 2: drawn([1.0, 0.0], first_prompt=5)}
    asked = []

    def draw_more(number, missing, used):
        asked.append((number, missing, [prompt.index for prompt in used]))
        return rounds[number]

    chosen, metrics = select(drawn([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]), draw_more, PLAIN, ON)
    assert asked == [(1, 2, [0, 1, 2]), (2, 1, [0, 1, 2, 3, 4])]
    assert [prompt.index for prompt in chosen.prompts] == [1, 3, 5]
    assert [prompt.tolist() for prompt in chosen.experience.prompts] == [[1], [1], [3], [3], [5], [5]]
    assert chosen.experience.groups_N.tolist() == [0, 0, 1, 1, 2, 2]
    rollouts = chosen.experience.rollouts
    assert rollouts.responses.values_T.tolist() == [100, 101, 300, 301, 500, 501]
    assert rollouts.logprobs.values_T.tolist() == [-100.0, -101.0, -300.0, -301.0, -500.0, -501.0]
    assert rollouts.finished_N.tolist() == [True, False] * 3
    assert rollouts.versions.versions.values_T.unique().tolist() == [3]
    assert chosen.rewards[0].values_N.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert metrics == {
        "groups_drawn": 6, "groups_dropped": 3, "groups_filled_up": 0, "groups_unused": 0, "tokens_unused": 6,
        "sampling_rounds": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    "rewards, chosen, counts",
    [
        ([0, 1, 0, 0, 1, 0, 0, 1], [0, 2], (1, 0, 1, 4)),  # the second own group is replaced, the last is not needed
        ([0, 0, 1, 1, 0, 0, 0, 1], [0, 3], (3, 1, 0, 4)),  # one has signal; the first without fills up, in order
        ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1], (4, 2, 0, 4)),
        ([0, 1, 1, 0, 1, 0, 0, 1], [0, 1], (0, 0, 2, 4)),
        ([0, 4, 1, 0, 0, 1, 2, 3], [1, 2], (2, 0, 0, 4)),  # means of 2 and 2.5 are outside of the range
    ],
)
def test_of_a_surplus_the_first_groups_with_signal_are_chosen(rewards, chosen, counts):
    """Two own prompts, two beside them, a range of mean rewards. `counts`: dropped, filled up, unused and tokens."""
    cfg = DynamicSamplingConfig(surplus=2, reward_range=(-1.0, 2.0))
    kept, metrics = select(drawn([float(reward) for reward in rewards]), None, PLAIN, cfg)
    assert [prompt.index for prompt in kept.prompts] == chosen
    assert kept.experience.rollouts.responses.values_T.tolist() == [100 * n + k for n in chosen for k in range(2)]
    assert kept.rewards[0].values_N.tolist() == [rewards[2 * n + k] for n in chosen for k in range(2)]
    names = ("groups_dropped", "groups_filled_up", "groups_unused", "tokens_unused")
    assert tuple(metrics[name] for name in names) == counts
    assert (metrics["groups_drawn"], metrics["sampling_rounds"]) == (4, 1)


def test_refills_follow_where_the_surplus_is_not_enough():
    """Of one own group and two beside it none has signal: one is missing, and others than those three are drawn."""
    asked = []

    def draw_more(number, missing, used):
        asked.append((number, missing, [prompt.index for prompt in used]))
        return drawn([0.0, 1.0], first_prompt=3)

    cfg = DynamicSamplingConfig(surplus=2, max_refills=2)
    kept, metrics = select(drawn([1.0, 1.0, 0.0, 0.0, 2.0, 2.0]), draw_more, PLAIN, cfg)
    assert asked == [(1, 1, [0, 1, 2])]
    assert [prompt.index for prompt in kept.prompts] == [3]
    assert metrics["groups_dropped"] == 3


def test_prompts_beside_a_step_s_own_follow_from_the_seed():
    """None twice, none of the step's own, all that are left where more are asked for."""
    chosen = other_numbers(10, 4, [2, 5, 2], seed=7)
    assert chosen == other_numbers(10, 4, [5, 2], seed=7) != other_numbers(10, 4, [5, 2], seed=8)
    assert len(set(chosen) - {2, 5}) == 4
    assert sorted(other_numbers(10, 99, [2, 5], seed=7)) == [0, 1, 3, 4, 6, 7, 8, 9]


def test_nothing_is_drawn_where_every_group_is_of_use():
    chosen, metrics = select(drawn([0.0, 1.0]), None, PLAIN, ON)
    assert chosen.rewards[0].values_N.tolist() == [0.0, 1.0]
    assert metrics == {
        "groups_drawn": 1, "groups_dropped": 0, "groups_filled_up": 0, "groups_unused": 0, "tokens_unused": 0,
        "sampling_rounds": 1,
    }  # fmt: skip


@pytest.mark.parametrize("more", [drawn([0.0, 0.0, 1.0, 1.0], first_prompt=3), None])
def test_a_step_is_filled_up_with_dropped_groups(more):
    """After the last round, or where the data has no further prompts: in the order in which they were drawn."""
    rounds = iter([more, None])
    first = drawn([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    chosen, metrics = select(first, lambda number, missing, used: next(rounds), PLAIN, ON)
    assert [prompt.index for prompt in chosen.prompts] == [0, 1, 2]
    assert metrics["groups_filled_up"] == 2


def test_components_and_rewards_of_tokens_follow_their_samples():
    first = drawn([0.0, 0.0, 0.0, 1.0], token_values={3: (0.25,)})
    more = drawn([0.0, 1.0], first_prompt=2, token_values={0: (0.5,)})
    more.rewards[0].components["style"] = torch.tensor([7.0, 8.0])
    chosen, _ = select(first, lambda number, missing, used: more, PLAIN, ON)
    assert chosen.rewards[0].token_values == {1: (0.25,), 2: (0.5,)}
    assert chosen.rewards[0].components["style"].isnan().tolist() == [True, True, False, False]
    assert chosen.rewards[0].components["style"][2:].tolist() == [7.0, 8.0]
