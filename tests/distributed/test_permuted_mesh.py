"""Ranks in another order than by number: rl, its process groups, and what it saves are those of the natural mesh.

TP4 with engines of two, (0, 2, 1, 3), and TP2 with engines of four, which is the same permutation of another mesh.
Not covered: vLLM under a permuted mesh (test_vllm_families.py), NCCL.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from megarlhf.layout import MeshLayout, engine_order
from megarlhf.weights.checkpoint.conversion import MegatronTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from tests.distributed import test_rl_layouts, test_sft_layouts
from tests.distributed.compare import assert_gradients_equal, assert_weights_equal

ORDER = (0, 2, 1, 3)


def test_the_orders_of_these_tests_are_those_that_engines_ask_for() -> None:
    assert engine_order(MeshLayout(tp=4), 2, 4) == engine_order(MeshLayout(tp=2, dp=2), 4, 4) == ORDER


def rl_config(two_layers: dict[str, Path], data: Path, **parallel: dict[str, Any]) -> dict[str, Any]:
    """Of the layouts' tests, with a layout for each role, and small: one optimizer step on eight samples."""
    cfg = test_rl_layouts.config(two_layers, data, {})
    cfg["train"] |= {"prompts_per_step": 2, "micro_batch_samples": 4, "epochs_per_step": 1}
    cfg["rollout"]["max_response_tokens"] = 3
    for role, sizes in parallel.items():
        cfg[role]["parallel"] = sizes
    return cfg


ALIKE = {role: {"tp": 4} for role in ("actor", "reference", "critic", "reward_model")}
MIXED = {"actor": {"tp": 2}, "reference": {"tp": 2}, "critic": {"tp": 4}, "reward_model": {"pp": 2}}


@pytest.mark.parametrize(
    ("parallel", "permuted", "more_groups"),
    [(ALIKE, {"actor", "reference", "critic", "reward_model"}, 0), (MIXED, {"actor", "reference"}, 1)],
)
def test_a_ppo_step_is_that_of_the_natural_mesh(parallel, permuted, more_groups, ranks, two_layers, data) -> None:
    """Samples, columns, losses and gradients; roles of the actor's layout stand as it does, in its process groups.

    Where a role keeps the natural order, the group of all four ranks exists in both orders: one more.
    """
    cfg = rl_config(two_layers, data["prompts"], **parallel)
    natural = ranks.run(4, "rl_step", cfg)[0]
    everyone = ranks.run(4, "rl_step", cfg, ORDER)
    actual = everyone[0]
    assert natural["orders"] == dict.fromkeys(parallel)
    assert actual["orders"] == {role: ORDER if role in permuted else None for role in parallel}
    assert actual["num_groups"] == natural["num_groups"] + more_groups
    assert all(rank["metrics"] == actual["metrics"] and rank["responses"] == actual["responses"] for rank in everyone)
    assert actual["responses"] == natural["responses"]
    assert actual["columns"].keys() == natural["columns"].keys()
    for name, column in natural["columns"].items():
        np.testing.assert_allclose(actual["columns"][name], column, atol=1e-5, rtol=1e-5, err_msg=name)
    assert actual["metrics"].keys() == natural["metrics"].keys()
    for name, value in natural["metrics"].items():
        np.testing.assert_allclose(actual["metrics"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for role in ("actor", "critic"):
        assert_gradients_equal(actual["gradients"][role][0], natural["gradients"][role][0], what=role)
        assert_weights_equal(actual["weights"][role], natural["weights"][role], what=role)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("parallel", [{"tp": 4}, {"tp": 2, "pp": 2}])
def test_checkpoints_are_those_of_the_natural_mesh_bit_for_bit(parallel, ranks, two_layers, data, tmp_path) -> None:
    """Of actor and critic, as loaded and after a step of SFT, saved as the trainers save; read back and saved again.

    As loaded, the actor is also the directory that it came from, in which no mesh has a part.
    """
    cfg = test_sft_layouts.config(two_layers["plain"], data["sft"], parallel)
    for name, order in (("natural", None), ("permuted", ORDER)):
        ranks.run(4, "saved_roles", cfg, str(tmp_path / name), order)
    natural, permuted = files(tmp_path / "natural"), files(tmp_path / "permuted")
    assert natural.keys() == permuted.keys()
    assert {name for name in natural if natural[name] != permuted[name]} == set()
    actor = "actor/model.safetensors"
    original = load_file(two_layers["plain"] / "model.safetensors")
    saved = load_file(tmp_path / "permuted/step_000001" / actor)
    assert saved.keys() == original.keys()
    for tensor, values in original.items():
        np.testing.assert_array_equal(saved[tensor], values, err_msg=tensor)
    assert permuted[f"step_000002/{actor}"] != permuted[f"step_000001/{actor}"], "the step trained nothing"
    assert permuted[f"step_000003/{actor}"] == permuted[f"step_000002/{actor}"]


def test_the_first_loss_from_megatron_s_formats(ranks, two_layers, data, tmp_path) -> None:
    """Loaded into a permuted TP4 from torch_dist of TP2 x PP2: to the last bit the loss of the natural mesh."""
    convert(open_checkpoint(two_layers["plain"]), tmp_path / "torch_dist", MegatronTarget(tp=2, pp=2))
    cfg = test_sft_layouts.config(tmp_path / "torch_dist", data["sft"], {"tp": 4})
    natural, permuted = (ranks.run(4, "sft_steps", cfg, 1, order)[0] for order in (None, ORDER))
    assert natural["loss"][0] > 1.0
    assert permuted["loss"] == natural["loss"]
    assert_gradients_equal(permuted["gradients"][0], natural["gradients"][0])
