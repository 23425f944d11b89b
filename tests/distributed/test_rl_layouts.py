"""One PPO step, its rollout with it, is the same on several ranks, and its ratios start at exactly one.

The training at all layouts: tests/distributed/test_invariance.py.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.compare import assert_gradients_equal, assert_weights_equal

LR = 1e-3


def config(
    two_layers: dict[str, Path], data: Path, parallel: dict[str, Any], *, micro_batch_samples: int = 4, **algo: Any
) -> dict[str, Any]:
    """A step has 16 responses, in micro-batches that are no smaller than a test needs: each is a forward a token."""

    def role(name: str) -> dict[str, Any]:
        return {"model": {"path": str(two_layers[name])}, "parallel": parallel, "optim": {"lr": LR}}

    return {
        "run": {"dir": "unused"},
        "actor": role("plain"),
        "reference": role("plain"),
        "critic": role("other"),
        "reward_model": role("other"),
        "rewards": [{"kind": "model", "shift": 0.5}, {"kind": "rule", "rule": "exact_match", "weight": 2.0}],
        "data": {"train": str(data), "max_prompt_tokens": 16},
        "train": {
            "num_steps": 1, "prompts_per_step": 4, "mini_batch_samples": 8, "micro_batch_samples": micro_batch_samples,
            "epochs_per_step": 2,
        },
        "rollout": {"engine": "megatron", "num_samples_per_prompt": 4, "max_response_tokens": 6, "temperature": 0.9},
        "algo": {"entropy_coef": 0.01, "kl": {"coef": 0.1}} | algo,
    }  # fmt: skip


in_pairs = partial(config, micro_batch_samples=2)
"""In many micro-batches, as they are cut over layouts."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"dp2": (2, {}), "tp2pp2": (4, {"tp": 2, "pp": 2})}


