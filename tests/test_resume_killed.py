"""A real run, started as a user starts it, is killed by SIGKILL at a moment that nothing prepares it for, more than
once, and goes on to the same end. The harness is that of `make test-faults`, which does this a hundred times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.faults import random_faults
from benchmarks.faults.runs import Case, Reference, Site, differences, results
from benchmarks.faults.trial import Trial
from megarlhf.resume.point import find_points
from tests.distributed.test_rl_layouts import config as rl_config
from tests.ranks import RankPool


class Known(Site):
    """A site whose undisturbed run was made by ranks that were there already."""

    def reference(self, case: Case) -> Reference:
        return Reference(results(self.root / "whole"), 0.5, 0.3)


def sft(models: dict[str, Path], data: dict[str, Path]) -> Case:
    tree = {
        "actor": {"model": {"path": str(models["plain"])}, "optim": {"lr": 1e-3}},
        "data": {"train": str(data["sft"]), "heldout": str(data["sft"])},
        "train": {"num_steps": 16, "mini_batch_samples": 24, "micro_batch_samples": 4},
        "eval": {"every": 8, "max_samples": 4},
        "checkpoint": {"every": 2, "every_minutes": 0, "export_every": 8},
    }
    return Case("sft", "sft", 1, tree)


def ppo(models: dict[str, Path], data: dict[str, Path]) -> Case:
    tree = rl_config({**models, "other": models["scorer"]}, data["prompts"], {})
    tree["train"] |= {"num_steps": 6}
    tree["data"]["heldout"], tree["eval"] = str(data["prompts"]), {"every": 3, "max_samples": 6}
    tree["checkpoint"] = {"every_updates": 1, "every_minutes": 0, "export_every": 3}
    return Case("ppo", "rl", 1, tree)


@pytest.mark.parametrize(("make", "fault"), [(sft, random_faults.sigkill_while_writing), (ppo, random_faults.sigkill)])
def test_a_killed_run_ends_as_if_it_had_not_been(
    make, fault, ranks: RankPool, two_layers: dict[str, Path], data: dict[str, Path], tmp_path: Path
) -> None:
    case = make(two_layers, data)
    ranks.run(1, "command", *case.argv(tmp_path / "whole", tmp_path / "whole.yaml"))
    trial = Trial(Known(tmp_path), case, random.Random(0), tmp_path / "trial", moments=(2, 5))
    try:
        result = fault(trial)
    finally:
        trial.end()
    assert result.recovered, result.problem
    assert result.metrics_equal
    assert "killed" in result.happened
    assert (trial.commands[0].status, trial.commands[-1].status) == (-9, 0)
    assert find_points(trial.run)[-1].position.step == case.steps


def test_unequal_runs_are_told_apart() -> None:
    """What the comparison of `make test-faults` is worth: a changed bit, a line too few, another weight."""
    whole = {"metrics": [{"step": 1, "loss": 0.1}], "scalars": {}, "weights": {"a": "1"}, "finished": {"step": 1}}
    assert not differences(whole, whole)
    assert "line 1" in differences({**whole, "metrics": [{"step": 1, "loss": 0.1 + 2**-56}]}, whole)
    assert "0 lines" in differences({**whole, "metrics": []}, whole)
    assert "weights" in differences({**whole, "weights": {"a": "2"}}, whole)
    assert "finished" in differences({**whole, "finished": None}, whole)
