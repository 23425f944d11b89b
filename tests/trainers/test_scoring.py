"""From what the rewards said to the columns of a step, without a model.

Not covered: log-probs and values (tests/distributed), the rewards themselves (test_rl_rewards.py).
"""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

from megarlhf.config import AlgoConfig
from megarlhf.experience import Experience
from megarlhf.observe.watch.phases import Phases
from megarlhf.rollout.responses import Sampling
from megarlhf.trainers.experience.rewards import CombinedRewards
from megarlhf.trainers.rl.advantages import add_advantages, total_rewards
from megarlhf.trainers.rl.rollout import draw_baselines
from megarlhf.trainers.rl.scoring import greedy_rewards, with_rewards
from tests.refuses import refuses
from tests.tables import make_rollouts, ragged


def table(finished=(True, True, False)):
    """Three responses to one prompt, of one, three and four tokens."""
    rollouts = make_rollouts(
        responses=ragged([5], [5, 5, 5], [5, 5, 5, 5], dtype=torch.int64),
        logprobs=ragged([0.0], [0.0] * 3, [0.0] * 4),
        finished_N=torch.tensor(finished),
        version=0,
    )
    return Experience((torch.tensor([1]),) * 3, torch.tensor([0, 0, 0]), rollouts)


def rewarded(rewards=(1.0, 1.0, 1.0), kept=(True, True, True), token_rewards=None):
    return CombinedRewards(torch.tensor(rewards), torch.tensor(kept), token_rewards, {}, {})


def config(**algo):
    return SimpleNamespace(
        algo=AlgoConfig.model_validate(algo),
        rollout=SimpleNamespace(max_response_tokens=4),
        run=SimpleNamespace(seed=0),
    )


SHAPED = {"missing_end_penalty": 0.5, "overlong": {"buffer_tokens": 2, "mask": True}}


def test_what_a_response_s_length_does_to_its_reward_and_to_the_losses():
    """Of at most 4 tokens the last 2 cost up to 1; the one that was cut costs 0.5 more and is masked, in its group."""
    found = with_rewards(table(), rewarded(), config(**SHAPED), 0)
    assert found.per_sample["rewards"].tolist() == [1.0, 0.5, -0.5]
    assert found.per_sample["trained"].tolist() == [True, True, False]
    assert found.trained_lengths_N.tolist() == [1, 3, 0]
    assert found.groups_N.tolist() == [0, 0, 0]


def test_permuted_rewards_leave_nothing_of_their_tokens_where_it_was():
    """A control whose token rewards stayed in place would still say what was good."""
    of_tokens = ragged([0.0], [0.25, 0.25, 0.5], [0.0, 0.0, 2.0, 0.0])
    given = rewarded((1.0, 10.0, 100.0), token_rewards=of_tokens)
    plain = with_rewards(table(), given, config(), 0)
    assert total_rewards(plain).tolist() == [1.0, 11.0, 102.0]
    permuted = [with_rewards(table(), given, config(shuffle_rewards=True), step) for step in range(8)]
    orders = [tuple(each.per_sample["rewards"].tolist()) for each in permuted]
    assert all(sorted(order) == [1.0, 11.0, 102.0] for order in orders)
    assert len(set(orders)) > 1, "another order in other steps"
    assert all("token_rewards" not in each.columns for each in permuted)


class Engine:
    """Answers each prompt with the same two greedy responses: one that ends, one that is cut. Drawn by version 4."""

    def generate(self, rows, seeds, sampling, **options):
        assert sampling.greedy
        return make_rollouts(
            responses=ragged([7, 7], [7, 7, 7, 7], dtype=torch.int64),
            logprobs=ragged([0.0] * 2, [0.0] * 4),
            finished_N=torch.tensor([True, False]),
            version=4,
        )


class Rewards:
    """Hands out what it is given, without learning from it."""

    def __init__(self, given):
        self.given = given

    def start(self, experience, prompts):
        assert len(prompts) == experience.num_samples == 2
        self.experience = experience
        return self

    def finish(self, should_stop, *, learn):
        assert not learn
        return self.given


def baselines(given, step=4, **algo):
    sampling = Sampling(greedy=False, max_tokens=4, temperature=1.0, end_ids=(0,))
    parts = {"engine": Engine(), "sampling": sampling, "rewarder": Rewards(given), "phases": Phases()}
    run = SimpleNamespace(**parts, greedy_in_flight=None)
    session = SimpleNamespace(stoppable=lambda phase: contextlib.nullcontext(), asked_to_stop=lambda: False)
    prompts = [SimpleNamespace(tokens=[1, n]) for n in range(2)]
    return greedy_rewards(config(**algo), session, draw_baselines(run, session, prompts, step))


def test_a_greedy_response_earns_what_a_sample_would():
    """With its tokens' rewards, and the penalties for its length: 2 + .5; 3 + 1 - 1 - .5. NaN without a reward."""
    of_tokens = ragged([0.25, 0.25], [0.0, 1.0, 0.0, 0.0])
    given = CombinedRewards(torch.tensor([2.0, 3.0]), torch.tensor([True, True]), of_tokens, {}, {})
    assert baselines(given, advantage="remax", **SHAPED).tolist() == [2.5, 2.5]
    none = CombinedRewards(torch.tensor([2.0, 0.0]), torch.tensor([True, False]), None, {}, {})
    with refuses("version 4", "expected version 5", error=RuntimeError):
        baselines(none, step=5, advantage="remax")
    found = baselines(none, advantage="remax")
    assert found[0] == 2.0
    assert math.isnan(found[1])


def test_without_a_baseline_a_sample_is_not_trained_on():
    """A baseline of 0 in its place would make all its reward an advantage."""
    greedy_N = torch.tensor([math.nan, 0.5, 0.5])
    given = with_rewards(table().with_per_sample({"greedy_rewards": greedy_N}), rewarded(), config(), 0)
    assert given.per_sample["trained"].tolist() == [False, True, True]
    assert given.per_sample["rewarded"].tolist() == [True, True, True]
    scored = given.with_columns(
        {name: ragged([0.0], [0.0] * 3, [0.0] * 4) for name in ("old_logprobs", "ref_logprobs")}
    )
    found = add_advantages(scored, AlgoConfig.model_validate({"advantage": "remax"})).columns["advantages"]
    assert found.values_T.isfinite().all()
    assert found.values_T[1:].tolist() == pytest.approx([0.5] * 7)
