"""SFT and PPO steps by slices of the vocabulary equal those by whole logits, which the last stage then never holds.

Between `kernels.logprobs` = `reference` and `chunked` all of a model but its head is the same code, so this compares
the way of the head's own gradient too: through autograd, or straight into Megatron's `main_grad`. The vocabulary has
several slices on each rank, the last one narrower, and padding. Not covered: `triton`, which needs a GPU.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.compare import Arrays, assert_gradients_equal
from tests.distributed.test_rl_layouts import config as rl_config
from tests.distributed.test_sft_layouts import config as sft_config
from tests.distributed.tiny import write_family
from tests.ranks import RankPool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": False}),
    "tp2_sequence_parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "tp2pp2_sequence_parallel": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
}
KEPT = {"untied": 0, "tied": 256}
"""MiB for logits between forward and backward: none, so that all are made again; all."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> dict[str, Path]:
    """Of 2500 tokens: three slices on one rank, two on each of two (1280 and 1220 columns)."""
    root = tmp_path_factory.mktemp("wide")
    return {
        name: write_family(
            root / name, "qwen2", vocab_size=2500, num_hidden_layers=2, tie_word_embeddings=name == "tied"
        )
        for name in KEPT
    }


def with_kernels(cfg: dict[str, Any], logprobs: str, save_mib: int) -> dict[str, Any]:
    for role in {"actor", "reference"} & cfg.keys():
        cfg[role] = cfg[role] | {"kernels": {"logprobs": logprobs, "save_mib": save_mib}}
    return cfg


def in_both_ways(ranks: RankPool, world_size: int, job: str, cfg: dict[str, Any], save_mib: int, *args: Any) -> Any:
    """(reference's result, chunked's), each shown to have been computed by what it is named after."""
    results = []
    for logprobs in ("reference", "chunked"):
        by_rank = ranks.run(
            world_size, "with_calls_of_the_reference", job, with_kernels(cfg, logprobs, save_mib), *args
        )
        calls = [count for _, count in by_rank]
        last_stages = [count > 0 for count in calls]
        pp = cfg["actor"]["parallel"].get("pp", 1)
        expected = world_size // pp if logprobs == "reference" else 0
        assert sum(last_stages) == expected, f"{logprobs}: the reference was called {calls} times, by rank"
        results.append(by_rank[0][0])
    return results


def assert_steps_equal(actual: list[Arrays], expected: list[Arrays], head: str) -> None:
    assert len(actual) == len(expected) > 0
    assert head in expected[0], f"the head's gradient is not among {sorted(expected[0])}"
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        compared = _without_keys_of_attention(ours), _without_keys_of_attention(theirs)
        # From the second step on each run's weights carry rounding of their own.
        assert_gradients_equal(*compared, relative=1e-5 if number == 0 else 1e-3, what=f"step {number}")


def _without_keys_of_attention(gradients: Arrays) -> Arrays:
    """A key's bias has nearly no gradient: what there is, is rounding."""
    return {name: gradient for name, gradient in gradients.items() if not name.endswith("k_proj.bias")}


def head_of(kind: str) -> str:
    return "model.embed_tokens.weight" if kind == "tied" else "lm_head.weight"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KEPT)
