"""What a run makes of its rewards: scales, weights, samples without any, metrics. One rank, no model.

Not covered: how functions are called (tests/rollout), several ranks (tests/distributed).
"""

import logging
import math

import pytest
import torch
import torch.distributed as dist

from megarlhf.config import RewardConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.errors import RewardError
from megarlhf.experience import Experience
from megarlhf.trainers.experience.rewards import Rewarder, unique_labels
from tests.refuses import refuses
from tests.tables import Letters, make_rollouts, ragged

MODULE = """
from megarlhf.rollout.rewards.batch import TokenRewards

def number(prompt, response, fields):
    return fields["number"]

def rest(prompt, response, fields):
    return round(30.1 - fields["number"], 2)

def even(batch):
    return [None if fields["number"] % 2 else 1.0 for fields in batch.fields]

def parts(batch):
    return [{"format": 1.0, "answer": fields["number"]} for fields in batch.fields]

def tokens(batch):
    return [TokenRewards([0.5] * len(tokens)) for tokens in batch.response_tokens]

def nothing(batch):
    return [None] * len(batch)

def breaks(prompt, response, fields):
    if fields["number"] == 2.0:
        raise RuntimeError("no judge")
    return fields["number"]
"""


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def rewarder(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(*rewards, **options):
        cfg = [RewardConfig.model_validate({"kind": "rule", "workers": 0, **reward}) for reward in rewards]
        made.append(Rewarder(cfg, None, Letters(), None, torch.device("cpu"), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rule(name, **keys):
    return {"rule": f"rewards_of_test:{name}", "name": name, **keys}


NUMBERS = (1.0, 2.0, 4.0, 4.0)


def step(numbers=NUMBERS):
    """Two prompts with two responses each, of one to four tokens."""
    rollouts = make_rollouts(
        responses=ragged([1], [1, 2], [1, 2, 3], [1, 2, 3, 4], dtype=torch.int64),
        logprobs=ragged([0.0], [0.0] * 2, [0.0] * 3, [0.0] * 4),
        finished_N=torch.tensor([True, True, False, True]),
        version=0,
    )
    prompts = [PromptSample([1], f"p{n}", {"number": number}, n) for n, number in enumerate(numbers)]
    return Experience((torch.tensor([1]),) * 4, torch.tensor([0, 0, 1, 1]), rollouts), prompts


def total(rewarder, numbers=NUMBERS):
    return rewarder.start(*step(numbers)).finish()


def held_out_mean(rewarder):
    return float(rewarder.validation(*step(), lambda: False)[0].nanmean())


def test_the_weighted_sum_by_hand(rewarder):
    """.5 x clip(number - 1, 2) + 2 x even, where None adds nothing."""
    combined = total(rewarder(rule("number", weight=0.5, shift=1.0, clip=2.0), rule("even", weight=2.0)))
    assert combined.rewards_N.tolist() == [0.0, 2.5, 3.0, 3.0]
    assert combined.kept_N.all()
    assert combined.metrics["reward/number_mean"] == pytest.approx(2.75)
    assert combined.metrics["reward/number_std"] == pytest.approx(torch.tensor(NUMBERS).std(correction=0).item())
    assert (combined.metrics["reward/even_none"], combined.metrics["reward/even_failed"]) == (1, 0)
    assert combined.metrics["samples_without_reward"] == 0
    assert combined.per_sample["reward/number"].tolist() == list(NUMBERS)
    assert math.isnan(combined.per_sample["reward/even"][0])


@pytest.mark.parametrize("keys", [{}, {"shift": 0.1, "weight": 3.0}, {"clip": 40.0, "shift": -0.3}])
def test_sums_that_are_equal_on_paper_are_equal(rewarder, keys):
    """30.1 in two parts of two decimals: in fp32 values their sums differ in the last place, and a group of them would
    be given a deviation of rounding to divide by."""
    both = rewarder(rule("number", **keys), rule("rest", **keys))
    totals = {
        float(each) for n in range(0, 3000, 4) for each in total(both, [k / 100 for k in range(n, n + 4)]).rewards_N
    }
    assert len(totals) == 1
    held_out_N = both.validation(*step([0.1, 7.39, 2.22, 29.99]), lambda: False)[0]
    assert len(set(held_out_N.tolist())) == 1
    assert held_out_N.dtype == torch.float32


def test_components_are_metrics(rewarder):
    combined = total(rewarder(rule("parts")))
    assert combined.rewards_N.tolist() == [2.0, 3.0, 5.0, 5.0]
    assert combined.metrics["reward/parts/format"] == 1.0
    assert combined.metrics["reward/parts/answer"] == pytest.approx(2.75)


def test_rewards_of_tokens(rewarder):
    combined = total(rewarder(rule("number"), rule("tokens", weight=2.0)))
    assert combined.token_rewards.values_T.tolist() == [1.0] * 10
    assert combined.token_rewards.lengths_N.tolist() == [1, 2, 3, 4]
    assert combined.rewards_N.tolist() == list(NUMBERS)
    assert combined.totals_N.tolist() == [2.0, 4.0, 7.0, 8.0]
    assert combined.metrics["reward/tokens_mean"] == pytest.approx(1.25), "of the responses' sums"
    assert held_out_mean(rewarder(rule("tokens", weight=2.0))) == pytest.approx(2.5)
    with refuses("'tokens'", "shift", "clip", "normalise", error=RewardError):
        total(rewarder(rule("tokens", normalise="group")))


def test_each_reward_normalised_inside_its_group(rewarder):
    """1 and 2 become -+1 / sqrt(2); 4 and 4 are equal, and give 0; the scale of a reward does not matter."""
    root = 1 / (math.sqrt(2) + 2e-6)
    for number, scale in (
        (rule("number", normalise="group"), 1.0),
        (rule("number", normalise="group", weight=3.0), 3.0),
    ):
        combined = total(rewarder(number))
        assert combined.rewards_N.tolist() == pytest.approx([-scale * root, scale * root, 0.0, 0.0], rel=1e-5)


def test_running_normalisation_goes_on_and_an_evaluation_does_not_move_it(rewarder):
    """Mean and deviation of all eight values after two steps; kept in a resume point."""
    first = rewarder(rule("number", normalise="running"))
    total(first)
    assert held_out_mean(first) == pytest.approx(2.75), "not normalised"
    again = rewarder(rule("number", normalise="running"))
    again.load_state_dict(first.state_dict())
    seen = torch.tensor([*NUMBERS, 10.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    expected = ((seen[4:] - seen.mean()) / (seen.std(correction=0) + 1e-6)).tolist()
    for each in (first, again):
        assert total(each, (10.0, 0.0, 0.0, 2.0)).rewards_N.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_sample_without_any_reward_ends_the_run_or_is_left_out(rewarder, caplog):
    with refuses("1 of 4 samples", "sample 0", "record 1", "'p0'", "algo.unrewarded = drop", error=RewardError):
        total(rewarder(rule("even")))
    with caplog.at_level(logging.INFO):
        combined = total(rewarder(rule("even"), unrewarded="drop"))
    assert combined.kept_N.tolist() == [False, True, True, True]
    assert combined.metrics["samples_without_reward"] == 1
    assert "1 of 4 samples of this step (the first is sample 0" in caplog.text
    assert "{'number': 1.0}" in caplog.text
    with refuses("4 of 4 samples", error=RewardError):
        total(rewarder(rule("nothing"), unrewarded="drop"))


def test_a_failure_ends_the_run_or_is_dropped_and_counted(rewarder, caplog):
    with refuses("'breaks'", "sample 1", "'p1'", "'ab'", "RuntimeError", error=RewardError):
        total(rewarder(rule("breaks")))
    with caplog.at_level(logging.INFO):
        combined = total(rewarder(rule("breaks", on_failure="drop"), unrewarded="drop"))
    assert combined.kept_N.tolist() == [True, False, True, True]
    assert (combined.metrics["reward/breaks_failed"], combined.metrics["reward/breaks_none"]) == (1, 0)
    assert "1 of 4 samples are dropped: reward 'breaks' on sample 1" in caplog.text
    with refuses("4 of 4 samples", error=RewardError):
        total(rewarder(rule("breaks", on_failure="drop")), (2.0,) * 4)


def test_a_sample_with_a_failed_reward_is_left_out_though_others_apply(rewarder):
    """Their sum would count the failure as 0. It is in no mean of its group, and in no running mean; `unrewarded` is
    about rewards that say None."""
    pair = (rule("breaks", on_failure="drop"), rule("number"))
    combined = total(rewarder(*pair))
    assert combined.kept_N.tolist() == [True, False, True, True]
    assert combined.rewards_N.tolist() == [2.0, 0.0, 8.0, 8.0]
    assert combined.metrics["samples_without_reward"] == 1
    assert held_out_mean(rewarder(*pair)) == pytest.approx(18 / 3)
    alone = total(rewarder(pair[0], rule("number", normalise="group")))
    assert alone.rewards_N.tolist() == [1.0 + 0.0, 0.0, 4.0, 4.0], "the first is alone in its group"
    running = rewarder(pair[0], rule("number", normalise="running"))
    total(running)
    assert running.state_dict()["number"][:2] == [3.0, pytest.approx(3.0)]


def test_names_of_rewards():
    made = [RewardConfig(kind="rule", rule="exact_match"), RewardConfig(kind="rule", rule="exact_match", weight=2.0)]
    made += [RewardConfig(kind="model"), RewardConfig(kind="http", url="http://x", name="judge")]
    assert unique_labels(made) == ["exact_match_1", "exact_match_2", "model", "judge"]
    clash = [RewardConfig(kind="rule", rule="exact_match", name=name) for name in ("a", "a", "a_1")]
    assert unique_labels(clash) == ["a_2", "a_3", "a_1"]
