"""What follows the actor over a run of rl: the average of its weights, and a reference that moves; at TP2, and exactly
the same over a resume. And passes over a step's samples that end on the KL."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.observe.records.cost_metrics import reproducible
from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.test_rl_layouts import config
from tests.refuses import command_refuses

DECAY = 0.75


@pytest.fixture
def configured(two_layers, data, tmp_path) -> Any:
    """The command of a run of three steps with an update each: the actor at TP2, the reference at PP2."""
    cfg = config({**two_layers, "other": two_layers["scorer"]}, data["prompts"], {"tp": 2}, advantage="group_relative")
    del cfg["critic"]
    cfg["reference"]["parallel"] = {"pp": 2}
    cfg["train"] |= {"num_steps": 3, "epochs_per_step": 1, "mini_batch_samples": 16}
    cfg["checkpoint"] = {"every": 1, "export_every": 1}

    def made(**keys: Any) -> list[str]:
        return argv_of("rl", cfg | keys, tmp_path / "cfg.yaml")

    return made


def weights(run: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:06d}" / role / "model.safetensors")


def test_average_and_moved_reference_are_exact_over_a_resume(configured, ranks, two_layers, tmp_path) -> None:
    """The average by hand from the exports of the actor. The reference, of which rank 0 has nothing, is the actor of
    the step before, so that no step sees a KL; a run that is killed inside its third step goes on as if it had not
    been. Without `reference_update` it does not: the reference would be another one, unsaid."""
    argv = configured(ema={"decay": DECAY}, reference_update={"every": 1})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv.append("reference.parallel={ranks: [1, 2]}")
    ranks.run(2, "command", *argv, f"run.dir={whole}")
    killed = ranks.run(2, command_until, 3, "megarlhf.parallel.step:Trainer", "step", *argv, f"run.dir={parts}")
    assert [outcome for outcome, _ in killed] == ["killed"] * 2
    without = [*configured(ema={"decay": DECAY}), f"run.dir={parts}", "run.allow_changes=true"]
    command_refuses(ranks, without, "reference", "moved", "reference_update", world=2)
    configured(ema={"decay": DECAY}, reference_update={"every": 1})
    ranks.run(2, "command", *argv, f"run.dir={parts}")
    average = load_file(two_layers["plain"] / "model.safetensors")
    for step in (1, 2, 3):
        actor, found = weights(whole, step, "actor"), weights(whole, step, "actor_ema")
        average = {name: DECAY * tensor + (1 - DECAY) * actor[name] for name, tensor in average.items()}
        for name, tensor in average.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)
            assert not torch.equal(found[name], actor[name])
    for name, tensor in weights(parts, 3, "actor_ema").items():
        assert torch.equal(tensor, weights(whole, 3, "actor_ema")[name]), name
    rows, again = (read_metrics(run)[1:] for run in (whole, parts))
    assert [row["reference_moved"] for row in rows] == [1, 1, 1]
    assert all(abs(row["kl"]) < 1e-6 for row in rows)
    assert [reproducible(row) for row in rows] == [reproducible(row) for row in again]


def test_a_reference_moves_half_way_every_second_step(configured, ranks, tmp_path) -> None:
    """The third step's KL is between that of a reference that stays and that of one that has become the actor."""
    still, half = tmp_path / "still", tmp_path / "half"
    ranks.run(2, "command", *configured(), f"run.dir={still}")
    ranks.run(2, "command", *configured(reference_update={"every": 2, "mixup": 0.5}), f"run.dir={half}")
    rows, moved = (read_metrics(run)[1:] for run in (still, half))
    assert [row["reference_moved"] for row in moved] == [0, 1, 0]
    assert moved[1]["kl_k3"] == rows[1]["kl_k3"]
    assert 0.05 * rows[2]["kl_k3"] < moved[2]["kl_k3"] < 0.6 * rows[2]["kl_k3"]


def test_a_step_s_updates_end_on_the_kl_of_the_policy(configured, ranks, tmp_path) -> None:
    """Of four updates the first shows no KL, the second shows some; the other two are left out."""
    argv = configured()
    ranks.run(
        *(2, "command", *argv, f"run.dir={tmp_path / 'run'}", "train.num_steps=1", "train.epochs_per_step=2"),
        *("train.mini_batch_samples=8", "train.max_policy_kl=1e-9"),
    )
    (row,) = read_metrics(tmp_path / "run")[1:]
    assert row["actor_updates_left_out"] == 2
    assert row["policy_kl"] > 1e-9
