"""Computing the prompt of several responses once changes no number: shared and unshared runs are the same training.

Every packed run of the other tests shares prompts too, and is compared there with padded ones and with Hugging Face.
Not covered: kernels of a GPU.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarlhf.columns import Ragged
from megarlhf.config import MicroBatchConfig, RoleConfig
from megarlhf.models.role import build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch, TokenSpans, gather_from_micro_batch, scatter_to_micro_batch
from megarlhf.runtime import Runtime
from tests.distributed.compare import assert_gradients_equal, assert_weights_equal
from tests.distributed.dpo_jobs import dpo_steps
from tests.distributed.test_dpo_layouts import config as dpo_config
from tests.distributed.test_packed_layouts import GRPO, assert_same_training, rl, supervised, write_ragged
from tests.distributed.tiny import write_family

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
def ragged(tmp_path_factory) -> dict[str, Path]:
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


JOBS = {"rm": of_rm("last_token"), "rm, aligned span": of_rm("aligned_span"), "ppo": of_rl(), "grpo": of_rl(**GRPO)}


def assert_same(shared: dict[str, Any], apart: dict[str, Any]) -> None:
    """Losses, norms, every gradient of the first update, and weights after three; held-out figures; the first ratio."""
    assert_same_training(shared, apart)
    for name, value in apart.get("evaluation", {}).items():
        np.testing.assert_allclose(shared["evaluation"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    if "metrics" in shared:
        assert shared["metrics"]["first_ratio_deviation"] == apart["metrics"]["first_ratio_deviation"] == 0.0


@pytest.fixture(scope="module")
def run(ranks, two_layers, ragged) -> Any:
    made: dict[tuple[str, str, bool], dict[str, Any]] = {}

    def call(kind: str, layout: str, share: bool) -> dict[str, Any]:
        if (kind, layout, share) not in made:
            world_size, parallel = LAYOUTS[layout]
            job, tree, more = JOBS[kind](two_layers, ragged, parallel, share)
            made[kind, layout, share] = ranks.run(world_size, job, tree, *more)[0]
        return made[kind, layout, share]

    return call


SPREAD = {*((kind, "tp1") for kind in JOBS), *(("grpo", layout) for layout in LAYOUTS)}
SPREAD |= {("rm", "pp2"), ("rm, aligned span", "tp2pp2"), ("ppo", "dp2"), ("ppo", "tp2 with sequence parallelism")}
"""Each kind and each layout; all others by `make test-slow`. Packed runs (test_packed_layouts.py) share prompts too."""
ALL = itertools.product(JOBS, LAYOUTS)
CASES = [pytest.param(*case, marks=() if case in SPREAD else pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize("kind, layout", CASES)
def test_shared_prompts_are_the_same_training(kind, layout, run) -> None:
    shared, apart = run(kind, layout, True), run(kind, "tp1", False)
    assert_same(shared, apart)
    if "metrics" in shared:
        assert apart["metrics"]["prompts_saved"] == 0
        assert apart["metrics"]["prompts_computed"] == 24
        assert shared["metrics"]["prompts_computed"] + shared["metrics"]["prompts_saved"] == 24
        assert shared["metrics"]["prompts_saved"] >= 12, "nothing was shared"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, ranks, ragged, tmp_path) -> None:
    """Pairs, whose scores are of all that a layer computes. A key's bias has nearly no gradient: it is not compared."""
    scorer = write_family(tmp_path / family, family, max_position_embeddings=128)
    found = []
    for share in (True, False):
        job, tree, more = of_rm("last_token")({"other": scorer}, ragged, {"tp": 2}, share)
        tree["center_coef"] = 0.3  # without it a bias behind the last layer has no gradient
        found.append(ranks.run(2, job, tree, *more)[0])
        for part in (found[-1]["gradients"][0], found[-1]["weights"]):
            for name in [name for name in part if name.endswith("k_proj.bias") or "c_attn.bias" in name]:
                del part[name]
    assert_same(*found)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"ep": 2}])
def test_the_load_balance_of_experts_counts_a_shared_token_for_every_sequence(
    parallel, ranks, two_layers, ragged, tmp_path
) -> None:
    model = write_family(
        tmp_path / "experts", "mixtral", vocab_size=16, num_hidden_layers=2, max_position_embeddings=128
    )
    (model / "tokenizer.model").write_bytes((two_layers["plain"] / "tokenizer.model").read_bytes())
    found = []
    for share in (True, False):
        job, tree, more = JOBS["grpo"]({"plain": model, "other": two_layers["other"]}, ragged, {}, share)
        tree["actor"] |= {"parallel": parallel, "router_aux_loss_coef": 0.2}
        tree["reference"] = {"model": {"path": str(two_layers["other"])}}
        found.append(ranks.run(2, job, tree, *more)[0])
    first = [each["gradients"]["actor"][0] for each in found]
    idle = [name for name, gradient in first[1].items() if ".experts." in name and not gradient.any()]
    assert len(idle) <= 3, "an expert that no token has chosen"
    for gradients, name in itertools.product(first, idle):
        assert not gradients.pop(name).any()
    assert_same(*found)
    shared, apart = (each["metrics"]["actor_router_aux_loss"] for each in found)
    assert shared == pytest.approx(apart, rel=1e-5)
    assert apart > 2.0, "the tokens of a sequence are spread evenly: nothing is compared"
    assert found[0]["metrics"]["prompts_saved"] >= 12


