"""Freezing by pattern: what is frozen stays to the bit, what is not is trained as if by itself, at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.written_out import STEPS, config
from tests.ranks import RankPool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, {"pp": 2}),
    "dp2 full": (2, {}),
    "tp2pp2 vpp2": (4, {"tp": 2, "pp": 2, "vpp": 2}),
}
ONLY = ["model.layers.3.*", "norm"]
"""Of four layers the last one, and the final norm: with pp = 2 the first stage has nothing to train."""


@pytest.fixture(scope="module")
def one(ranks: RankPool, models: dict[str, Path], data: dict[str, Path]) -> dict[str, Any]:
    return ranks.run(1, "sft_steps", config(models["plain"], data["sft"], {}, train_only=ONLY), STEPS)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_frozen_stays_and_the_rest_is_trained(
    layout: str, ranks: RankPool, models: dict[str, Path], data: dict[str, Path], one: dict[str, Any]
) -> None:
    """Also where layers are computed again, whose input is then no parameter's. `freeze` says the same the other way
    round."""
    world_size, parallel = LAYOUTS[layout]
    frozen = {"freeze": ["embed_tokens", "lm_head", "model.layers.[0-2].*"]}
    role = {"recompute": "full"} if "full" in layout else {}
    found = ranks.run(world_size, "sft_steps", config(models["plain"], data["sft"], parallel, **frozen, **role), STEPS)
    np.testing.assert_allclose(found[0]["loss"], one["loss"], rtol=1e-5)
    np.testing.assert_allclose(found[0]["grad_norm"], one["grad_norm"], rtol=1e-5)
    full = ranks.run(1, "sft_steps", config(models["plain"], data["sft"], {}), 1)[0] if layout == "one" else None
    for name, weight in found[0]["weights"].items():
        trained = name.startswith("model.layers.3.") or name == "model.norm.weight"
        gradient = found[0]["gradients"][0][name]
        assert bool(np.abs(gradient).max() > 0) == trained, name
        np.testing.assert_allclose(weight, one["weights"][name], rtol=0, atol=1e-4, err_msg=name)
        if full is not None and trained:
            np.testing.assert_array_equal(gradient, full["gradients"][0][name], err_msg=name)
    before = ranks.run(1, "sft_steps", config(models["plain"], data["sft"], {}), 0)[0]["weights"]
    for name, weight in found[0]["weights"].items():
        same = np.array_equal(weight, before[name])
        assert same != (name.startswith("model.layers.3.") or name == "model.norm.weight"), name
