"""Sequences cut over context-parallel ranks: the same training as one process, packed and padded.

Three optimizer steps each, fp32. Not covered: kernels of a GPU, and TransformerEngine's ring, which takes the same
shares (tests/models/test_context_attention.py says what it is called with).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


from tests.distributed.test_packed_layouts import (
    GRPO,
    PACKED,
    PADDED,
    assert_same_training,
    rl,
    supervised,
    write_ragged,
)
from tests.ranks import RankPool

STEPS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
    "cp2dp2": (4, {"cp": 2}),
    "tp2cp2_sequence_parallel": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}),
    "cp2pp2": (4, {"cp": 2, "pp": 2}),
}

JOBS = {
    "sft": ("sft_steps", lambda m, d, *how: supervised("actor", m["plain"], d["sft"], *how), (STEPS,)),
    "sft_tied": ("sft_steps", lambda m, d, *how: supervised("actor", m["tied"], d["sft"], *how), (STEPS,)),
    "rm": ("rm_steps", lambda m, d, *how: supervised("reward_model", m["other"], d["pairs"], *how), (STEPS,)),
    "ppo": ("rl_step", lambda m, d, *how: rl(m, d["prompts"], *how), ()),
    "grpo": ("rl_step", lambda m, d, *how: rl(m, d["prompts"], *how, **GRPO), ()),
}


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_ragged(tmp_path_factory.mktemp("ragged"), seed=7)


@pytest.fixture(scope="module")
def run(ranks: RankPool, two_layers: dict[str, Path], ragged: dict[str, Path]) -> Any:
    """A kind of training at a layout, padded or packed; each is run once."""
    made: dict[tuple[str, str, bool], dict[str, Any]] = {}

    def call(kind: str, layout: str, *, packed: bool) -> dict[str, Any]:
        key = (kind, layout, packed)
        if key not in made:
            job, configure, args = JOBS[kind]
            world_size, parallel = LAYOUTS[layout]
            cfg = configure(two_layers, ragged, parallel, PACKED if packed else PADDED)
            cfg["train"] |= {"mini_batch_samples": 8} | ({"epochs_per_step": STEPS} if job == "rl_step" else {})
            made[key] = ranks.run(world_size, job, cfg, *args)[0]
        return made[key]

    return call


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", JOBS)
def test_equals_one_process(kind: str, packed: bool, layout: str, run: Any) -> None:
    """Loss and gradient norm of three steps, every gradient of the first, weights after them; what was sampled."""
    actual = run(kind, layout, packed=packed)
    assert_same_training(actual, run(kind, "one", packed=False))