@pytest.mark.parametrize(
    ("layout", "role"),
    [
        ("tp1", {"recompute": "full"}),
        ("tp2", {"recompute": "core_attention"}),
        ("dp2", {"offload": {"parameters": True, "gradients": True, "optimizer": "stream"}}),
    ],
)
def test_recomputed_and_offloaded_with_the_same_bits(layout, role, ranks, two_layers, ragged, run) -> None:
    world_size, parallel = LAYOUTS[layout]
    job, tree, more = JOBS["grpo"](two_layers, ragged, parallel, True)
    tree["actor"] |= role
    found, expected = ranks.run(world_size, job, tree, *more)[0], run("grpo", layout, True)
    assert found["metrics"]["actor_grad_norm"] == expected["metrics"]["actor_grad_norm"]
    for name, weight in expected["weights"]["actor"].items():
        np.testing.assert_array_equal(found["weights"]["actor"][name], weight, err_msg=name)


@pytest.mark.parametrize("layout", ["tp1", "dp2", "tp2pp2"])
def test_preferences(layout, ranks, two_layers, ragged) -> None:
    """Losses of pairs by their log-probs, with the reference's; `kto` with responses to other prompts."""
    world_size, parallel = LAYOUTS[layout]
    losses = {"dpo": {"beta": 0.3}, "kto": {"loss": "kto", "beta": 0.5}, "orpo": {"loss": "orpo", "reference": None}}
    found = []
    for share in (True, False):
        tree = dpo_config(two_layers, ragged["pairs"], parallel, parallel, micro(share))
        found.append(ranks.run(world_size, dpo_steps, tree, losses, 2, 9)[0])
    for name in losses:
        shared, apart = (each[name] for each in found)
        for key in ("loss", "grad_norm", "reward_margin"):
            values = [[step[key] for step in each["steps"]] for each in (shared, apart)]
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6, err_msg=f"{name}: {key}")
        assert [step["prompts_saved"] for step in shared["steps"]] == [8, 8]
        assert [step["prompts_saved"] for step in apart["steps"]] == [0, 0]
        assert_gradients_equal(shared["gradients"][0], apart["gradients"][0], what=name)
        assert_weights_equal(shared["weights"], apart["weights"], what=name)


def hidden_of_continuations(runtime: Runtime, model: str, parallel: dict[str, Any], rows: list[list[int]]) -> Any:
    """The scores of all tokens of sequences that begin with the same eight, in one row; and the layout."""
    section = RoleConfig.model_validate({"model": {"path": model}, "parallel": parallel})
    role = build_role("reward_model", section, "scalar", GroupCache(runtime), seed=0, new_head=True)
    tokens = Ragged.from_rows([torch.tensor(row) for row in rows], torch.int64)
    batching = role.batching(MicroBatchConfig(max_tokens_per_micro_batch=500))
    (layout,) = batching.layouts([range(len(rows))], tokens.lengths_N, shared=[8], divisible=True)
    whole = TokenSpans.whole(tokens.lengths_N)
    batch = MicroBatch(scatter_to_micro_batch(layout, tokens, whole), {}, layout)
    outputs = role.forward([batch], lambda scores_BS1, batch: scores_BS1[..., 0])
    found = gather_from_micro_batch(layout, outputs[0], whole) if outputs else {}
    return {n: row.numpy() for n, row in found.items()}, layout.parents


@pytest.mark.parametrize("layout", ["tp1", "tp2 with sequence parallelism", "tp2pp2"])
def test_nothing_crosses_from_one_continuation_to_another(layout, ranks, two_layers) -> None:
    """Other tokens in one continuation: the others, and the prompt, keep their bits."""
    world_size, parallel = LAYOUTS[layout]
    draw, prompt = random.Random(3), [5, 6, 7, 8, 9, 10, 11, 12]
    rows = [prompt + [draw.randrange(4, 16) for _ in range(length)] for length in (9, 4, 13, 0, 1)]
    changed = [list(row) for row in rows]
    changed[2] = prompt + [draw.randrange(4, 16) for _ in range(13)]
    before, after = (
        ranks.run(world_size, hidden_of_continuations, str(two_layers["other"]), parallel, each)[-1]
        for each in (rows, changed)
    )
    assert before[1] == after[1] == (-1, 0, 0, 0, 0), "no tree"
    for n in (0, 1, 3, 4):
        np.testing.assert_array_equal(before[0][n], after[0][n])
    np.testing.assert_array_equal(before[0][2][:8], after[0][2][:8])
    assert not np.array_equal(before[0][2][8:], after[0][2][8:])
