"""A real run of PPO, started as a user starts it, is killed by SIGKILL twice at moments that nothing prepares it for,
and goes on to the same end. The harness is that of `make test-faults`, which does it a hundred times; sft too."""

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import random_faults
from benchmarks.faults.runs import Case, Reference, Site, differences, results
from benchmarks.faults.trial import NotHappened, Trial
from megarlhf.resume.points.point import find_points
from tests.distributed.test_rl_layouts import config as rl_config


class Known(Site):
    """A site whose undisturbed run was made by ranks that were there already."""

    def reference(self, case: Case) -> Reference:
        return Reference(results(self.root / "whole"), 0.5, 0.3)


def ppo(models: dict[str, Path], data: dict[str, Path]) -> Case:
    tree = rl_config({**models, "other": models["scorer"]}, data["prompts"], {})
    tree["train"] |= {"num_steps": 6}
    tree["algo"]["dynamic_sampling"] = {"max_refills": 1, "reward_range": [-1.0, 0.5]}  # about half are dropped
    tree["data"]["validation"], tree["eval"] = str(data["prompts"]), {"every": 3, "max_samples": 6}
    tree["checkpoint"] = {"every_updates": 1, "every_minutes": 0, "export_every": 3}
    return Case("ppo", "rl", 1, tree)


def test_a_run_that_is_killed_twice_ends_as_if_it_had_not_been(ranks, one_layer, data, tmp_path) -> None:
    """First at any moment of its second or third step, then while a resume point is being written."""
    case = ppo(one_layer, data)
    ranks.run(1, "command", *case.argv(tmp_path / "whole", tmp_path / "whole.yaml"))
    trial = Trial(Known(tmp_path, ""), case, random.Random(0), tmp_path / "trial", moments=(1, 3))
    try:
        first = trial.start()
        trial.wait_for_moment(first)
        first.kill()
        reached = trial.left().newest
        trial.moments = (3, 5)
        for _ in range(5):
            with contextlib.suppress(NotHappened):  # it was killed, but the point was complete
                result = random_faults.sigkill_while_writing(trial)
                break
    finally:
        trial.end()
    assert result.recovered, result.problem
    assert result.metrics_equal
    assert result.steps_lost <= 1
    assert [command.status for command in trial.commands[:2]] == [-9, -9]
    assert trial.commands[-1].status == 0
    assert reached is not None
    assert f"from resume/{reached.name}" in trial.commands[1].said
    assert find_points(trial.run)[-1].position.step == case.steps


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2 vpp2, streamed": {"parallel": {"pp": 2, "vpp": 2}, "offload": {"optimizer": "stream"}},
    "cp2, all layers again": {"parallel": {"cp": 2}, "recompute": "full"},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_killed_too(layout, ranks, models, data, tmp_path) -> None:
    """One rank, or all processes, by SIGKILL between the second and the fourth of six steps; two ranks."""
    tree = {
        "actor": {"model": {"path": str(models["plain"])}, "optim": {"lr": 1e-3}, **LAYOUTS[layout]},
        "data": {"train": str(data["sft"])},
        "train": {"num_steps": 6, "mini_batch_samples": 4, "max_tokens_per_micro_batch": 48},
        "checkpoint": {"every": 1, "every_minutes": 0},
    }
    case = Case("sft", "sft", 2, tree)
    ranks.run(2, "command", *case.argv(tmp_path / "whole", tmp_path / "whole.yaml"))
    for attempt in range(5):
        trial = Trial(Known(tmp_path, ""), case, random.Random(attempt), tmp_path / "trial", moments=(2, 4))
        try:
            result = random_faults.sigkill(trial)
            break
        except NotHappened:  # it had come to its end
            continue
        finally:
            trial.end()
    assert result.recovered, result.problem
    assert result.metrics_equal
    assert trial.commands[0].status != 0 == trial.commands[-1].status
    assert "from resume/" in trial.commands[-1].said


def test_unequal_runs_are_told_apart() -> None:
    """What the comparison of `make test-faults` is worth: a changed bit, a line too few, another weight."""
    whole = {"metrics": [{"step": 1, "loss": 0.1}], "scalars": {}, "weights": {"a": "1"}, "finished": {"step": 1}}
    assert not differences(whole, whole)
    assert "line 1" in differences({**whole, "metrics": [{"step": 1, "loss": 0.1 + 2**-56}]}, whole)
    assert "0 lines" in differences({**whole, "metrics": []}, whole)
    assert "weights" in differences({**whole, "weights": {"a": "2"}}, whole)
    assert "finished" in differences({**whole, "finished": None}, whole)
