"""What nobody reads is not computed: a reference without a KL, and old log-probs that the only update makes itself.

Not covered here: a whole run with and without them (tests/test_pipeline.py), and what it saves (make bench-packing).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_rl_layouts import config

GRPO = {"advantage": "group_relative", "entropy_coef": 0.01}
IN_LOSS = {"coef": 0.05, "placement": "loss", "estimator": "k3"}


def one_update(
    two_layers: dict[str, Path], data: dict[str, Path], parallel: dict[str, Any], *, packed: bool = False, **algo: Any
) -> dict[str, Any]:
    """One pass with one optimizer step."""
    cfg = config(two_layers, data["prompts"], parallel, micro_batch_samples=2, **({"kl": {}} | GRPO | algo))
    cfg["train"] |= {"mini_batch_samples": 16, "epochs_per_step": 1}
    if packed:
        cfg["train"] |= {"micro_batch_samples": None, "max_tokens_per_micro_batch": 48}
    return cfg


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "packed, TP2 PP2": (4, {"tp": 2, "pp": 2}, {"packed": True}),
    "PP2, KL in the loss": (2, {"pp": 2}, {"kl": IN_LOSS}),
    "DP2, packed, KL in the loss by the ratio": (2, {}, {"packed": True, "kl": IN_LOSS | {"ratio_weighted": True}}),
    "TP2 SP, GSPO": (2, {"tp": 2, "sequence_parallel": True}, {"policy_loss": "gspo"}),
    "truncated": (1, {}, {"rollout_correction": {"kind": "truncate", "high": 1.0}}),
    "DP2, packed, masked": (2, {}, {"packed": True, "rollout_correction": {"kind": "mask", "level": "geometric"}}),
    "with a critic": (1, {}, {"advantage": "gae"}),
}


@pytest.mark.parametrize("case", CASES)
def test_without_old_logprobs_before_it_an_update_is_the_same_to_the_bit(case, ranks, two_layers, data) -> None:
    world_size, parallel, options = CASES[case]
    cfg = one_update(two_layers, data, parallel, **options)
    expected = ranks.run(world_size, "rl_step", cfg, None, True)[0]
    actual = ranks.run(world_size, "rl_step", cfg)[0]
    assert actual["told"] == [actual["metrics"]["rollout_logprob_gap_max"]], "the gap is told once"
    assert expected["told"] == [], "it was known before"
    assert expected["metrics"].pop("first_ratio_deviation") == 0.0
    assert "first_ratio_deviation" not in actual["metrics"], "a ratio that is 1 by construction proves nothing"
    assert actual["metrics"] == expected["metrics"]
    assert set(expected["columns"]) - set(actual["columns"]) <= {"rollout_weights"}
    for name, column in actual["columns"].items():
        np.testing.assert_array_equal(column, expected["columns"][name], err_msg=name)
    for role, weights in expected["weights"].items():
        for name, weight in weights.items():
            np.testing.assert_array_equal(actual["weights"][role][name], weight, err_msg=f"{role} {name}")
        for name, gradient in expected["gradients"][role][0].items():
            np.testing.assert_array_equal(actual["gradients"][role][0][name], gradient, err_msg=f"{role} {name}")


def test_the_gap_is_told_before_the_weights_change(ranks, two_layers, data) -> None:
    cfg = one_update(two_layers, data, {"pp": 2})
    stopped = ranks.run(2, "rl_step", cfg, None, False, True)[0]
    trained = ranks.run(2, "rl_step", cfg)[0]
    assert stopped["told"] == trained["told"]
    cfg["actor"]["optim"] = {"lr": 1e-30}
    as_loaded = ranks.run(2, "rl_step", cfg)[0]
    for name, weight in as_loaded["weights"]["actor"].items():
        np.testing.assert_array_equal(stopped["weights"]["actor"][name], weight, err_msg=name)
    assert any(
        (trained["weights"]["actor"][name] != weight).any() for name, weight in as_loaded["weights"]["actor"].items()
    )


def test_several_updates_and_a_kl_in_the_reward_make_old_logprobs_before(ranks, two_layers, data) -> None:
    several = one_update(two_layers, data, {})
    several["train"]["mini_batch_samples"] = 8
    in_reward = one_update(two_layers, data, {}, kl={"coef": 0.1})
    for cfg in (several, in_reward):
        step = ranks.run(1, "rl_step", cfg)[0]
        assert (step["told"], step["metrics"]["first_ratio_deviation"]) == ([], 0.0)


def test_a_reference_is_built_where_something_reads_the_kl_and_only_there(ranks, two_layers, data) -> None:
    without = ranks.run(1, "rl_step", one_update(two_layers, data, {}))[0]
    assert "reference" not in without["roles"]
    assert [without["metrics"][name] for name in ("kl", "kl_k1", "kl_k3")] == [None] * 3
    logged = ranks.run(1, "rl_step", one_update(two_layers, data, {}, kl={"log": True}))[0]
    stopping = one_update(two_layers, data, {})
    stopping["train"]["stop"] = {"max_kl": 10.0}
    for step in (logged, ranks.run(1, "rl_step", stopping)[0]):
        assert "reference" in step["roles"]
        assert step["metrics"]["kl"] == 0.0, "actor and reference begin with the same weights"
        for name, weight in without["weights"]["actor"].items():
            np.testing.assert_array_equal(step["weights"]["actor"][name], weight, err_msg=name)
