"""Packed and padded runs are the same training, for ragged batches.

Each layout's packed run is compared with its own padded run and with the padded run of one rank. All layouts:
tests/distributed/test_invariance.py. Not covered: kernels of a GPU; TransformerEngine's `thd`.
"""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.compare import assert_gradients_equal, assert_weights_equal
from tests.distributed.tiny import write_family
from tests.ranks import RankPool

LR = 1e-3
BUDGET = 120
"""Tokens of a packed micro-batch: the longest sample has about 100, the mean is below 30."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "dp2": (2, {}),
    "tp2pp2_sequence_parallel": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
}
PADDED = {"micro_batch_samples": 2}
PACKED = {"max_tokens_per_micro_batch": BUDGET}


@pytest.fixture(scope="module")
def ragged(tmp_path_factory) -> dict[str, Path]:
    """What most tests train on."""
    return write_ragged(tmp_path_factory.mktemp("ragged"), seed=7)


def write_ragged(root: Path, seed: int) -> dict[str, Path]:
    """Texts of the demo's characters, their lengths drawn from a long tail."""
    draw = random.Random(seed)

    def text(longest: int) -> str:
        length = min(longest, 1 + int(draw.lognormvariate(1.8, 1.0)))
        return "".join(draw.choice("0123456789+=") for _ in range(length))

    def two_texts(longest: int) -> tuple[str, str]:
        while (first := text(longest)) == (second := text(longest)):
            pass
        return first, second

    rows: dict[str, list[dict[str, str]]] = {"sft": [], "pairs": [], "prompts": []}
    for _ in range(24):
        rows["sft"].append({"prompt": text(40), "response": text(50)})
        chosen, rejected = two_texts(20)
        rows["pairs"].append({"prompt": text(20), "chosen": chosen, "rejected": rejected})
        rows["prompts"].append({"prompt": text(40), "answer": "1"})
    for name, lines in rows.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {name: root / f"{name}.jsonl" for name in rows}


