"""Which steps are skipped, from losses and norms written out. On real ranks: tests/distributed/test_bad_steps.py."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from megarlhf.config import ParallelConfig, SkipConfig
from megarlhf.layout import MeshLayout
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.loss import StepResult
from megarlhf.parallel.micro_batch import MicroBatch, MicroBatchLayout
from megarlhf.trainers.run import skipped_steps as skipping
from megarlhf.trainers.run.failures import Failure
from megarlhf.trainers.run.skipped_steps import KEPT, Failures, SkippedTooOften, StepGuard, Update, load_kept
from tests.refuses import refuses


class Role:
    """Takes every step that is not refused."""

    name = "critic"
    section = SimpleNamespace(parallel=ParallelConfig())
    mesh = SimpleNamespace(
        runtime=SimpleNamespace(rank=0, is_main=True, world_size=1),
        coordinates=SimpleNamespace(dp=0),
        is_last_stage=True,
        layout=MeshLayout(),
    )

    def __init__(self):
        self.steps = 0
        module = torch.nn.Linear(2, 1)
        module.weight.main_grad = torch.tensor([3.0, 4.0])
        module.bias.main_grad = torch.tensor([math.nan])
        self.shard = SimpleNamespace(module=module)
        self.norm = 1.0

    def optimizer_step(self, sums, reason_to_skip):
        reason = reason_to_skip(sums, self.norm)
        self.steps += not reason
        return StepResult(sums=sums, grad_norm=self.norm, skipped=reason)


LAYOUT = MicroBatchLayout(sequences=(5,), lengths=(3,), starts=(0,), rows=1, columns=4, packed=True)
BATCH = MicroBatch(torch.tensor([[7, 8, 9, 0]]), {"advantages": torch.tensor([[0.5, math.nan, 0.0, 0.0]])}, LAYOUT)


LOSS = SimpleNamespace(response_tokens=3, clip=0.2, names=("policy_loss",))


def make(cfg, directory):
    return StepGuard(cfg, Failures(directory, "rl", "# the configuration\n"), Phases())


@pytest.fixture
def run(monkeypatch):
    """Steps of (loss, norm) one after the other: which were skipped. No weights are kept: there is no model."""
    role = Role()
    counters = {"optimizer_steps": 7, "scheduler_steps": 7}
    monkeypatch.setattr(skipping.sharded_state, "counters", lambda role: counters)
    monkeypatch.setattr(skipping, "keep_weights", lambda role, directory, body, newest: (None, "no model"))

    def steps(bad_steps, numbers, number=None):
        skipped = []
        for step, (loss, role.norm) in enumerate(numbers):
            skipped.append(bad_steps.apply(role, {"loss": loss}, Update(step, number, [5]), [BATCH], LOSS).skipped)
        assert role.steps == sum(not reason for reason in skipped)
        return [bool(reason) for reason in skipped]

    return steps


def test_a_loss_or_gradient_that_is_not_finite_is_skipped_until_it_is_too_often(run, tmp_path):
    """One good step in between begins the count anew."""
    nan, inf = math.nan, math.inf
    bad_steps = make(SkipConfig(), tmp_path)
    assert run(bad_steps, [(1, 1), (nan, 1), (1, inf), (1, 1), (inf, nan), (nan, nan)]) == [0, 1, 1, 0, 1, 1]
    kept = f"`megarlhf replay {tmp_path}/step_000001_update_0002_critic`"
    limit = "train.max_skipped_in_a_row = 3"
    with refuses("critic", "step 1, update 3 of critic", "3 optimizer step(s)", limit, kept, error=SkippedTooOften):
        run(bad_steps, [(1, inf)], number=2)


def test_one_is_the_first_that_ends_the_run(run, tmp_path):
    with pytest.raises(SkippedTooOften):
        run(make(SkipConfig(max_skipped_in_a_row=1), tmp_path), [(math.nan, 1)])


def test_spikes_are_skipped_by_an_absolute_limit(run, tmp_path):
    assert run(make(SkipConfig(skip_grad_norm_above=2.5), tmp_path), [(1, 2.5), (1, 2.6)]) == [0, 1]


def test_spikes_are_skipped_by_a_factor_over_the_running_median(run, tmp_path):
    """After 16 norms of 2, 6.1 is more than three times the median; before there is no median. What was skipped does
    not raise it: 30 steps of 6.1 later it would."""
    cfg = SkipConfig(skip_grad_norm_factor=3, max_skipped_in_a_row=99)
    bad_steps = make(cfg, tmp_path)
    assert run(bad_steps, [(1, 2)] * 15 + [(1, 60)] + [(1, 6)] + [(1, 6.1)] * 30) == [0] * 17 + [1] * 30


def test_the_count_and_the_norms_go_on_after_a_resume(run, tmp_path):
    """JSON in between, as a resume point keeps them."""
    cfg = SkipConfig(skip_grad_norm_factor=3)
    before, after = make(cfg, tmp_path), make(cfg, tmp_path)
    run(before, [(1, 0.1 * n) for n in range(1, 80)] + [(math.nan, 1)] * 2)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    assert len(after.state_dict()["norms"]) == 64
    with refuses("3 optimizer step(s)", error=SkippedTooOften):
        run(after, [(1, 1000)])


def test_what_is_kept_can_be_read_again_and_only_the_newest_stay(run, tmp_path):
    run(make(SkipConfig(max_skipped_in_a_row=99), tmp_path), [(math.nan, 1)] * (KEPT + 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{n:06d}_critic" for n in range(3, KEPT + 3)]
    kept = tmp_path / "step_000003_critic"
    files = {path.name for path in kept.iterdir()}
    assert files == {"config.yaml", "failure.json", "rank_00000.json", "rank_00000.pt"}
    numbers = json.loads((kept / "rank_00000.json").read_text())
    assert numbers == {"dp": 0, "last_stage": True, "gradient_norms_of_this_rank": {"weight": 5.0, "bias": "nan"}}
    failure = Failure.read(kept)
    assert (failure.reason, failure.samples, failure.denominators) == ("the loss is nan", [5], {"response_tokens": 3})
    assert math.isnan(failure.sums["loss"])
    expected = (1.0, 7, "tp 1 x pp 1 x dp 1")
    assert (failure.gradient_norm, failure.counters["optimizer_steps"], failure.layout) == expected
    (batch,) = load_kept(kept / "rank_00000.pt")
    assert batch.layout == LAYOUT
    assert torch.equal(batch.tokens_BS, BATCH.tokens_BS)
    torch.testing.assert_close(batch.columns["advantages"], BATCH.columns["advantages"], equal_nan=True)
    (stored,) = torch.load(kept / "rank_00000.pt", weights_only=True)
    del stored["columns_at"]  # as an earlier version has written it
    torch.save([stored], kept / "rank_00000.pt")
    with refuses(f"{kept}/rank_00000.pt", "earlier version", "replay"):
        load_kept(kept / "rank_00000.pt")


def test_evidence_that_cannot_be_written_ends_no_run(run, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert run(make(SkipConfig(), tmp_path / "file"), [(math.nan, 1)]) == [1]
    assert "could not be kept" in caplog.text


def test_a_factor_of_one_is_refused():
    with pytest.raises(ValidationError, match="greater than 1"):
        SkipConfig(skip_grad_norm_factor=1)