@pytest.fixture(scope="module")
def single(ranks, two_layers, data) -> dict[str, Any]:
    return ranks.run(1, "rl_step", in_pairs(two_layers, data["prompts"], {}))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_ppo_step_is_the_same_on_several_ranks(layout, ranks, two_layers, data, single) -> None:
    """Four optimizer steps of actor and critic: losses, gradients by parameter, and weights after them.

    Only the first mini-batch's gradients are compared tightly: after it, each run's weights have rounding of
    their own, which Adam's first steps (a division by the gradient's own size) carry on.
    """
    world_size, parallel = LAYOUTS[layout]
    actual = ranks.run(world_size, "rl_step", in_pairs(two_layers, data["prompts"], parallel))[0]
    assert actual["responses"] == single["responses"]
    np.testing.assert_allclose(actual["rewards"], single["rewards"], atol=1e-5)
    for name, column in single["columns"].items():
        np.testing.assert_allclose(actual["columns"][name], column, atol=1e-5, rtol=1e-5, err_msg=name)
    for name in ("value_loss", "entropy", "clip_fraction", "reward_mean"):
        np.testing.assert_allclose(actual["metrics"][name], single["metrics"][name], rtol=1e-5, atol=1e-7, err_msg=name)
    for name in ("policy_loss", "loss", "kl"):  # sums of both signs that nearly cancel: their rounding is absolute
        np.testing.assert_allclose(actual["metrics"][name], single["metrics"][name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name in ("actor_grad_norm", "critic_grad_norm"):
        np.testing.assert_allclose(actual["metrics"][name], single["metrics"][name], rtol=1e-5, err_msg=name)
    for role in ("actor", "critic"):
        assert len(actual["gradients"][role]) == len(single["gradients"][role]) == 4
        assert_gradients_equal(actual["gradients"][role][0], single["gradients"][role][0], what=role)
        assert_weights_equal(actual["weights"][role], single["weights"][role], what=role)


def test_old_logprobs_equal_reference_and_the_first_ratio_is_exactly_one(single) -> None:
    """At step 1 actor and reference have equal weights. The training forward sees the micro-batches of the
    old log-probs' forward, so the ratio is 1 to the bit, and it is not so by construction: later ones differ."""
    np.testing.assert_array_equal(single["columns"]["old_logprobs"], single["columns"]["ref_logprobs"])
    assert single["metrics"]["kl"] == 0.0
    assert single["metrics"]["first_ratio_deviation"] == 0.0
    assert single["metrics"]["ratio_deviation"] > 1e-3
    assert single["metrics"]["rollout_logprob_gap_max"] < 1e-5


def test_other_micro_batches_keep_the_first_ratio_within_rounding(ranks, two_layers, data, single) -> None:
    """Micro-batches of four instead of two: other matrix shapes, the same numbers to 1e-5."""
    cfg = in_pairs(two_layers, data["prompts"], {})
    cfg["train"]["micro_batch_samples"] = 4
    actual = ranks.run(1, "rl_step", cfg)[0]
    np.testing.assert_allclose(
        np.exp(actual["columns"]["old_logprobs"] - single["columns"]["old_logprobs"]), 1.0, atol=1e-5
    )
    for name in ("policy_loss", "value_loss"):
        np.testing.assert_allclose(actual["metrics"][name], single["metrics"][name], rtol=1e-5, atol=1e-6)


def test_grpo_builds_no_critic_and_is_the_same_on_two_ranks(ranks, two_layers, data) -> None:
    """Group-relative advantage, k3 KL in the loss; a critic section may stand in the file unused."""
    algo = {"advantage": "group_relative", "kl": {"coef": 0.05, "placement": "loss", "estimator": "k3"}}
    expected = ranks.run(1, "rl_step", in_pairs(two_layers, data["prompts"], {}, **algo))[0]
    actual = ranks.run(2, "rl_step", in_pairs(two_layers, data["prompts"], {}, **algo))[0]
    assert set(actual["gradients"]) == {"actor"}
    assert "values" not in actual["columns"]
    for name in ("policy_loss", "loss", "entropy"):
        np.testing.assert_allclose(actual["metrics"][name], expected["metrics"][name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual["metrics"]["actor_grad_norm"], expected["metrics"]["actor_grad_norm"], rtol=1e-5)


def test_remax_compares_with_the_greedy_response(ranks, two_layers, data) -> None:
    """All responses of a prompt less one number; drawn at a temperature near 0 they are the greedy ones, and get 0."""
    algo = {"advantage": "remax", "kl": {"coef": 0.0}}
    cfg = in_pairs(two_layers, data["prompts"], {}, **algo)
    warm = ranks.run(1, "rl_step", cfg)[0]
    starts = np.cumsum([0, *map(len, warm["responses"])])[:-1]
    baselines = (warm["rewards"] - warm["columns"]["advantages"][starts]).reshape(4, 4)
    np.testing.assert_allclose(baselines, baselines[:, :1].repeat(4, 1), atol=1e-5)
    assert np.abs(warm["columns"]["advantages"]).max() > 1e-3
    world_size, parallel = LAYOUTS["dp2"]
    split = ranks.run(world_size, "rl_step", in_pairs(two_layers, data["prompts"], parallel, **algo))[0]
    np.testing.assert_allclose(split["columns"]["advantages"], warm["columns"]["advantages"], atol=1e-5)
    cfg["rollout"]["temperature"] = 0.005
    cold = ranks.run(1, "rl_step", cfg)[0]
    np.testing.assert_allclose(cold["columns"]["advantages"], 0.0, atol=1e-5)


def test_roles_may_have_layouts_of_their_own(ranks, two_layers, data, single) -> None:
    """Actor TP2, reference DP2, critic PP2, reward model TP2 on the same two ranks: the same step."""
    cfg = in_pairs(two_layers, data["prompts"], {})
    for role, parallel in (("actor", {"tp": 2}), ("critic", {"pp": 2}), ("reward_model", {"tp": 2})):
        cfg[role]["parallel"] = parallel
    actual = ranks.run(2, "rl_step", cfg)[0]
    for name in ("policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm"):
        np.testing.assert_allclose(actual["metrics"][name], single["metrics"][name], rtol=1e-5, atol=1e-6, err_msg=name)
