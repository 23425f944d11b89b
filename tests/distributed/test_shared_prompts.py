"""Computing the prompt of several responses once changes no number: shared and unshared runs are the same training.

Every packed run of the other tests shares prompts too, and is compared there with padded ones and with Hugging Face.
Not covered: kernels of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.compare import assert_gradients_equal, assert_weights_equal
from tests.distributed.test_packed_layouts import GRPO, rl, supervised, write_ragged
from tests.ranks import RankPool

BUDGET = 150
STEPS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": False}),
    "tp2 with sequence parallelism": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}),
}
FAMILIES = ("mistral", "gpt2", "opt", "qwen3", "phi3", "mixtral")
"""A sliding window of few tokens, learned positions twice, norms of queries and keys, fused matrices, experts."""


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_ragged(tmp_path_factory.mktemp("ragged"), seed=5)


def micro(share: bool) -> dict[str, Any]:
    return {"max_tokens_per_micro_batch": BUDGET, "share_prompts": share}


def of_rm(loss: str) -> Callable[..., tuple[str, dict[str, Any], tuple[Any, ...]]]:
    def configured(
        models: dict[str, Path], data: dict[str, Path], parallel: dict[str, Any], share: bool
    ) -> tuple[str, dict[str, Any], tuple[Any, ...]]:
        tree = supervised("reward_model", models["other"], data["pairs"], parallel, micro(share)) | {"loss": loss}
        tree["train"]["mini_batch_samples"] = 8
        return "rm_steps", tree, (STEPS,)

    return configured


def of_rl(**algo: Any) -> Callable[..., tuple[str, dict[str, Any], tuple[Any, ...]]]:
    def configured(
        models: dict[str, Path], data: dict[str, Path], parallel: dict[str, Any], share: bool
    ) -> tuple[str, dict[str, Any], tuple[Any, ...]]:
        """Three updates of two whole groups."""
        tree = rl(models, data["prompts"], parallel, micro(share), **algo)
        tree["train"] |= {"prompts_per_step": 6, "mini_batch_samples": 8, "shuffle": "groups"}
        tree["rollout"]["num_samples_per_prompt"] = 4
        if "group" in algo.get("advantage", "gae"):
            tree["critic"] = None
        return "rl_step", tree, ()

    return configured


JOBS = {
    "rm": of_rm("last_token"),
    "rm, aligned span": of_rm("aligned_span"),
    "ppo": of_rl(),
    "grpo": of_rl(**GRPO),
}


def assert_same(shared: dict[str, Any], apart: dict[str, Any]) -> None:
    """Losses, norms, every gradient of the first update, and weights after three."""
    if "metrics" not in shared:
        np.testing.assert_allclose(shared["loss"], apart["loss"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(shared["grad_norm"], apart["grad_norm"], rtol=1e-5)
        for name, value in apart["evaluation"].items():
            np.testing.assert_allclose(shared["evaluation"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        assert_gradients_equal(shared["gradients"][0], apart["gradients"][0])
        assert_weights_equal(shared["weights"], apart["weights"])
        return
    assert shared["responses"] == apart["responses"]
    np.testing.assert_allclose(shared["rewards"], apart["rewards"], atol=1e-5)
    for name, column in apart["columns"].items():
        np.testing.assert_allclose(shared["columns"][name], column, atol=1e-5, rtol=1e-5, err_msg=name)
    assert shared["metrics"]["first_ratio_deviation"] == apart["metrics"]["first_ratio_deviation"] == 0.0
    for name in {"value_loss", "entropy", "actor_grad_norm", "critic_grad_norm"} & apart["metrics"].keys():
        np.testing.assert_allclose(shared["metrics"][name], apart["metrics"][name], rtol=1e-5, err_msg=name)
    for name in ("policy_loss", "loss"):
        np.testing.assert_allclose(shared["metrics"][name], apart["metrics"][name], rtol=1e-5, atol=1e-7)
    for name in apart["weights"]:
        assert_gradients_equal(shared["gradients"][name][0], apart["gradients"][name][0], what=name)
        assert_weights_equal(shared["weights"][name], apart["weights"][name], what=name)


@pytest.fixture(scope="module")
def run(ranks: RankPool, two_layers: dict[str, Path], ragged: dict[str, Path]) -> Any:
    made: dict[tuple[str, str, bool], dict[str, Any]] = {}

    def call(kind: str, layout: str, share: bool) -> dict[str, Any]:
        if (kind, layout, share) not in made:
            world_size, parallel = LAYOUTS[layout]
            job, tree, more = JOBS[kind](two_layers, ragged, parallel, share)
            made[kind, layout, share] = ranks.run(world_size, job, tree, *more)[0]
        return made[kind, layout, share]

    return call


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", JOBS)
def test_shared_prompts_are_the_same_training(kind: str, layout: str, run: Any) -> None:
    shared, apart = run(kind, layout, True), run(kind, "tp1", False)
    assert_same(shared, apart)
    if "metrics" in shared:
        assert apart["metrics"]["prompts_saved"] == 0
        assert apart["metrics"]["prompts_computed"] == 24
        assert shared["metrics"]["prompts_computed"] + shared["metrics"]["prompts_saved"] == 24
        assert shared["metrics"]["prompts_saved"] >= 12, "nothing was shared"
