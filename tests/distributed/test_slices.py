"""Responses drawn in slices: where the weights do not change, the samples, columns and metrics of whole responses.

Bit for bit in fp32 on a CPU. Not covered: GPUs; kills in the middle (`make test-faults`).
"""

from typing import Any

import pytest

from tests.command import argv_of
from tests.distributed.slices_jobs import command_with_columns
from tests.distributed.test_resume import rows
from tests.distributed.test_rl_layouts import config

OF_AGE = ("gap", "staleness", "in_flight", "idle")
"""Parts of the names of metrics that are of slices and weights of another age."""
SAME_WEIGHTS = {"lr": 1e-30}
"""A learner that changes nothing: its updates are lost in rounding."""


def tree(models: dict[str, Any], data: dict[str, Any], *, engine: str = "vllm", tp: int = 1, **rollout: Any) -> dict[str, Any]:
    made = config({**models, "other": models["scorer"]}, data["prompts"], {"tp": tp}, advantage="group_relative")
    del made["critic"]
    made["actor"]["optim"] = SAME_WEIGHTS
    made["train"] |= {"num_steps": 4}
    made["rollout"] |= {"engine": engine, **rollout}
    made["algo"] |= {"rollout_correction": {"kind": "truncate"}, "entropy_coef": 0.0, "kl": {"log": True}}
    return made


def run(ranks: Any, world: int, cfg: dict[str, Any], path: Any, **keys: Any) -> tuple[Any, list[dict[str, Any]], str]:
    path.mkdir()
    argv = argv_of("rl", {**cfg, "run": {"dir": str(path / "run")}}, path / "cfg.yaml")
    written, steps = ranks.run(world, command_with_columns, *argv, *(f"{k}={v}" for k, v in keys.items()))[0]
    metrics = [{k: v for k, v in row.items() if not any(part in k for part in OF_AGE)} for row in rows(path / "run")]
    return steps, metrics, written


@pytest.mark.parametrize("engine, world, tp", [("megatron", 1, 1), ("vllm", 1, 1), ("vllm", 2, 1), ("vllm", 2, 2)])
def test_slices_of_unchanged_weights_are_the_whole_responses(engine, world, tp, ranks, vllm_ranks, two_layers, data, tmp_path):
    pool = vllm_ranks if engine == "vllm" else ranks
    cfg = tree(two_layers, data, engine=engine, tp=tp)
    whole, metrics, _ = run(pool, world, cfg, tmp_path / "whole")
    sliced, sliced_metrics, _ = run(pool, world, cfg, tmp_path / "sliced", **{"rollout.slices": 3})
    for step, (one, other) in enumerate(zip(whole, sliced, strict=True)):
        assert one["columns"].keys() == other["columns"].keys()
        for name, column in one["columns"].items():
            assert other["columns"][name] == column, (step, name)
        by_rule = [[max(0, step - 2 + token // 2) for token in range(len(row))] for row in one["columns"]["responses"]]
        assert other["versions"] == by_rule
    different = {
        name: (one.get(name), other.get(name))
        for one, other in zip(metrics, sliced_metrics, strict=True)
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    }
    assert different == {}
