"""Freezing by pattern: what is frozen stays to the bit, what is not is trained as if by itself, at every layout."""

import json
import shutil
from typing import Any
from unittest import mock

import numpy as np
import pytest
from torch.distributed.checkpoint import FileSystemReader

from megarlhf.resume.points import sharded_state
from megarlhf.runtime import Runtime
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.test_resume import TRAIN, command_line, rows, weights
from tests.distributed.test_resume_elsewhere import sft
from tests.distributed.written_out import STEPS, config

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "pp2": (2, {"pp": 2}), "dp2 full": (2, {}), "tp2": (2, {"tp": 2}),
    "tp2pp2 vpp2": (4, {"tp": 2, "pp": 2, "vpp": 2}),
}  # fmt: skip
ONLY = ["model.layers.3.*", "norm"]
"""Of four layers the last one, and the final norm: with pp = 2 the first stage has nothing to train."""


@pytest.fixture(scope="module")
def one(ranks, models, data) -> dict[str, Any]:
    return ranks.run(1, "sft_steps", config(models["plain"], data["sft"], {}, train_only=ONLY), STEPS)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_frozen_stays_and_the_rest_is_trained(layout, ranks, models, data, one) -> None:
    """Also where layers are computed again, whose input is then no parameter's. `freeze` says the same the other way
    round."""
    world_size, parallel = LAYOUTS[layout]
    frozen = {"freeze": ["embed_tokens", "lm_head", "model.layers.[0-2].*"]}
    role = {"recompute": "full"} if "full" in layout else {}
    found = ranks.run(world_size, "sft_steps", config(models["plain"], data["sft"], parallel, **frozen, **role), STEPS)
    np.testing.assert_allclose(found[0]["loss"], one["loss"], rtol=1e-5)
    np.testing.assert_allclose(found[0]["grad_norm"], one["grad_norm"], rtol=1e-5)
    full = ranks.run(1, "sft_steps", config(models["plain"], data["sft"], {}), 1)[0] if layout == "one" else None
    before = ranks.run(1, "sft_steps", config(models["plain"], data["sft"], {}), 0)[0]["weights"]
    for name, weight in found[0]["weights"].items():
        trained = name.startswith("model.layers.3.") or name == "model.norm.weight"
        gradient = found[0]["gradients"][0][name]
        assert bool(np.abs(gradient).max() > 0) == trained == (not np.array_equal(weight, before[name])), name
        np.testing.assert_allclose(weight, one["weights"][name], rtol=0, atol=1e-4, err_msg=name)
        if full is not None and trained:
            np.testing.assert_array_equal(gradient, full["gradients"][0][name], err_msg=name)


def layout(parallel: dict[str, int]) -> str:
    return f"actor.parallel={json.dumps(parallel)}"


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"tp": 2}])
def test_a_point_of_some_layers_goes_on_at_other_layouts(parallel, ranks, models, data, tmp_path) -> None:
    """Layers 0 and 1 have no optimizer state. Written by two stages, of which one has one of its layers to train alone,
    or by two ranks of which one has nothing of the vocabulary but padding, it goes on at the same layout bit for bit,
    and with replicas and on one rank up to rounding."""
    case, whole, run = sft(models, data), tmp_path / "whole", tmp_path / "run"
    frozen = "actor.freeze=['model.layers.[0-1].*', 'model.layers.2.mlp.*']"
    ranks.run(2, "command", *command_line(case, whole), frozen, layout(parallel))
    argv = [*command_line(case, run), frozen]
    assert ranks.run(2, command_until, 3, TRAIN, "step", *argv, layout(parallel))[0][0] == "killed"
    shutil.copytree(run, tmp_path / "elsewhere")
    assert "from resume/step_000002" in ranks.run(2, "command", *argv, layout(parallel))[0]
    assert rows(run) == rows(whole)
    assert weights(run) == weights(whole)
    argv = [*command_line(case, tmp_path / "elsewhere"), frozen]
    assert ranks.run(2, command_until, 2, TRAIN, "step", *argv, layout({}))[0][0] == "killed"
    assert "from resume/step_000003" in ranks.run(1, "command", *argv, layout({}))[0]
    for found, expected in zip(rows(tmp_path / "elsewhere"), rows(whole), strict=True):
        for metric in {"loss", "grad_norm"} & expected.keys():
            assert found[metric] == pytest.approx(expected[metric], rel=1e-5), (expected["step"], metric)
    assert sum("grad_norm" in row for row in rows(whole)) == 4


def test_a_point_with_all_layers_under_one_key_goes_on(ranks, models, data, tmp_path) -> None:
    """As earlier versions wrote it on one rank."""
    case, whole, run = sft(models, data), tmp_path / "whole", tmp_path / "run"
    frozen = "actor.freeze=['model.layers.[0-1].*']"
    ranks.run(1, "command", *command_line(case, whole), frozen)
    argv = [*command_line(case, run), frozen]
    assert ranks.run(1, written_together, *argv)[0] == "killed"
    keys = FileSystemReader(run / "resume/step_000002/actor").read_metadata().state_dict_metadata
    assert "optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight" in keys
    ranks.run(1, "command", *argv)
    assert rows(run) == rows(whole)
    assert weights(run) == weights(whole)


def written_together(runtime: Runtime, *argv: str) -> str:
    with mock.patch.object(sharded_state, "_trains_some", return_value=False):
        return command_until(runtime, 3, TRAIN, "step", *argv)[0]
