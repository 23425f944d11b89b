"""The first SFT steps are equal to Hugging Face trained by plain torch, on one rank and where several kinds of
parallelism meet. That every layout equals one rank: tests/distributed/test_invariance.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarlhf.data.samples import build_sft
from megarlhf.data.sources import load_records
from megarlhf.data.tokenizer import load_tokenizer
from tests.distributed.compare import assert_gradients_equal, assert_weights_equal
from tests.ranks import RankPool

LR, STEPS, MINI_BATCH = 1e-3, 3, 8

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": False}),
    "pp2_uneven": (2, {"pp": 2, "layers_per_stage": [3, 1]}),
    "pp2vpp2": (2, {"pp": 2, "vpp": 2}),
}


def config(model: Path, data: Path, parallel: dict[str, Any], micro_batch: int = 2) -> dict[str, Any]:
    return {
        "run": {"dir": "unused"},
        "actor": {
            "model": {"path": str(model)},
            "parallel": parallel,
            "optim": {"lr": LR, "weight_decay": 0.1},
        },
        "data": {"train": str(data)},
        "train": {"num_steps": STEPS, "mini_batch_samples": MINI_BATCH, "micro_batch_samples": micro_batch},
    }


@pytest.fixture(scope="session")
def hugging_face(models: dict[str, Path], data: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: _train_hugging_face(models[name], data["sft"]) for name in ("plain", "tied", "rope")}


def _train_hugging_face(model_path: Path, data: Path) -> dict[str, Any]:
    """LlamaForCausalLM, AdamW and clip_grad_norm_, one sequence at a time: no padding, nothing of ours."""
    from transformers import LlamaForCausalLM

    tokenizer = load_tokenizer(model_path)
    samples, _ = build_sft(
        load_records(data, fields=("prompt", "response")), tokenizer, max_prompt_tokens=64, max_response_tokens=64
    )
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    trace: dict[str, Any] = {"loss": [], "grad_norm": [], "gradients": []}
    for step in range(STEPS):
        batch = samples[step * MINI_BATCH : (step + 1) * MINI_BATCH]
        denominator = sum(len(s.tokens) - s.prompt_length for s in batch)
        optimizer.zero_grad()
        total = 0.0
        for sample in batch:
            tokens = torch.tensor([sample.tokens])
            logits = model(tokens).logits[0, :-1]
            nll = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            loss = nll[sample.prompt_length - 1 :].sum() / denominator
            loss.backward()
            total += loss.item()
        trace["loss"].append(total)
        trace["gradients"].append({n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None})
        trace["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    trace["weights"] = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return trace


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(actual["grad_norm"], expected["grad_norm"], rtol=1e-5)
    assert len(actual["gradients"]) == len(expected["gradients"]) == STEPS
    for step in range(STEPS):
        # From the second step on each run's weights carry rounding of their own.
        relative = 1e-5 if step == 0 else 1e-4
        assert_gradients_equal(
            actual["gradients"][step], expected["gradients"][step], relative=relative, what=f"step {step}"
        )
    assert_weights_equal(actual["weights"], expected["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_hugging_face(
    layout: str, ranks: RankPool, models: dict[str, Path], data: dict[str, Path], hugging_face: dict[str, Any]
) -> None:
    """Losses 1e-5, gradient norms 1e-5, each gradient, and weights 1e-4 after three steps. fp32, no dropout."""
    world_size, parallel = LAYOUTS[layout]
    by_rank = ranks.run(world_size, "sft_steps", config(models["plain"], data["sft"], parallel), STEPS)
    assert_same(by_rank[0], hugging_face["plain"])
    assert all(rank["loss"] == by_rank[0]["loss"] and rank["grad_norm"] == by_rank[0]["grad_norm"] for rank in by_rank)


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2"])
def test_tied_embeddings_equal_hugging_face(
    layout: str, ranks: RankPool, models: dict[str, Path], data: dict[str, Path], hugging_face: dict[str, Any]
) -> None:
    """With pp = 2 the last stage holds a copy of the embedding; both must get the summed gradient."""
    world_size, parallel = LAYOUTS[layout]
    by_rank = ranks.run(world_size, "sft_steps", config(models["tied"], data["sft"], parallel), STEPS)
    assert_same(by_rank[0], hugging_face["tied"])


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2"])
def test_llama3_rope_scaling_equals_hugging_face(
    layout: str, ranks: RankPool, models: dict[str, Path], data: dict[str, Path], hugging_face: dict[str, Any]
) -> None:
    """All four numbers of the scaling count; without it the first loss is another one."""
    world_size, parallel = LAYOUTS[layout]
    by_rank = ranks.run(world_size, "sft_steps", config(models["rope"], data["sft"], parallel), STEPS)
    assert_same(by_rank[0], hugging_face["rope"])


def test_the_split_into_micro_batches_changes_nothing(
    ranks: RankPool, models: dict[str, Path], data: dict[str, Path], hugging_face: dict[str, Any]
) -> None:
    """The denominator is the mini-batch's: one micro-batch of eight, or eight of one."""
    for micro_batch in (1, 8):
        by_rank = ranks.run(1, "sft_steps", config(models["plain"], data["sft"], {}, micro_batch), STEPS)
        assert_same(by_rank[0], hugging_face["plain"])


@pytest.mark.parametrize(
    ("parallel", "order"), [({"tp": 2}, (0, 2, 1, 3)), ({"tp": 2, "pp": 2}, (3, 0, 1, 2)), ({"pp": 4}, (2, 0, 3, 1))]
)
def test_ranks_in_another_order_equal_hugging_face(
    parallel: dict[str, Any],
    order: tuple[int, ...],
    ranks: RankPool,
    models: dict[str, Path],
    data: dict[str, Path],
    hugging_face: dict[str, Any],
) -> None:
    """A permuted mesh trains the same, tied embeddings too; a rank's place in its groups is its coordinate."""
    for model in ("plain", "tied"):
        by_rank = ranks.run(4, "sft_steps", config(models[model], data["sft"], parallel), STEPS, order)
        assert_same(by_rank[0], hugging_face[model])
        assert [rank["places"] for rank in by_rank] == [rank["coordinates"] for rank in by_rank]
    tp, pp = parallel.get("tp", 1), parallel.get("pp", 1)
    assert [by_rank[rank]["coordinates"][0] for rank in order] == [position % tp for position in range(4)]
    assert [by_rank[rank]["coordinates"][2] for rank in order] == [position // (4 // pp) for position in range(4)]
