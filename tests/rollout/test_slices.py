"""The rule of slices by enumeration, and the samples in flight that follow it. Not covered: engines
(tests/distributed/test_slices.py)."""

import itertools

import pytest
import torch

from megarlhf.rollout.in_flight import InFlight
from megarlhf.rollout.slices import SliceRule, describe_rounds
from tests.refuses import missing_names, refuses
from tests.tables import make_rollouts, ragged

RULES = [SliceRule(slices, ahead, 7) for slices, ahead in itertools.product(range(1, 8), (0, 1))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"P{rule.slices}-A{rule.steps_ahead}")
def test_every_token_is_drawn_once_and_by_the_version_of_the_rule(rule):
    """Version max(0, k - A - (P - 1) + i) for slice i of step k; versions do not fall within a response; from round
    `lag` on a version draws one slice of each of P neighbouring steps, and none of others."""
    for num_steps in (1, 2, 3, 9):
        drawn_by = {step: [] for step in range(num_steps)}
        for version in range(num_steps):
            slices = {}
            for step in rule.steps(version, num_steps):
                before, until = len(drawn_by[step]), rule.until(step, version)
                drawn_by[step] += [version] * (until - before)
                if until > before:
                    slices[step] = (before // rule.slice_tokens, until - before)
            assert len(drawn_by[version]) == rule.max_tokens, "a step trains on samples that are not whole"
            if version:
                expected = [version + rule.lag - i for i in reversed(range(rule.slices))]
                has_tokens = [step for step in expected if (version + rule.lag - step) * rule.slice_tokens < 7]
                assert list(slices) == [step for step in has_tokens if step < num_steps]
                assert all(i == version + rule.lag - step for step, (i, _) in slices.items())
                assert all(count <= rule.slice_tokens for _, count in slices.values())
        for step, versions in drawn_by.items():
            slice_of = [token // rule.slice_tokens for token in range(rule.max_tokens)]
            by_hand = [max(0, step - rule.steps_ahead - (rule.slices - 1) + i) for i in slice_of]
            assert versions == by_hand == [rule.version(step, token) for token in range(rule.max_tokens)]
            assert sorted(versions) == versions
            assert all(0 <= step - version <= rule.lag for version in versions)
            runs = rule.runs(step, rule.max_tokens)
            assert [version for version, count in runs for _ in range(count)] == versions
            assert len({version for version, _ in runs}) == len(runs)


def test_one_slice_and_no_step_ahead_is_a_step_that_draws_its_own_samples():
    rule = SliceRule(1, 0, 7)
    for step in range(4):
        assert list(rule.steps(step, 9)) == [step]
        assert rule.until(step, step) == 7
        assert rule.runs(step, 5) == [(step, 5)]


def draw(requests, version):
    """The tokens of a response are their positions; the response of sample n ends with token n."""
    rows, ended = [], []
    for part, (_, sample) in zip(requests.parts, requests.origins, strict=True):
        end = min(part.until, sample + 1)
        rows.append(list(range(len(part.so_far), end)))
        ended.append(end == sample + 1)
    logprobs = ragged(*([-0.5] * len(row) for row in rows))
    return make_rollouts(ragged(*rows, dtype=torch.int64), logprobs, torch.tensor(ended), version)


def rounds(flight, num_steps, versions, *, from_saved=False):
    """Rounds of two prompts with three samples each; returns the samples of each step and what each round asked for."""
    whole, asked = {}, {}
    for version in versions:
        for step in flight.rule.steps(version, num_steps):
            if step not in flight:
                flight.begin(step, [10 * step, 10 * step + 1], 3, version)
        requests = flight.requests(
            version, lambda number: torch.tensor([number]), lambda step, sample: 100 * step + sample
        )
        asked[version] = list(zip(requests.origins, [(len(p.so_far), p.until) for p in requests.parts], strict=True))
        for prompt, part, (step, sample) in zip(requests.prompts, requests.parts, requests.origins, strict=True):
            assert prompt.tolist() == [10 * step + sample // 3, *part.so_far]
        flight.extend(requests, draw(requests, version))
        whole[version] = flight.take(version)
        if from_saved:
            saved = flight.state_dict()
            flight = InFlight(flight.rule)
            flight.load_state_dict(saved)
    return whole, asked, flight


@pytest.mark.parametrize("from_saved", [False, True])
def test_samples_in_flight_grow_slice_by_slice(from_saved):
    """Six responses of 1 to 6 tokens in slices of two. A response that has ended is not asked for again."""
    whole, asked, flight = rounds(InFlight(SliceRule(3, 0, 6)), 5, range(5), from_saved=from_saved)
    assert flight.num_tokens == 0
    assert asked[2] == [
        *(((2, n), (4, 6)) for n in (4, 5)),
        *(((3, n), (2, 4)) for n in (2, 3, 4, 5)),
        *(((4, n), (0, 2)) for n in range(6)),
    ]
    for step, samples in whole.items():
        assert samples.prompts == (10 * step, 10 * step + 1)
        assert [row.tolist() for row in samples.rollouts.responses.rows()] == [list(range(n + 1)) for n in range(6)]
        assert bool(samples.rollouts.finished_N.all())
    versions = [row.tolist() for row in whole[4].rollouts.versions.per_token().rows()]
    assert versions[5] == [2, 2, 3, 3, 4, 4]
    assert versions[2] == [2, 2, 3]


def test_a_prolonged_run_begins_what_is_missing_with_the_newest_version():
    """Prolonged from 3 steps to 6 after the third: steps 4 and 5 are begun by version 3 as far as it may draw."""
    _, _, flight = rounds(InFlight(SliceRule(3, 0, 6)), 3, range(3))
    whole, asked, _ = rounds(flight, 6, range(3, 6))
    assert {origin: span for origin, span in asked[3] if origin[1] == 5} == {
        (3, 5): (0, 6), (4, 5): (0, 4), (5, 5): (0, 2),
    }  # fmt: skip
    versions = {step: samples.rollouts.versions.per_token().rows()[5].tolist() for step, samples in whole.items()}
    assert versions == {3: [3] * 6, 4: [3, 3, 3, 3, 4, 4], 5: [3, 3, 4, 4, 5, 5]}


def test_a_slice_of_another_version_is_refused():
    flight = InFlight(SliceRule(2, 0, 4))
    for step in (0, 1):
        flight.begin(step, [step], 4, 0)
    requests = flight.requests(0, lambda number: torch.tensor([number]), lambda step, sample: 0)
    flight.extend(requests, draw(requests, 0))
    flight.take(0)
    requests = flight.requests(1, lambda number: torch.tensor([number]), lambda step, sample: 0)
    flight.extend(requests, draw(requests, 0))
    with refuses("version 0, expected version 1", "missed an update", error=RuntimeError):
        flight.take(1)


def test_the_start_says_how_much_of_a_step_waits_for_the_cache():
    """Three slices of 32 samples on two engines are 48 responses each; a cache for 40 of the longest lets 8 wait."""
    rule = SliceRule(3, 0, 6)
    said = describe_rounds(rule, 32, 2, 400, 10)
    assert not missing_names(said, "up to 2 tokens", "96 responses, 48 an engine", "holds 40", "8 of 48 wait")
    assert "All fit" in describe_rounds(rule, 32, 2, 480, 10)
    assert describe_rounds(rule, 32, 1, None, 10).endswith("up to 2 steps old when they are trained on")
