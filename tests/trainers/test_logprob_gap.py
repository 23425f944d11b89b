"""The watch over the gap between rollout and trainer. Not covered: the gap of real engines (tests/distributed)."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from megarlhf.config import KLConfig, LogprobGapConfig, RolloutCorrectionConfig
from megarlhf.experience import Experience
from megarlhf.rollouts import VersionRuns
from megarlhf.trainers.rl.logprob_gap import (
    LogprobGapError,
    MismatchGuard,
    add_rollout_correction,
    logprob_gap,
    staleness,
)
from megarlhf.trainers.rl.metrics import kl_metrics
from tests.refuses import refuses
from tests.tables import make_rollouts, ragged
from tests.trainers.test_rl_parts import experience

NAMES = ("mean", "p999", "max")


def gap(mean, p999=0.0, largest=0.0):
    return dict(zip((f"rollout_logprob_gap_{name}" for name in NAMES), (mean, p999, largest), strict=True))


def watch(**limits):
    return MismatchGuard(LogprobGapConfig(**limits), torch.float32)


def test_mean_percentile_and_largest_by_hand():
    """Gaps .03, 0 and .06; of three tokens the 99.9th percentile is the largest."""
    metrics = logprob_gap(experience(rollout_logprobs=((-1.03, -2.0), (-0.44,))))
    assert metrics == pytest.approx(gap(0.03, 0.06, 0.06), rel=1e-4)


@pytest.mark.parametrize(("tokens", "rank"), [(999, 999), (1000, 999), (2999, 2997), (3000, 2997)])
def test_the_percentile_is_the_smallest_gap_that_999_of_1000_do_not_exceed(tokens, rank):
    """Gaps 1 ... n in any order: the percentile is the number that as many do not exceed."""
    gaps = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)) + 1.0
    rollouts = make_rollouts(
        responses=ragged([4] * tokens, dtype=torch.int64),
        logprobs=ragged(gaps.tolist()),
        finished_N=torch.tensor([True]),
        version=0,
    )
    table = Experience(
        prompts=(torch.tensor([1]),),
        groups_N=torch.tensor([0]),
        rollouts=rollouts,
        columns={"old_logprobs": ragged([0.0] * tokens)},
    )
    metrics = logprob_gap(table)
    assert metrics["rollout_logprob_gap_p999"] == rank
    assert (metrics["rollout_logprob_gap_p999"] >= gaps).sum() / tokens >= 0.999
    assert metrics["rollout_logprob_gap_max"] == tokens


def test_only_consecutive_steps_above_a_limit_end_the_run(caplog):
    """Either limit counts, and a step within both starts anew. The largest gap ends nothing."""
    caplog.set_level(logging.INFO)
    rule = watch(mean=0.1, p999=1.0, steps=2)
    for step in (gap(0.2), gap(0.1, 1.0, 50.0), gap(0.0, 1.1)):
        rule.watch(step)
        assert not rule.failed(last=False)
        rule.raise_if_failed(last=False)
    rule.watch(gap(0.2))
    assert rule.failed(last=False)
    causes = ("other weights", "temperature", "top-p", "precision")
    with refuses("rollout.logprob_gap.mean = 0.1", "2 step(s)", *causes, error=LogprobGapError):
        rule.raise_if_failed(last=False)
    assert issubclass(LogprobGapError, FloatingPointError), "the command ends with status 4"
    assert [record.message.split(": ")[1] for record in caplog.records] == [
        "step 1 of the 2 in a row that end the run",
        "step 1 of the 2 in a row that end the run",
        "step 2 of the 2 in a row that end the run",
    ]


@pytest.mark.parametrize(
    ("gaps", "fails"), [((0.2,), True), ((0.2, 0.3), True), ((0.2, 0.0), False), ((0.0, 0.2), False), ((), False)]
)
def test_a_run_shorter_than_the_limit_of_steps_fails_at_its_end(gaps, fails):
    """When every one of its steps was above a limit; not before its last."""
    rule = watch(mean=0.1, steps=3)
    for mean in gaps:
        rule.watch(gap(mean))
        rule.raise_if_failed(last=False)
    assert rule.failed(last=True) is fails
    if fails:
        with refuses(f"{len(gaps)} step(s) in a row", "all of this run", error=LogprobGapError):
            rule.raise_if_failed(last=True)


@pytest.mark.parametrize("worst", [float("nan"), -float("inf")])
def test_a_log_prob_that_is_no_number_is_above_every_limit(worst):
    rule = watch(mean=1e30, p999=1e30, steps=1)
    rule.watch(logprob_gap(experience(rollout_logprobs=((-1.0, -2.0), (worst,)))))
    assert rule.failed(last=False)


def test_limits_follow_the_actor_s_dtype():
    step = gap(0.05, 1.0)
    for dtype, failed in ((torch.float32, True), (torch.bfloat16, False)):
        rule = MismatchGuard(LogprobGapConfig(steps=1), dtype)
        rule.watch(step)
        assert rule.failed(last=False) is failed


def test_what_a_run_ended_of_it_ends_of_again_unless_the_limits_are_others():
    """The state of a run that ended with its last step in a resume point."""
    rule = watch(mean=0.1, p999=1.0, steps=2)
    for _ in range(2):
        rule.watch(gap(0.2))
    limits = ((0.1, 2), (0.5, 2), (0.1, 3))
    same, other, more = (watch(mean=mean, p999=1.0, steps=steps) for mean, steps in limits)
    for again in (same, other, more):
        again.load_state_dict(rule.state_dict())
    with refuses("2 step(s)", error=LogprobGapError):
        same.raise_if_failed(last=False)
    other.raise_if_failed(last=True)
    more.raise_if_failed(last=False)


def test_every_key_of_the_correction_reaches_the_weights():
    """Ratios of one response 2, .5 and 1, of the other .1: the geometric means are 1 and .1."""
    logs = [[math.log(2.0), math.log(0.5), 0.0], [math.log(0.1)]]
    rollouts = make_rollouts(
        responses=ragged([1, 1, 1], [1], dtype=torch.int64),
        logprobs=ragged([0.0] * 3, [0.0]),
        finished_N=torch.ones(2, dtype=torch.bool),
        version=0,
    )
    table = Experience((torch.tensor([1]),) * 2, torch.tensor([0, 1]), rollouts, {"old_logprobs": ragged(*logs)})
    for keys, expected in (
        ({"kind": "mask", "level": "geometric", "mask_weight": "token"}, [2.0, 0.5, 1.0, 0.0]),
        ({"kind": "mask", "level": "geometric"}, [1.0, 1.0, 1.0, 0.0]),
        ({"kind": "mask", "low": 0.6, "high": 3.0}, [2.0, 0.0, 1.0, 0.0]),
        ({"kind": "truncate", "high": 1.5}, [1.5, 0.5, 1.0, 0.1]),
        ({"kind": "truncate", "level": "sequence"}, [1.0, 1.0, 1.0, 0.1]),
    ):
        found, _ = add_rollout_correction(table, RolloutCorrectionConfig.model_validate(keys))
        assert found.columns["rollout_weights"].values_T.tolist() == pytest.approx(expected), keys


def test_age_of_samples_and_their_kl_by_hand():
    """Step 5 of tokens of versions 3, 4 and 5: ages 2, 1, 0. Old minus engine's log-prob .3, 0, 0: weights e^.3, 1, 1
    of the KL, which is 1, 2 and 2."""
    rollouts = make_rollouts(ragged([1, 1, 1], dtype=torch.int64), ragged([-1.3, -1.0, -1.0]), torch.tensor([True]))
    versions = VersionRuns.from_rows([((3, 1), (4, 1), (5, 1))])
    columns = {"old_logprobs": ragged([-1.0] * 3), "ref_logprobs": ragged([-2.0, -3.0, -3.0])}
    table = Experience((torch.tensor([1]),), torch.tensor([0]), replace(rollouts, versions=versions), columns)
    assert staleness(table, 5) == pytest.approx({"staleness_mean": 1.0, "staleness_max": 2, "staleness_kl": 0.1})
    corrected, _ = add_rollout_correction(table, RolloutCorrectionConfig(kind="truncate"))
    assert kl_metrics(corrected, KLConfig())["kl"] == pytest.approx(5 / 3)
    weighted = (math.exp(0.3) * 1 + 2 + 2) / (math.exp(0.3) + 2)
    assert kl_metrics(corrected, KLConfig(), corrected=True)["kl"] == pytest.approx(weighted)
    guard = watch(steps=1)
    guard.watch({})
    assert not guard.failed(last=True), "nothing was drawn that could be compared"
