"""The first steps of rl may be the critic's alone; what it has learnt is exported and can be another run's critic."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.test_rl_layouts import config

STEPS = 3


@pytest.fixture
def argv(one_layer, data, tmp_path) -> list[str]:
    """PPO at TP2 with a critic that is made of the language model and a fresh head."""
    cfg: dict[str, Any] = config(
        {**one_layer, "other": one_layer["scorer"]}, data["prompts"], {"tp": 2}, critic_lam=1.0
    )
    cfg["critic"]["model"] = {"path": str(one_layer["plain"]), "fresh_head": True}
    cfg["critic"]["optim"] = {"lr": 3e-3}
    cfg["train"] |= {"num_steps": STEPS, "epochs_per_step": 2}
    cfg["checkpoint"] = {"every": 1, "export_every": 1}
    return argv_of("rl", cfg, tmp_path / "cfg.yaml")


def weights(run: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:06d}" / role / "model.safetensors")


def is_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(tensor, after[name]) for name, tensor in before.items() if name in after)


def test_the_actor_waits_for_the_critic_also_over_a_resume(argv, ranks, one_layer, tmp_path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    warm = "train.critic_warmup_steps=2"
    ranks.run(2, "command", *argv, warm, f"run.dir={whole}")
    start = load_file(one_layer["plain"] / "model.safetensors")
    assert not is_moved(start, weights(whole, 2, "actor"))
    assert is_moved(start, weights(whole, 3, "actor"))
    assert is_moved(weights(whole, 1, "critic"), weights(whole, 2, "critic"))
    rows = read_metrics(whole)[1:]
    assert ["policy_loss" in row for row in rows] == [False, False, True]
    assert ["value_loss" in row for row in rows] == [True, True, True]

    at = ("megarlhf.resume.points.checkpointer:Checkpointer", "boundary_reached")
    killed = ranks.run(2, command_until, 3, *at, *argv, warm, f"run.dir={parts}")
    assert [outcome for outcome, _ in killed] == ["killed"] * 2
    ranks.run(2, "command", *argv, warm, f"run.dir={parts}")
    for role in ("actor", "critic"):
        assert not is_moved(weights(whole, 3, role), weights(parts, 3, role)), role


def test_a_critic_that_is_trained_alone_starts_another_run(argv, ranks, tmp_path) -> None:
    """The actor has not moved, so that both runs' first step has the same responses: the second knows their values."""
    alone, after = tmp_path / "alone", tmp_path / "after"
    ranks.run(2, "command", *argv, f"train.critic_warmup_steps={STEPS}", f"run.dir={alone}")
    trained = [f"critic.model.path={alone / 'checkpoints/latest/critic'}", "critic.model.fresh_head=false"]
    ranks.run(2, "command", *argv, *trained, f"run.dir={after}", "train.num_steps=1")
    ignorant, taught = read_metrics(alone)[1], read_metrics(after)[1]
    assert taught["reward_mean"] == ignorant["reward_mean"]
    assert (ignorant["value_mean"], ignorant["explained_variance"]) == (0, 0), "a fresh head starts at zero"
    assert taught["explained_variance"] > 0
    assert taught["value_loss"] < 0.5 * ignorant["value_loss"]
