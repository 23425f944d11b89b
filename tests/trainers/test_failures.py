"""What is said about a directory that cannot be replayed, and about a step that was. Repeats themselves:
tests/distributed/test_replay.py."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import yaml

from megarlhf.commands import cli, launch
from megarlhf.commands.replay import replay
from megarlhf.parallel.not_finite import NotFinite
from megarlhf.trainers.replay import RepeatedStep, _order, report
from megarlhf.trainers.run.failures import Failure, rank_file
from tests.refuses import refuses

FAILURE = Failure(
    command="sft",
    role="actor",
    step=3,
    update=None,
    samples=[4, 5],
    reason="the loss is nan",
    sums={"loss": math.nan},
    gradient_norm=math.inf,
    denominators={"denominator": 12},
    coefficients={"kl_coef": 0.5},
    counters={"optimizer_steps": 2, "scheduler_steps": 2},
    layout="tp 1 x pp 1 x dp 4",
    world_size=4,
)


@pytest.fixture
def kept(tmp_path):
    """A failure of four ranks of a launcher, in a run directory."""
    directory = tmp_path / "run/failures/step_000003_actor"
    directory.mkdir(parents=True)
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "actor": {"model": {"path": str(tmp_path / "model")}},
        "data": {"train": "x.jsonl"},
        "train": {"num_steps": 4, "mini_batch_samples": 2, "micro_batch_samples": 1},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    for rank in range(4):
        (directory / rank_file(rank)).write_bytes(b"")
    FAILURE.write(directory)
    return directory


def test_what_was_written_is_read_again(kept):
    read = Failure.read(kept)
    assert math.isnan(read.sums["loss"])
    assert (read.gradient_norm, read.denominators, read.title) == (math.inf, {"denominator": 12}, "step 3 of actor")
    assert "NaN" not in (kept / "failure.json").read_text(), "not JSON"
    assert replace(read, update=3).title == "step 3, update 4 of actor", "the file counts updates from 0"


def refused(directory, *names, overrides=()):
    with refuses(*names) as error:
        replay(directory, overrides, ["replay", str(directory)])
    assert cli.exit_status(error.value) == 2


def test_a_directory_that_is_no_failure_is_refused_and_those_below_it_are_named(kept):
    for directory in (kept.parent, kept.parents[1]):
        refused(directory, str(directory), "failure.json", str(kept))
    refused(kept / "elsewhere", str(kept / "elsewhere"), "no directory", "RUN_DIR/failures")
    refused(kept.parents[2], "failure.json", "RUN_DIR/failures")


def test_a_failure_that_is_not_complete_or_damaged_is_refused(kept):
    (kept / rank_file(2)).unlink()
    refused(kept, "rank_00002.pt", "4 rank(s)", "another failure")
    tree = json.loads((kept / "failure.json").read_text())
    (kept / "failure.json").write_text(json.dumps(tree | {"format": 7}))
    refused(kept, "format 7", "format 2", "another failure")
    (kept / "failure.json").write_text("{")
    refused(kept, f"{kept}/failure.json", "JSONDecodeError")


def test_a_step_of_a_launcher_is_not_started_on_fewer_ranks_unasked(kept, monkeypatch):
    """With run.nproc it is; then model and layout are looked at first."""
    monkeypatch.setattr(launch, "local_ranks", lambda nproc, argv: pytest.fail("started"))
    overrides = "run.nproc=1 actor.parallel.tp=1 actor.parallel.pp=1"
    refused(kept, "step 3 of actor", "4 rank(s)", "tp 1 x pp 1 x dp 4", "srun", "torchrun", overrides)
    refused(kept, "model does not exist", overrides=["run.nproc=2"])
    refused(kept, "actor.paralel", overrides=["actor.paralel.tp=2"])


def not_finite(during, number, module="layer"):
    return NotFinite(module, "output", 1, 2, (3, 4), during, number)


def test_the_first_of_all_ranks_is_ordered_by_pipeline_stage():
    """(pp, what) from the first to the last."""
    order = [
        (0, not_finite("forward", 9)),
        (1, not_finite("forward", 2)),
        (1, not_finite("forward", 3)),
        (1, not_finite("backward", 20)),
        (0, not_finite("backward", 12)),
        (1, not_finite("sums", 30)),
    ]
    keys = [_order(first, pp) for pp, first in order]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_what_a_repeat_says():
    first = (("rank 1", not_finite("backward", 7)), ("rank 0", not_finite("sums", 9, "head")))
    counts = "1 NaN and 2 infinite of 12 elements [3, 4]"
    assert report(FAILURE, RepeatedStep(math.nan, math.inf, first, {})) == [
        "loss: nan then, nan now",
        "gradient norm: inf then, inf now (the same, bit for bit)",
        f"the first tensor that is not finite: output of layer: {counts}, on rank 1, in the backward",
        f"  first on rank 0: output of head: {counts}",
    ]


def test_a_fault_that_does_not_repeat_is_called_that():
    norms = {f"w{n}": 10.0 - n for n in range(7)}
    lines = report(FAILURE, RepeatedStep(1.5, 2.0, (), norms))
    assert lines[:2] == ["loss: nan then, 1.5 now", "gradient norm: inf then, 2 now (other bits)"]
    assert "does not repeat" in lines[3]
    assert lines[-5:] == [f"  {10 - n}  w{n}" for n in range(5)]
