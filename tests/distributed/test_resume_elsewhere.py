"""A run that goes on at another layout, or with another policy of memory, than its resume point was written with.

Runs are cut off by an exception at a chosen call, as in tests/distributed/test_resume.py. Not covered: GPUs; experts
over ranks, whose state tests/distributed/test_resume_state.py carries from layout to layout bit for bit.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.interrupted_jobs import command_until
from tests.distributed.test_resume import TRAIN, Case, command_line, rows, tree, weights
from tests.ranks import RankPool
from tests.refuses import lines_naming

VPP, TP, CP, DP = {"pp": 2, "vpp": 2}, {"tp": 2}, {"cp": 2}, dict[str, int]()
AWAY = [
    *(f"{role}.offload={{parameters: true, optimizer: stream}}" for role in ("actor", "critic")),
    *(f"{role}.recompute=full" for role in ("actor", "critic")),
    "reference.offload.parameters=true",
]
HERE = ["actor.offload.gradients=false", "critic.offload.gradients=false"]


def sft(models: dict[str, Path], data: dict[str, Path]) -> Case:
    made = tree("sft", models, data)
    made["train"] |= {"num_steps": 4, "mini_batch_samples": 8}
    made["checkpoint"] = {"every": 1, "every_minutes": 0, "background": False}
    return Case("sft", made, Path())


def started(ranks: RankPool, argv: list[str], parallel: dict[str, int], *, cut_at: int = 0) -> str:
    """A start on two ranks at this layout, cut off at that optimizer step of its own, or not; returns what it said."""
    argv = [*argv, f"actor.parallel={json.dumps(parallel)}"]
    if not cut_at:
        return ranks.run(2, "command", *argv)[0]
    outcome, said = ranks.run(2, command_until, cut_at, TRAIN, "step", *argv)[0]
    assert outcome == "killed"
    return said


@pytest.mark.parametrize("parallel", [VPP, CP], ids=["pp2 vpp2", "cp2"])
def test_stages_and_contexts_go_on_bit_for_bit(parallel, ranks, models, data, tmp_path) -> None:
    case, whole, run = sft(models, data), tmp_path / "whole", tmp_path / "run"
    started(ranks, command_line(case, whole), parallel)
    argv = command_line(case, run)
    started(ranks, argv, parallel, cut_at=3)
    assert "from resume/step_000002" in started(ranks, argv, parallel)
    assert rows(run) == rows(whole)
    assert weights(run) == weights(whole)
    assert len(weights(run)) == 1


def test_a_run_wanders_over_layouts(ranks, models, data, tmp_path) -> None:
    """A step at each of four: metrics are those of a run that stays at the last, up to the rounding of its sums."""
    wander(ranks, sft(models, data), tmp_path)


def wander(ranks: RankPool, case: Case, folder: Path, look: Callable[[Path], None] = lambda point: None) -> None:
    """Starts at four layouts, each cut off after a step of its own but the last; `look` is shown the first point."""
    whole, run = folder / "whole", folder / "run"
    started(ranks, command_line(case, whole), DP)
    argv = command_line(case, run)
    started(ranks, argv, VPP, cut_at=2)
    look(run / "resume/step_000001")
    for number, (parallel, words) in enumerate(((TP, "tp 2 x pp 1"), (CP, "tp 1 x cp 2"), (DP, "tp 1 x pp 1")), 1):
        said = started(ranks, argv, parallel, cut_at=0 if parallel is DP else 2)
        assert f"from resume/step_{number:06d}" in said
        assert lines_naming(said, "actor", "goes on", words)
    for found, expected in zip(rows(run), rows(whole), strict=True):
        assert found.keys() == expected.keys()
        for metric in ("loss", "grad_norm"):
            if metric in expected:
                assert found[metric] == pytest.approx(expected[metric], rel=1e-5), (expected["step"], metric)
    assert sum("grad_norm" in row for row in rows(run)) == 4


@pytest.mark.parametrize(("first", "then"), [(AWAY, HERE), (HERE, AWAY)], ids=["away, then there", "there, then away"])
def test_policies_of_memory_change_bit_for_bit(first, then, ranks, one_layer, data, tmp_path) -> None:
    """PPO whose point is written with weights in host memory, streamed optimizers and recomputed layers goes on with
    everything on the device, and the other way round. Cut off in the second step, at the actor's second update."""
    made: dict[str, Any] = tree("ppo", one_layer, data)
    made["train"]["num_steps"] = 2
    made["checkpoint"] |= {"background": False, "export_every": 2}
    case, whole, run = Case("rl", made, Path()), tmp_path / "whole", tmp_path / "run"
    ranks.run(1, "command", *command_line(case, whole))
    assert sum("policy_loss" in row for row in rows(whole)) == 2
    argv = command_line(case, run)
    outcome, _ = ranks.run(1, command_until, 11, TRAIN, "step", *argv, *first)[0]
    assert outcome == "killed"
    said = ranks.run(1, "command", *argv, *then)[0]
    assert "from resume/step_000001_update_" in said
    assert rows(run) == rows(whole)
    assert weights(run) == weights(whole)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    moved = [bool(line.get("seconds_offload")) for line in lines if line["step"]]
    assert moved == [first is AWAY, then is AWAY]
