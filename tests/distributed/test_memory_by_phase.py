"""Whatever is in host memory meanwhile, and whatever is computed again: a step is the same to the bit.

Not covered here: the rollout engine (tests/distributed/test_engine_sleeps.py), resumes under a policy
(tests/distributed/test_resume.py), other commands and layouts (tests/distributed/test_invariance.py).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_rl_layouts import config

AWAY = {"parameters": True, "gradients": True, "optimizer": True}
STREAMED = AWAY | {"optimizer": "stream"}
HERE = {"parameters": False, "gradients": False, "optimizer": False}


def ppo(
    two_layers: dict[str, Path],
    data: dict[str, Path],
    parallel: dict[str, Any],
    *,
    dtype: str = "fp32",
    **of_roles: Any,
) -> dict[str, Any]:
    """Two updates of actor and critic, with a reference and a reward model."""
    cfg = config(two_layers, data["prompts"], parallel)
    cfg["train"] |= {"epochs_per_step": 1, "micro_batch_samples": None, "max_tokens_per_micro_batch": 48}
    for name in ("actor", "critic", "reference", "reward_model"):
        cfg[name] = cfg[name] | of_roles | {"model": cfg[name]["model"] | {"dtype": dtype}}
    return cfg


TP2_PP2 = {"tp": 2, "pp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[int, dict[str, Any], str, dict[str, Any]]] = {
    "away, bf16": (1, {}, "bf16", {"offload": AWAY}),
    "streamed, bf16": (1, {}, "bf16", {"offload": STREAMED}),
    "away, DP2, bf16": (2, {}, "bf16", {"offload": AWAY}),
    "streamed, DP2, bf16": (2, {}, "bf16", {"offload": STREAMED}),
    "streamed, recomputed, TP2 PP2": (4, TP2_PP2, "fp32", {"offload": STREAMED, "recompute": "full"}),
    "core attention, TP2": (2, {"tp": 2}, "bf16", {"recompute": "core_attention"}),
    "all layers, PP2": (2, {"pp": 2}, "bf16", {"recompute": "full"}),
}


@pytest.fixture(scope="module")
def here(ranks, two_layers, data) -> Any:
    """A step with everything on the device and nothing computed again; each layout and dtype once."""
    made: dict[tuple[str, str], Any] = {}

    def call(world_size: int, parallel: dict[str, Any], dtype: str) -> Any:
        key = f"{world_size} {parallel}", dtype
        if key not in made:
            cfg = ppo(two_layers, data, parallel, dtype=dtype, offload=HERE)
            made[key] = ranks.run(world_size, "rl_step", cfg)[0]
        return made[key]

    return call


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_to_the_bit(case, ranks, two_layers, data, here) -> None:
    world_size, parallel, dtype, of_roles = CASES[case]
    expected = here(world_size, parallel, dtype)
    cfg = ppo(two_layers, data, parallel, dtype=dtype, **of_roles)
    actual = ranks.run(world_size, "rl_step", cfg, None, False, False, 4096)[0]
    assert actual["metrics"] == expected["metrics"]
    assert (actual["host_bytes"] > 0) == ("offload" in of_roles)
    for role in ("actor", "critic"):
        for number, gradients in enumerate(expected["gradients"][role]):
            for name, gradient in gradients.items():
                message = f"{role}, update {number}, {name}"
                np.testing.assert_array_equal(actual["gradients"][role][number][name], gradient, err_msg=message)
        for name, weight in expected["weights"][role].items():
            np.testing.assert_array_equal(actual["weights"][role][name], weight, err_msg=f"{role} {name}")


def test_with_all_away_only_the_role_at_work_is_on_the_device(ranks, two_layers, data) -> None:
    """Bytes of each kind that are there when a phase begins to compute, of all roles together."""
    cfg = ppo(two_layers, data, {}, dtype="bf16", offload=AWAY)
    there = ranks.run(1, "rl_step", cfg)[0]["there"]
    whole = there["train/actor"]["actor"]
    assert whole["parameters"] > 0
    assert whole["gradients"] == 2 * whole["parameters"], "fp32 beside bf16"
    for phase, of_roles in there.items():
        kind, _, name = phase.partition("/")
        for role, of_parts in of_roles.items():
            expected = {"score": {"parameters"}, "train": {"parameters", "gradients"}}[kind] if role == name else set()
            assert {part for part, nbytes in of_parts.items() if nbytes} == expected, (phase, role)
