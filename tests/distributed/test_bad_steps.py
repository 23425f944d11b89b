"""NaN on one rank only: every rank skips the step, and nothing has changed, bit for bit; then training goes on.

Not covered: NCCL, bf16.
"""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarlhf.config import SFTConfig
from megarlhf.models.role import Role, build_role
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.not_finite import first_not_finite
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.skipped_steps import Failures, StepGuard, Update
from megarlhf.trainers.supervised.loop import train_on
from megarlhf.trainers.supervised.sft import SupervisedFineTuning
from tests.command import argv_of
from tests.distributed import jobs
from tests.distributed.test_rl_layouts import config as rl_config
from tests.refuses import lines_naming


def config(models: dict[str, Path], data: dict[str, Path], parallel: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": {"dir": "unused"},
        "actor": {"model": {"path": str(models["plain"])}, "parallel": parallel, "optim": {"lr": 1e-3}},
        "data": {"train": str(data["sft"]), "max_prompt_tokens": 64, "max_response_tokens": 64},
        "train": {"num_steps": 9, "mini_batch_samples": 8, "micro_batch_samples": 2, "max_skipped_in_a_row": 4},
    }


def state_of(role: Role) -> list[Tensor]:
    """Copies of every tensor and number that a step changes."""
    trainer = role.trainer
    assert trainer is not None
    role.parts.to_compute()
    found: list[Tensor] = [p.detach().clone() for p in role.shard.module.parameters()]

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value.detach().clone())
        elif isinstance(value, dict):
            for part in value.values():
                walk(part)
        elif isinstance(value, list | tuple):
            for part in value:
                walk(part)
        elif isinstance(value, int | float):
            found.append(torch.tensor(value, dtype=torch.float64))

    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        walk(list(part.optimizer.state.values()))
    walk(trainer.scheduler.state_dict())
    return found


def poisoned_steps(runtime: Runtime, tree: dict[str, Any]) -> dict[str, Any]:
    """A good step; one with NaN in one parameter's gradient on the last rank only, for a matrix and for a norm that
    tensor-parallel ranks share; one with NaN in one rank's loss; a good one; what became of them."""
    cfg = SFTConfig.model_validate(tree)
    objective, samples = SupervisedFineTuning(cfg), jobs._sft_samples(cfg)
    role = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=9)
    trainer = role.trainer
    assert trainer is not None
    phases, last = Phases(), runtime.rank == runtime.world_size - 1
    bad_steps = StepGuard(cfg.train, Failures.of(cfg, "sft"), phases)
    accumulate = trainer.accumulate
    spoil = ""

    def accumulate_and_spoil(batches: Any, loss: Any) -> dict[str, float]:
        if spoil == "loss" and last:  # on this rank's own micro-batches, before anything is summed
            weight = next(p for name, p in role.shard.module.named_parameters() if "linear_fc1" in name)
            kept, handle = weight.detach().clone(), weight.data
            handle.fill_(math.nan)
            sums = accumulate(batches, loss)
            handle.copy_(kept)
            return sums
        sums = accumulate(batches, loss)
        if spoil and last:
            named = dict(role.shard.module.named_parameters())
            named[next(name for name in named if spoil in name)].main_grad.view(-1)[0] = math.nan
        return sums

    trainer.accumulate = accumulate_and_spoil  # type: ignore[method-assign]
    report: dict[str, Any] = {"changed": [], "metrics": []}
    for step, spoil in enumerate(["", "linear_fc1.weight", "layernorm", "loss", ""]):  # noqa: B007 -- read above
        before = state_of(role)
        chunk = samples[step * 8 : step * 8 + 8]
        metrics = train_on(objective, role, chunk, Update(step, None, range(8)), bad_steps, phases)
        after = state_of(role)
        report["metrics"].append(metrics)
        report["changed"].append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    report["count"] = len(before)
    return report


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "sequence_parallel": False}),
    "tp2_sequence_parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_on_one_rank_is_skipped_on_all(layout, ranks, two_layers, data, tmp_path) -> None:
    world_size, parallel = LAYOUTS[layout]
    tree = config(two_layers, data, parallel)
    tree["run"]["dir"] = str(tmp_path)
    reports = ranks.run(world_size, poisoned_steps, tree)
    for rank, report in enumerate(reports):
        assert [m["skipped_steps"] for m in report["metrics"]] == [0, 1, 1, 1, 0], rank
        assert report["changed"] == [True, False, False, False, True], rank
        assert report["count"] > 20
        for metrics in report["metrics"][1:4]:
            assert metrics["loss"] is None
            assert metrics["grad_norm"] is None
        assert math.isfinite(report["metrics"][4]["loss"])
    learning_rates = [m["learning_rate"] for m in reports[0]["metrics"]]
    assert learning_rates[1] == learning_rates[4], "a skipped step is none of the schedule's"
    kept = sorted((tmp_path / "failures").iterdir())
    assert [path.name for path in kept] == [f"step_{n:06d}_actor" for n in (2, 3, 4)]
    files = {f"rank_{rank:05d}.{kind}" for rank in range(world_size) for kind in ("json", "pt")}
    assert {path.name for path in kept[0].iterdir()} == files | {"config.yaml", "failure.json", "point"}
    first, *others = [{file.name: file.stat() for file in (path / "point/actor").glob("*.distcp")} for path in kept]
    assert [os.path.samestat(first[name], other[name]) for other in others for name in first] == [True] * 2 * len(first)
    assert {stat.st_nlink for stat in first.values()} == {3}, "the same weights are kept once"


