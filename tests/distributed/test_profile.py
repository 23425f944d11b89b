"""A profiled step of real runs on two ranks: traces and memory in the run directory, and the same metrics as without.

Not covered: GPUs.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.cost_metrics import reproducible
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.watch.profile import CURVE
from tests.command import argv_of
from tests.distributed.test_rl_layouts import config as rl_config
from tests.refuses import lines_naming, missing_names

SFT = Counter({"train/actor": 1, "optimizer/actor": 1, "eval": 1})
RL = Counter(
    {"rollout": 1, "reward": 1, "score/actor": 1, "score/reference": 1, "score/critic": 1, "advantages": 1, "eval": 1}
    | {"train/actor": 2, "train/critic": 2, "optimizer/actor": 2, "optimizer/critic": 2, "reshard": 1}
)
"""Ranges of step 2, but for `checkpoint`: as often as one step enters each phase."""
KINDS = {name.partition("/")[0] for name in (*SFT, *RL)}


def config(command: str, models: dict[str, Path], data: dict[str, Path]) -> dict[str, Any]:
    if command == "rl":
        made = rl_config({**models, "other": models["scorer"]}, data["prompts"], {"tp": 2})
        made["train"] |= {"num_steps": 2, "epochs_per_step": 1, "micro_batch_samples": 8}
        return made
    return {
        "actor": {"model": {"path": str(models["plain"])}, "optim": {"lr": 1e-3}},
        "data": {"train": str(data["sft"]), "validation": str(data["sft"])},
        "eval": {"max_samples": 4},
        "train": {"num_steps": 2, "mini_batch_samples": 8, "micro_batch_samples": 4},
    }


def inside(trace: dict[str, Any], name: str) -> set[str]:
    """Operations of torch in the first range of this name."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    outer = next(event for event in events if event["cat"] == "user_annotation" and event["name"] == name)
    ends = outer["ts"] + outer["dur"]
    return {event["name"] for event in events if event["cat"] == "cpu_op" and outer["ts"] <= event["ts"] <= ends}


@pytest.mark.parametrize("command, memory, phases", [("sft", 2, SFT), ("rl", 1, RL)])
def test_a_profiled_step(command, memory, phases, ranks, two_layers, data, tmp_path) -> None:
    """Memory is of the same step (sft), and of another one (rl)."""
    made = config(command, two_layers, data)
    recorded = {"profile": {"steps": [2], "memory_snapshot": memory}}
    for name, sections in (("plain", {}), ("profiled", recorded)):
        tree = {**made, **sections, "run": {"dir": str(tmp_path / name)}}
        said = ranks.run(2, "command", *argv_of(command, tree, tmp_path / f"{name}.yaml"))[0]
    steps = ", ".join(map(str, sorted({2, memory})))
    assert lines_naming(said, "profile", f"step {steps}", "2 rank")
    assert not missing_names(said, "a curve", "allocations", "snapshot")
    plain, profiled = (read_metrics(tmp_path / name) for name in ("plain", "profiled"))
    assert [row["step"] for row in plain] == [0, 1, 2]
    assert [reproducible(row) for row in profiled] == [reproducible(row) for row in plain]
    folder = tmp_path / "profiled/profile"
    curves = [f"step_{memory:06d}_rank_0000{rank}.memory.json" for rank in (0, 1)]
    traces = [f"step_000002_rank_0000{rank}.trace.json" for rank in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(curves + traces)
    for file in traces:
        trace = json.loads((folder / file).read_text())
        named = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        counted = Counter(name for name in named if name != "checkpoint" and name.partition("/")[0] in KINDS)
        assert counted == phases, "of the whole step 2, and of no other"
        for phase in phases.keys() & {"rollout", "score/actor", "train/actor"}:
            assert any(name.startswith("aten::") for name in inside(trace, phase)), phase
        assert {"aten::mm", "aten::silu"} & inside(trace, "train/actor")
    for file in curves:
        curve = json.loads((folder / file).read_text())
        assert max(event["args"]["bytes"] for event in curve["traceEvents"] if event.get("name") == CURVE) > 10_000
        assert "train/actor" in {event.get("name") for event in curve["traceEvents"]}
