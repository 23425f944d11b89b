"""An engine that is rebuilt when it fails: a stand-in fails, on a single rank.

Not covered here: the real vLLM (tests/distributed/test_rollout_resume.py).
"""

import gc
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from megarlhf.config import RolloutConfig
from megarlhf.rollout.engine import EngineFailure, RolloutInterrupted, missing_rows
from megarlhf.rollout.engine_spec import EngineSpec
from megarlhf.rollout.engines import ENGINES
from megarlhf.rollout.factory import make_engine
from megarlhf.rollout.responses import FinishedResponses, Sampling
from megarlhf.rollout.restarting import RestartingEngine
from megarlhf.weights.checks.certificate import Certificate, CertificateError
from tests.refuses import refuses
from tests.tables import make_response

SAMPLING = Sampling(max_tokens=3, end_ids=(2,))
PROMPTS, SEEDS = [torch.tensor([1])] * 4, list(range(4))
ACTOR = SimpleNamespace(digest="d")


class Engine:
    """Fails after each response that `failing` names; draws the rows in order."""

    alive: ClassVar["weakref.WeakSet[Engine]"] = weakref.WeakSet()

    def __init__(self, failing, drawn):
        gc.collect()
        assert not self.alive, "the failed engine still holds its memory"
        self.alive.add(self)
        self.failing, self.drawn = failing, drawn
        self.weight_version, self.digest, self.verified = -1, None, False

    def update_weights(self, actor, version):
        self.weight_version, self.digest = version, actor.digest

    def verify_weights(self, actor):
        assert actor.digest == self.digest
        self.verified = True
        return Certificate(self.weight_version, self.digest, 0.0)

    def generate(self, prompts, seeds, sampling, *, parts, bank, should_stop, conversations):
        assert self.verified
        for row in missing_rows(bank, len(prompts)):
            if should_stop is not None and should_stop():
                raise RolloutInterrupted(len(bank.held), len(prompts))
            if self.failing and self.failing[0] == row:
                self.failing.pop(0)
                raise EngineFailure(f"rank 0: planted at row {row}")
            self.drawn.append(row)
            bank.add(row, make_response([2], [-1.0], True))
        return dict(bank.held)

    def close(self):
        assert self in self.alive


@pytest.fixture
def failing_at(one_rank):
    """An engine that fails at these rows, and the rows that were drawn."""
    Engine.alive.clear()
    gc.freeze()  # what other tests have imported, which each engine would look through

    def make(*rows, max_rebuilds=2):
        failing, drawn = list(rows), []
        engine = RestartingEngine(lambda: Engine(failing, drawn), max_rebuilds)
        engine.update_weights(ACTOR, 3)
        engine.verify_weights(ACTOR)
        return engine, drawn

    return make


def test_a_failure_costs_only_what_was_not_finished(failing_at, caplog):
    engine, drawn = failing_at(1, 3)
    assert sorted(engine.generate(PROMPTS, SEEDS, SAMPLING)) == [0, 1, 2, 3]
    assert (drawn, engine.rebuilds, engine.weight_version) == ([0, 1, 2, 3], 2, 3)
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
        f"rank 0: planted at row {row}" for row in (1, 3)
    ]


def test_what_the_bank_holds_is_not_drawn_and_what_is_drawn_is_kept_there(failing_at):
    engine, drawn = failing_at(2)
    bank = FinishedResponses({1: make_response([7, 2], [-1.0, -2.0], True)})
    assert engine.generate(PROMPTS, SEEDS, SAMPLING, bank=bank)[1].tokens == [7, 2]
    assert drawn == [0, 2, 3]
    assert sorted(bank.held) == [0, 1, 2, 3]


def test_a_failure_too_many_is_raised_and_the_count_starts_anew_in_each_rollout(failing_at):
    engine, drawn = failing_at(0, 0, 1, max_rebuilds=2)
    with refuses("planted at row 1", "failure 3", "rollout.max_engine_rebuilds = 2", error=EngineFailure):
        engine.generate(PROMPTS, SEEDS, SAMPLING)
    assert (drawn, engine.rebuilds) == ([0], 2)
    engine.engine.failing.extend([1, 2])
    engine.generate(PROMPTS, SEEDS, SAMPLING)
    engine.generate(PROMPTS, SEEDS, SAMPLING)
    assert engine.rebuilds == 4


def test_none_is_built_anew_with_0(failing_at):
    engine, _ = failing_at(0, max_rebuilds=0)
    with refuses("rollout.max_engine_rebuilds = 0", error=EngineFailure):
        engine.generate(PROMPTS, SEEDS, SAMPLING)
    assert engine.rebuilds == 0


def test_a_failure_in_an_update_is_one_too(failing_at, monkeypatch):
    """The new engine gets the weights that the other one failed to take."""
    engine, drawn = failing_at()
    update = Engine.update_weights

    def fails(self, actor, version):
        monkeypatch.setattr(Engine, "update_weights", update)
        raise EngineFailure("the cache was not forgotten")

    monkeypatch.setattr(Engine, "update_weights", fails)
    engine.update_weights(SimpleNamespace(digest="next"), 4)
    assert (engine.rebuilds, engine.weight_version, engine.engine.digest) == (1, 4, "next")
    engine.generate(PROMPTS, SEEDS, SAMPLING)
    assert drawn == [0, 1, 2, 3]
    del engine
    engine, _ = failing_at(max_rebuilds=0)
    monkeypatch.setattr(Engine, "update_weights", fails)
    with refuses("the cache was not forgotten", error=EngineFailure):
        engine.update_weights(ACTOR, 4)


def test_a_run_that_has_to_stop_builds_none(failing_at):
    engine, _ = failing_at(2)
    kept = FinishedResponses()
    with refuses("2 of 4 responses", error=RolloutInterrupted):
        engine.generate(PROMPTS, SEEDS, SAMPLING, bank=kept, should_stop=lambda: not engine.engine.failing)
    assert engine.rebuilds == 0
    assert sorted(kept.held) == [0, 1]


def test_an_actor_that_has_changed_since_the_update_is_refused(failing_at, monkeypatch):
    engine, _ = failing_at(1)
    monkeypatch.setattr(ACTOR, "digest", "another")
    with refuses("digest another", "had d", "version 3", error=CertificateError):
        engine.generate(PROMPTS, SEEDS, SAMPLING)
    with refuses("start the run again", error=EngineFailure):
        engine.generate(PROMPTS, SEEDS, SAMPLING)


def test_an_engine_that_cannot_be_built_again_ends_the_run_with_the_reason(failing_at):
    engine, _ = failing_at(1)
    engine._build = lambda: {}["no engine"]
    with pytest.raises(KeyError, match="no engine"):
        engine.generate(PROMPTS, SEEDS, SAMPLING)


@pytest.mark.parametrize("has_own_weights", [True, False])
def test_an_engine_is_made_by_its_entry_and_is_rebuilt_if_it_has_weights(has_own_weights, monkeypatch):
    made, asked = SimpleNamespace(), []

    class Spec(EngineSpec):
        def make(self, *inputs):
            asked.append(inputs)
            return made

    spec, rollout = Spec(), RolloutConfig(dtype="bf16")
    spec.has_own_weights = has_own_weights
    monkeypatch.setitem(ENGINES, rollout.engine, spec)
    engine = make_engine(rollout, ACTOR, 10, 2)
    assert asked == [(rollout, ACTOR, torch.bfloat16, 10, 2)]
    assert isinstance(engine, RestartingEngine) == has_own_weights
    assert getattr(engine, "engine", engine) is made