def role(model: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    # Adam's eps: ten times its default. A first step is lr x gradient / (|gradient| + eps), and of a few thousand
    # elements one has a gradient so near zero that its rounding, some 1e-9, counts beside 1e-8.
    optim = {"lr": LR, "weight_decay": 0.1, "eps": 1e-7}
    return {"model": {"path": str(model)}, "parallel": parallel, "optim": optim}


def supervised(name: str, model: Path, data: Path, parallel: dict[str, Any], micro: dict[str, int]) -> dict[str, Any]:
    return {
        "run": {"dir": "unused"},
        name: role(model, parallel),
        "data": {"train": str(data)},
        "train": {"num_steps": 1, "mini_batch_samples": 12, **micro},
    }


def rl(two_layers: dict[str, Path], data: Path, parallel: dict[str, Any], micro: dict[str, int], **algo: Any) -> Any:
    plain, other = role(two_layers["plain"], parallel), role(two_layers["other"], parallel)
    return {
        "run": {"dir": "unused"},
        "actor": plain,
        "critic": other,
        "reward_model": other,
        "rewards": [{"kind": "model", "shift": 0.5}],
        "data": {"train": str(data), "max_prompt_tokens": 48},
        "train": {"num_steps": 1, "prompts_per_step": 4, "mini_batch_samples": 8, "epochs_per_step": 1, **micro},
        "rollout": {"engine": "megatron", "num_samples_per_prompt": 2, "max_response_tokens": 4},
        "algo": {"entropy_coef": 0.01, "loss_average": "sequence", "kl": {"coef": 0.1}} | algo,
    }


GRPO = {"advantage": "group_relative", "kl": {"coef": 0.05, "placement": "loss", "estimator": "k3"}}
GSPO = {
    "advantage": "rloo",
    "policy_loss": "gspo",
    "loss_average": "bnpo",
    "loss_block_samples": 3,
    "rollout_correction": {"kind": "truncate", "level": "sequence", "high": 1.0},
}
CISPO = {
    "advantage": "reinforce++", "whiten_over": "mini_batch", "policy_loss": "cispo", "ratio": "sequence",
    "loss_average": "constant", "loss_constant": 3, "kl": {"coef": 0.1, "estimator": "k3", "clamp": 0.01},
}  # fmt: skip
JOBS = {
    "sft": ("sft_steps", lambda m, d, *how: supervised("actor", m["plain"], d["sft"], *how), (1,)),
    "rm": ("rm_steps", lambda m, d, *how: supervised("reward_model", m["other"], d["pairs"], *how), (1,)),
    "rm_aligned_span": (
        "rm_steps",
        lambda m, d, *how: supervised("reward_model", m["other"], d["pairs"], *how) | {"loss": "aligned_span"},
        (1,),
    ),
    "ppo": ("rl_step", lambda m, d, *how: rl(m, d["prompts"], *how), ()),
    "grpo": ("rl_step", lambda m, d, *how: rl(m, d["prompts"], *how, **GRPO), ()),
    "gspo": ("rl_step", lambda m, d, *how: rl(m, d["prompts"], *how, **GSPO), ()),
    "cispo": ("rl_step", lambda m, d, *how: rl(m, d["prompts"], *how, **CISPO), ()),
}


def each_once(
    ranks: RankPool,
    two_layers: dict[str, Path],
    data: dict[str, Path],
    jobs: Mapping[str, Any],
    layouts: Mapping[str, tuple[int, dict[str, Any]]],
    more: Callable[[str], dict[str, Any]] = lambda job: {},
) -> Any:
    """A kind of training at a layout, padded or packed; each is run once. `more`: keys of `train`, by job."""
    made: dict[tuple[str, str, bool], dict[str, Any]] = {}

    def call(kind: str, layout: str, *, packed: bool) -> dict[str, Any]:
        key = (kind, layout, packed)
        if key not in made:
            job, configure, args = jobs[kind]
            world_size, parallel = layouts[layout]
            cfg = configure(two_layers, data, parallel, PACKED if packed else PADDED)
            cfg["train"] |= more(job)
            made[key] = ranks.run(world_size, job, cfg, *args)[0]
        return made[key]

    return call


@pytest.fixture(scope="module")
def run(ranks, two_layers, ragged) -> Any:
    return each_once(ranks, two_layers, ragged, JOBS, LAYOUTS)


def assert_same_training(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses and norms, each gradient of the first mini-batch, weights after a step."""
    if "metrics" not in actual:
        np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(actual["grad_norm"], expected["grad_norm"], rtol=1e-5)
        assert_gradients_equal(actual["gradients"][0], expected["gradients"][0])
        assert_weights_equal(actual["weights"], expected["weights"])
        return
    assert actual["responses"] == expected["responses"]
    np.testing.assert_allclose(actual["rewards"], expected["rewards"], atol=1e-5)
    for name, column in expected["columns"].items():
        np.testing.assert_allclose(actual["columns"][name], column, atol=1e-5, rtol=1e-5, err_msg=name)
    for name in {"value_loss", "entropy", "actor_grad_norm", "critic_grad_norm"} & expected["metrics"].keys():
        np.testing.assert_allclose(actual["metrics"][name], expected["metrics"][name], rtol=1e-5, err_msg=name)
    # Whitened advantages, of size 1, nearly cancel in these means: what fp32 rounds off each (1e-7) stays.
    for name in ("policy_loss", "loss"):
        np.testing.assert_allclose(actual["metrics"][name], expected["metrics"][name], rtol=1e-5, atol=1e-6)
    # Of a step with one update it is left out: its ratio is 1 by construction.
    assert actual["metrics"].get("first_ratio_deviation") == expected["metrics"].get("first_ratio_deviation")
    assert actual["metrics"].get("first_ratio_deviation", 0.0) == 0.0
    for name in expected["weights"]:
        assert_gradients_equal(actual["gradients"][name][0], expected["gradients"][name][0], what=name)
        assert_weights_equal(actual["weights"][name], expected["weights"][name], what=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["sft", "rm", "ppo", "grpo"])
def test_packed_equals_padded(kind, layout, run) -> None:
    packed, padded = run(kind, layout, packed=True), run(kind, layout, packed=False)
    assert_same_training(packed, padded)
    assert_same_training(packed, run(kind, "tp1", packed=False))


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2_sequence_parallel"])
@pytest.mark.parametrize("kind", ["gspo", "cispo"])
def test_losses_that_look_at_whole_responses(kind, layout, run) -> None:
    """Ratios, weights and corrections of a response, cut into other micro-batches and ranks."""
    assert_same_training(run(kind, layout, packed=True), run(kind, "tp1", packed=False))
    cut = run(kind, layout, packed=True)["metrics"].get("rollout_correction_cut")
    assert cut is None if kind == "cispo" else 0 < cut < 1, "rounding is on both sides of 1"


def test_the_aligned_span_of_packed_pairs(run) -> None:
    """The loss that reads a score at every token, on packed pairs."""
    assert_same_training(run("rm_aligned_span", "tp1", packed=True), run("rm_aligned_span", "tp1", packed=False))
    assert run("rm_aligned_span", "tp1", packed=True)["loss"] != run("rm", "tp1", packed=True)["loss"]


@pytest.mark.parametrize("budget", [95, 2000])
def test_the_budget_changes_nothing(budget, ranks, two_layers, ragged, run) -> None:
    """Nor does the number of micro-batches: nearly one for each sequence, or one for all."""
    cfg = rl(two_layers, ragged["prompts"], {}, {"max_tokens_per_micro_batch": budget})
    assert_same_training(ranks.run(1, "rl_step", cfg)[0], run("ppo", "tp1", packed=False))


def test_a_rank_without_a_sequence(ranks, two_layers, ragged) -> None:
    """Three sequences on four data-parallel ranks: one of them runs over fillers and adds nothing."""
    cfg = supervised("actor", two_layers["plain"], ragged["sft"], {}, PADDED)
    cfg["train"]["mini_batch_samples"] = 3
    expected = ranks.run(1, "sft_steps", cfg, 1)[0]
    cfg["train"] |= {"micro_batch_samples": None, **PACKED}
    assert_same_training(ranks.run(4, "sft_steps", cfg, 1)[0], expected)


@pytest.mark.parametrize("micro", [{"micro_batch_samples": 1}, PACKED])
@pytest.mark.parametrize("kind", ["ppo", "rm", "rm_aligned_span"])
def test_a_rank_without_a_sample_in_rl_and_without_a_pair(kind, micro, ranks, two_layers, ragged) -> None:
    """One prompt or pair a step on two data-parallel ranks, scores of the reward model and evaluations included."""
    job, configure, args = JOBS[kind]
    results = []
    for world_size, how in ((1, PADDED), (2, micro)):
        cfg = configure(two_layers, ragged, {}, how)
        cfg["train"] |= {"mini_batch_samples": 1}
        if kind == "ppo":
            cfg["train"] |= {"prompts_per_step": 1}
            cfg["rollout"]["num_samples_per_prompt"] = 1
        results.append(ranks.run(world_size, job, cfg, *args)[0])
    assert_same_training(results[1], results[0])


@pytest.mark.parametrize("seed", [11, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sft", "rm", "ppo"])
def test_other_draws(kind, seed, ranks, two_layers, tmp_path) -> None:
    """Other lengths and texts; in PPO the mean over tokens, where the others have the mean over sequences."""
    job, configure, args = JOBS[kind]
    results = []
    for micro in (PADDED, PACKED):
        cfg = configure(two_layers, write_ragged(tmp_path, seed), {}, micro)
        if kind == "ppo":
            cfg["algo"] |= {"loss_average": "token"}
        results.append(ranks.run(1, job, cfg, *args)[0])
    assert_same_training(results[1], results[0])


FAMILIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sliding window under sequence parallelism": ("mistral", 2, {"tp": 2, "sequence_parallel": True}),
    "learned positions over two stages": ("gpt2", 2, {"pp": 2}),
    "learned positions with an offset": ("opt", 2, {"tp": 2}),
    "query groups cut over ranks": ("qwen3", 4, {"tp": 4}),
    "experts over two stages": ("qwen3_moe", 2, {"pp": 2}),
    "experts over two ranks with different rows": ("qwen3_moe", 2, {"ep": 2}),
    "experts under tensor parallelism": ("mixtral", 2, {"tp": 2, "sequence_parallel": True}),
    "scaled frequencies": ("llama3_rope", 1, {}),
}


@pytest.mark.parametrize("what", FAMILIES)
def test_families_packed_equal_padded(what, ranks, tmp_path, ragged) -> None:
    """One step of SFT each. A key's bias has nearly no gradient, what there is, is rounding: it is not compared."""
    family, world_size, parallel = FAMILIES[what]
    model = write_family(tmp_path / family, family, max_position_embeddings=128)
    results = []
    for micro in (PADDED, PACKED):
        cfg = supervised("actor", model, ragged["sft"], parallel, micro)
        trained = ranks.run(world_size, "sft_steps", cfg, 1)[0]
        for part in (trained["gradients"][0], trained["weights"]):
            for name in [name for name in part if name.endswith("k_proj.bias") or "c_attn.bias" in name]:
                del part[name]
        results.append(trained)
    assert_same_training(results[1], results[0])