def find_first(runtime: Runtime, tree: dict[str, Any], kind: str, where: str) -> str | None:
    """What `first_not_finite` says of a step of a model that `kind` spoils at `where`."""
    cfg = SFTConfig.model_validate(tree)
    objective, samples = SupervisedFineTuning(cfg), jobs._sft_samples(cfg)[:4]
    role = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1)
    module = role.shard.module.get_submodule(where) if where else role.shard.module

    def spoil(inside: Any, arguments: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if kind == "gradient":
            first.register_hook(lambda grad: grad * math.nan)
            return None
        spoiled = first.clone()
        spoiled.view(-1)[5] = math.inf
        return (spoiled, *output[1:]) if isinstance(output, tuple) else spoiled

    if kind == "weight":
        module.weight.data.view(-1)[3] = math.nan
    elif kind:
        module.register_forward_hook(spoil)
    loss = objective.training_loss(role, samples)
    batches = objective.micro_batches(role, samples)
    inside = list(role.shard.module.modules())
    hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in inside]
    found = first_not_finite(role.shard.module, lambda: role.accumulate(batches, loss))
    assert hooks == [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in inside]
    return None if found is None else str(found)


FC1, PROJ = "decoder.layers.1.mlp.linear_fc1", "decoder.layers.0.self_attention.linear_proj"


@pytest.mark.parametrize(
    "kind, where, expected",
    [
        ("", "", None),
        ("weight", FC1, f"weight weight of {FC1}: 1 NaN and 0 infinite of "),
        ("output", PROJ, f"output of {PROJ}: 0 NaN and 1 infinite of "),
        ("gradient", FC1, f"gradient of output of {FC1}: "),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named(kind, where, expected, ranks, two_layers, data) -> None:
    (found,) = ranks.run(1, find_first, config(two_layers, data, {}), kind, where)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(expected), found


def test_a_run_whose_steps_are_all_skipped_ends_with_status_4(ranks, two_layers, data, tmp_path) -> None:
    """Two steps are logged with null, the third ends the run; nothing was saved."""
    tree = config(two_layers, data, {})
    tree["run"]["dir"] = str(tmp_path / "run")
    tree["train"] |= {"max_skipped_in_a_row": 3, "skip_grad_norm_above": 1e-9}
    results = ranks.run(2, "command_status", *argv_of("sft", tree, tmp_path / "cfg.yaml"))
    assert [status for status, _ in results] == [4, 4], results
    assert lines_naming(results[0][1], "3 optimizer step", "train.max_skipped_in_a_row = 3")
    rows = read_metrics(tmp_path / "run")[1:]
    assert [(row["step"], row["loss"], row["grad_norm"], row["skipped_steps"]) for row in rows] == [
        (1, None, None, 1),
        (2, None, None, 1),
    ]
    assert not (tmp_path / "run/checkpoints").exists()
    kept = sorted(path.name for path in (tmp_path / "run/failures").iterdir())
    assert kept == [f"step_{n:06d}_actor" for n in (1, 2, 3)]


def test_skipped_steps_of_actor_and_critic_are_counted_and_their_metrics_null(
    ranks, two_layers, data, tmp_path
) -> None:
    """Two passes over two mini-batches: eight optimizer steps, none of which is made."""
    tree = rl_config(two_layers, data["prompts"], {})
    tree["run"]["dir"] = str(tmp_path)
    tree["train"] |= {"max_skipped_in_a_row": 9, "skip_grad_norm_above": 1e-9}
    step = ranks.run(1, "rl_step", tree)[0]
    assert step["metrics"]["skipped_steps"] == 8
    names = ("policy_loss", "loss", "entropy", "actor_grad_norm", "value_loss", "critic_grad_norm")
    assert [step["metrics"][name] for name in (*names, "first_ratio_deviation")] == [None] * 7
    newest = sorted(path.name for path in (tmp_path / "failures").iterdir())
    assert newest[-2:] == ["step_000001_update_0003_actor", "step_000001_update_0003_critic"]
