"""Sequences cut over context-parallel ranks: the same training as one process, packed and padded.

Three optimizer steps each, fp32. Not covered: kernels of a GPU, and TransformerEngine's ring, which takes the same
shares (tests/models/test_context_attention.py says what it is called with).
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.config import MicroBatchConfig, RoleConfig
from megarlhf.models.role import build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.runtime import Runtime
from tests.distributed.test_packed_layouts import (
    GRPO,
    PACKED,
    PADDED,
    assert_same_training,
    each_once,
    rl,
    supervised,
    write_ragged,
)
from tests.distributed.tiny import write_family

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
def ragged(tmp_path_factory) -> dict[str, Path]:
    return write_ragged(tmp_path_factory.mktemp("ragged"), seed=7)


@pytest.fixture(scope="module")
def run(ranks, two_layers, ragged) -> Any:
    def more(job: str) -> dict[str, Any]:
        return {"mini_batch_samples": 8} | ({"epochs_per_step": STEPS} if job == "rl_step" else {})

    return each_once(ranks, two_layers, ragged, JOBS, LAYOUTS, more)


SPREAD = {
    ("sft", "packed", "tp2cp2_sequence_parallel"), ("sft", "padded", "cp2pp2"), ("sft_tied", "packed", "cp4"),
    ("rm", "packed", "cp2pp2"), ("grpo", "packed", "cp2dp2"),
}  # fmt: skip
"""Run by `make test`; all others by `make test-slow`. Two ranks alone: tests/distributed/test_invariance.py."""
CASES = [
    pytest.param(*case, marks=() if case in SPREAD else pytest.mark.slow, id="-".join(case))
    for case in itertools.product(JOBS, ("packed", "padded"), [name for name in LAYOUTS if name != "one"])
]


@pytest.mark.parametrize("kind, rows, layout", CASES)
def test_equals_one_process(kind, rows, layout, run) -> None:
    """Loss and gradient norm of three steps, every gradient of the first, weights after them; what was sampled."""
    actual = run(kind, layout, packed=rows == "packed")
    assert_same_training(actual, run(kind, "one", packed=False))


FAMILIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sliding window": ("mistral", 2, {"cp": 2}),
    "learned positions over two stages": ("gpt2", 4, {"cp": 2, "pp": 2}),
    "learned positions with an offset": ("opt", 2, {"cp": 2}),
    "query groups cut over ranks": ("qwen3", 4, {"tp": 2, "cp": 2}),
    "norms of queries and keys": ("qwen3", 4, {"tp": 2, "cp": 2}),
    "experts under tensor parallelism": ("mixtral", 4, {"tp": 2, "cp": 2}),
    "scaled frequencies": ("llama3_rope", 2, {"cp": 2}),
    "scaled cosines": ("llama_yarn", 2, {"cp": 2}),
    "a part of each head turned": ("phi3_longrope", 2, {"cp": 2}),
    "experts over two stages": ("qwen3_moe", 4, {"cp": 2, "pp": 2}),
    "virtual stages": ("qwen3", 4, {"cp": 2, "pp": 2, "vpp": 2}),
    "experts shared out over the ranks of a sequence": ("qwen3_moe", 2, {"cp": 2, "ep": 2}),
}

DEFAULT = ("sliding window", "norms of queries and keys", "scaled cosines", "a part of each head turned")
"""Run by `make test`."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in DEFAULT else pytest.mark.slow) for what in FAMILIES]
)
def test_families_equal_one_process(what, ranks, tmp_path, ragged) -> None:
    """A step of SFT on packed and on padded rows, against one process. A key's bias has nearly no gradient; what there
    is, is rounding: it is not compared."""
    family, world_size, parallel = FAMILIES[what]
    changes = {"num_key_value_heads": 1} if what.startswith("query groups") else {}
    model = write_family(tmp_path / family, family, max_position_embeddings=128, **changes)
    results = []
    for world, at, micro in ((1, {}, PADDED), (world_size, parallel, PADDED), (world_size, parallel, PACKED)):
        cfg = supervised("actor", model, ragged["sft"], at, micro)
        trained = ranks.run(world, "sft_steps", cfg, 1)[0]
        for part in (trained["gradients"][0], trained["weights"]):
            for name in [name for name in part if name.endswith("k_proj.bias") or "c_attn.bias" in name]:
                del part[name]
        results.append(trained)
    for trained in results[1:]:
        assert_same_training(trained, results[0])


@pytest.mark.slow
def test_on_a_mesh_whose_ranks_stand_in_another_order(run, ranks, two_layers, ragged) -> None:
    """As an engine of two ranks asks for at tp 4: neighbours in the context-parallel group are none by number."""
    cfg = supervised("actor", two_layers["plain"], ragged["sft"], {"tp": 2, "cp": 2}, PACKED)
    cfg["train"] |= {"mini_batch_samples": 8}
    everyone = ranks.run(4, "sft_steps", cfg, STEPS, (0, 2, 1, 3))
    assert [result["coordinates"] for result in everyone] == [(0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0)]
    assert_same_training(everyone[0], run("sft", "one", packed=False))


@pytest.mark.parametrize("micro", [PACKED, PADDED], ids=["packed", "padded"])
def test_a_rank_computes_its_share_only(micro, ranks, two_layers) -> None:
    """What goes through the first MLP of a micro-batch: half of its grid on each of two ranks."""
    for seen in ranks.run(2, tokens_of_each_forward, str(two_layers["plain"]), micro):
        assert len(seen) > 2
        assert all(2 * local == whole > 0 for whole, local in seen)


def tokens_of_each_forward(runtime: Runtime, model: str, micro: dict[str, int]) -> list[tuple[int, int]]:
    """(tokens of the grid, those that went through the first MLP) of each micro-batch."""
    section = RoleConfig.model_validate({"model": {"path": model}, "parallel": {"cp": 2}})
    actor = build_role("actor", section, "lm", GroupCache(runtime), seed=0)
    lengths = torch.arange(1, 90, 7)
    layouts = actor.batching(MicroBatchConfig.model_validate(micro)).layouts([(n,) for n in range(13)], lengths)
    batches = [MicroBatch(torch.zeros(each.rows, each.columns, dtype=torch.int64), {}, each) for each in layouts]
    local: list[int] = []
    mlp = actor.shard.module.decoder.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, given: local.append(given[0].size(0) * given[0].size(1)))
    actor.forward(batches, lambda hidden_SBH, batch: hidden_SBH)
    return list(zip([batch.tokens_BS.numel() for batch in batches], local, strict=True))
