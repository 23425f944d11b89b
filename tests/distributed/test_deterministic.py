"""A run of `rl` with `run.deterministic`, as a user starts it; and what its checkpoints say of where they come from.

Not covered: GPUs. On a CPU the numbers are the same with and without, up to the order of sums.
"""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarlhf.observe.records.cost_metrics import reproducible
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.provenance import FILE, read_provenance
from megarlhf.runtime import Runtime
from tests.command import argv_of
from tests.distributed import jobs
from tests.distributed.test_rl_layouts import config as rl_config
from tests.refuses import command_refuses, missing_names

SET = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def _command(runtime: Runtime, *argv: str) -> dict[str, Any]:
    """Run it, and leave this process as it was."""
    from megarlhf.models import build

    before, modes = dict(os.environ), []

    def settings(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        modes.append(made.deterministic_mode)
        return made

    make = build.transformer_config
    try:
        with mock.patch.object(build, "transformer_config", settings):
            jobs.command(runtime, *argv)
        return {
            "torch": torch.are_deterministic_algorithms_enabled(),
            "environment": {name: os.environ.get(name) for name in SET},
            "megatron": modes,
        }
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        os.environ.clear()
        os.environ.update(before)


def test_every_rank_is_told_and_checkpoints_say_where_they_come_from(ranks, two_layers, data, tmp_path) -> None:
    tree = rl_config({**two_layers, "other": two_layers["scorer"]}, data["prompts"], {}, advantage="group_relative")
    tree["train"] |= {"num_steps": 1, "prompts_per_step": 4}
    tree["checkpoint"] = {"every": 1, "every_minutes": 0}
    file = tmp_path / "rl.yaml"

    def argv(name: str, *overrides: str) -> list[str]:
        return [*argv_of("rl", {**tree, "run": {"dir": str(tmp_path / name)}}, file), *overrides]

    for told in ranks.run(2, _command, *argv("fixed", "run.deterministic=true")):
        assert told["torch"]
        assert told["environment"] == SET
        assert told["megatron"]
        assert all(told["megatron"])
    for told in ranks.run(2, _command, *argv("plain")):
        assert not told["torch"]
        assert not any(told["megatron"])
    fixed, plain = (reproducible(read_metrics(tmp_path / run)[-1]) for run in ("fixed", "plain"))
    assert fixed == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert fixed["loss/actor" if "loss/actor" in fixed else "tokens"]

    export, point = tmp_path / "fixed/checkpoints/step_000001/actor", tmp_path / "fixed/resume/step_000001"
    manifest = json.loads((point / "MANIFEST.json").read_text())["manifest"]
    described = {f"actor/hf/{path.name}" for path in export.iterdir()} - {f"actor/hf/{FILE}"}
    described -= {name for name in described if ".safetensors" in name}
    assert {f"actor/{FILE}", "actor/hf/config.json", "actor/hf/tokenizer.model", *described} <= manifest["files"].keys()
    assert all((point / name).read_bytes() == (export / Path(name).name).read_bytes() for name in described)
    stated = read_provenance(export)
    assert stated is not None
    assert stated == read_provenance(point / "actor")
    assert (stated.command, stated.role, stated.run, stated.step) == ("rl", "actor", str(tmp_path / "fixed"), 1)
    assert stated.base.path == tree["actor"]["model"]["path"]
    assert stated.reference is not None
    assert stated.reference.digest == manifest["reference"]
    assert stated.base.digest == stated.reference.digest

    tree["reference"] = None
    of_the_run = (f"rl run {tmp_path / 'fixed'}", "step 1", str(stated.reference.path), stated.reference.digest)
    for model in (f"actor.model.path={export}", f"actor.model.path={point / 'actor'}"):
        command_refuses(ranks, argv("by_hand", model, "--dry-run"), *of_the_run)
    tree["reference"] = {"model": {"path": str(two_layers["other"])}}
    chosen = argv("by_hand", f"actor.model.path={point / 'actor'}", "train.num_steps=0")
    assert not missing_names(ranks.run(1, "command", *chosen)[0], "WARNING", "the KL", str(tmp_path / "fixed"))