def test_sft_by_slices_equals_sft_by_whole_logits(kind, layout, ranks, wide, data) -> None:
    """Losses, norms and each gradient of two steps of four micro-batches."""
    world_size, parallel = LAYOUTS[layout]
    cfg = sft_config(wide[kind], data["sft"], parallel)
    expected, sliced = in_both_ways(ranks, world_size, "sft_steps", cfg, KEPT[kind], 2)
    np.testing.assert_allclose(sliced["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(sliced["grad_norm"], expected["grad_norm"], rtol=1e-5)
    assert_steps_equal(sliced["gradients"], expected["gradients"], head_of(kind))


@pytest.mark.parametrize("kind", KEPT)
def test_sft_in_bf16(kind, ranks, wide, data) -> None:
    """The first step. Both ways make fp32 logits of the same bf16 numbers, so losses agree as in fp32. The reference's
    gradients are rounded to bf16 before Megatron's fp32 buffer and before the sum over ranks, ours are not: measured
    9e-4 for a head of its own, and up to 8e-3 after two layers of backward in bf16."""
    world_size, parallel = LAYOUTS["tp2_sequence_parallel"]
    cfg = sft_config(wide[kind], data["sft"], parallel)
    cfg["actor"]["model"]["dtype"] = "bf16"
    expected, sliced = in_both_ways(ranks, world_size, "sft_steps", cfg, KEPT[kind], 1)
    np.testing.assert_allclose(sliced["loss"], expected["loss"], rtol=1e-5)
    compared = [_without_keys_of_attention(result["gradients"][0]) for result in (sliced, expected)]
    assert_gradients_equal(*compared, relative=1.5e-2, what="bf16")
    if kind == "untied":
        heads = ({"head": gradients["lm_head.weight"]} for gradients in compared)
        assert_gradients_equal(*heads, relative=2e-3, what="bf16")


def ppo(wide: dict[str, Path], kind: str, data: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    cfg = rl_config({"plain": wide[kind], "other": wide["untied"]}, data, parallel, entropy_coef=0.05)
    cfg["rewards"] = [{"kind": "rule", "rule": "exact_match"}]
    cfg["train"] |= {"prompts_per_step": 2}  # eight samples, of which each of two epochs is one mini-batch
    cfg["rollout"]["max_response_tokens"] = 4
    return cfg


@pytest.mark.parametrize(
    "kind, layout", [("untied", "tp1"), ("tied", "tp2_sequence_parallel"), ("untied", "tp2"), ("tied", "pp2")]
)
def test_ppo_by_slices_equals_ppo_by_whole_logits(kind, layout, ranks, wide, data) -> None:
    """Old and reference log-probs, entropy, losses and each gradient of the actor; the first ratio stays exactly 1,
    although the training forward asks for the entropy and keeps logits, and the old log-probs' forward does not."""
    world_size, parallel = LAYOUTS[layout]
    cfg = ppo(wide, kind, data["prompts"], parallel)
    expected, sliced = in_both_ways(ranks, world_size, "rl_step", cfg, KEPT[kind])
    assert sliced["responses"] == expected["responses"]
    for name in ("old_logprobs", "ref_logprobs"):
        np.testing.assert_allclose(sliced["columns"][name], expected["columns"][name], atol=1e-5, err_msg=name)
    for name in ("entropy", "actor_grad_norm"):
        np.testing.assert_allclose(sliced["metrics"][name], expected["metrics"][name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(sliced["metrics"]["loss"], expected["metrics"]["loss"], atol=1e-6, rtol=1e-5)
    assert sliced["metrics"]["first_ratio_deviation"] == 0.0
    assert sliced["metrics"]["ratio_deviation"] > 0.0
    assert_steps_equal(sliced["gradients"]["actor"][:1], expected["gradients"]["actor"][:1], head_of(kind))


COLUMNS = {"tp1": 12000, "tp2": 12000 - 6016}
"""True columns of the rank that has fewest."""


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory) -> Path:
    """12000 tokens against 32 hidden: the logits of a micro-batch would be larger than the model."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 12000}
    return write_family(tmp_path_factory.mktemp("large"), "llama", **sizes)


@pytest.mark.parametrize("layout", COLUMNS)
def test_no_tensor_is_as_large_as_the_logits(layout, ranks, large_vocabulary, data) -> None:
    """Over all forwards and backwards of an SFT step and of a PPO step (sampling with the actor, scoring, training),
    the largest tensor is less than half of the logits of its micro-batch's response tokens on this rank. The same
    steps by the reference make them, and are seen to."""
    world_size, parallel = LAYOUTS[layout]
    sft = sft_config(large_vocabulary, data["sft"], parallel, micro_batch=48)
    sft["train"]["mini_batch_samples"] = 48
    rl = rl_config({"plain": large_vocabulary, "other": large_vocabulary}, data["prompts"], parallel)
    rl["train"] |= {"mini_batch_samples": 16, "micro_batch_samples": 16, "epochs_per_step": 1}
    for job, cfg, args in (("sft_steps", sft, (1,)), ("rl_step", rl, ())):
        for logprobs, whole in (("chunked", False), ("reference", True)):
            asked = with_kernels(cfg, logprobs, 256)
            shares = ranks.run(world_size, "largest_tensor", job, COLUMNS[layout], asked, *args)
            assert all(share >= 1.0 if whole else 0.05 < share < 0.5 for share in shares), f"{job} {logprobs}: {shares}"
