"""The first SFT steps are equal to Hugging Face trained by plain torch, on one rank and where several kinds of
parallelism meet. That every layout equals one rank: tests/distributed/test_invariance.py."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import written_out
from tests.distributed.written_out import LR, STEPS, assert_same_training, sft_written_out

WEIGHT_DECAY = 0.1

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": False}),
    "pp2_uneven": (2, {"pp": 2, "layers_per_stage": [3, 1]}),
    "pp2vpp2": (2, {"pp": 2, "vpp": 2}),
}


def config(model: Path, data: Path, parallel: dict[str, Any], micro_batch: int = 2) -> dict[str, Any]:
    optim = {"lr": LR, "weight_decay": WEIGHT_DECAY}
    return written_out.config(model, data, parallel, micro_batch=micro_batch, optim=optim)


@pytest.fixture(scope="session")
def hugging_face(models, data) -> dict[str, dict[str, Any]]:
    return {name: _train_hugging_face(models[name], data["sft"]) for name in ("plain", "tied", "rope")}


def _train_hugging_face(model_path: Path, data: Path) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    return sft_written_out(model, parameters, tokenizer=model_path, data=data, weight_decay=WEIGHT_DECAY)


CASES = [*(("plain", layout) for layout in LAYOUTS), *itertools.product(("tied", "rope"), ("tp1", "tp2pp2"))]


@pytest.mark.parametrize("model, layout", CASES)
def test_every_layout_equals_hugging_face(model, layout, ranks, models, data, hugging_face) -> None:
    """Losses 1e-5, gradient norms 1e-5, each gradient, and weights 1e-4 after three steps. fp32, no dropout.

    Tied, with pp = 2 the last stage holds a copy of the embedding; both must get the summed gradient. All four numbers
    of Llama 3's scaling of positions count; without it the first loss is another one.
    """
    world_size, parallel = LAYOUTS[layout]
    by_rank = ranks.run(world_size, "sft_steps", config(models[model], data["sft"], parallel), STEPS)
    assert_same_training(by_rank[0], hugging_face[model])
    assert all(rank["loss"] == by_rank[0]["loss"] and rank["grad_norm"] == by_rank[0]["grad_norm"] for rank in by_rank)


def test_the_split_into_micro_batches_changes_nothing(ranks, models, data, hugging_face) -> None:
    """The denominator is the mini-batch's: one micro-batch of eight, or eight of one."""
    for micro_batch in (1, 8):
        by_rank = ranks.run(1, "sft_steps", config(models["plain"], data["sft"], {}, micro_batch), STEPS)
        assert_same_training(by_rank[0], hugging_face["plain"])


@pytest.mark.parametrize(
    ("parallel", "order"), [({"tp": 2}, (0, 2, 1, 3)), ({"tp": 2, "pp": 2}, (3, 0, 1, 2)), ({"pp": 4}, (2, 0, 3, 1))]
)
def test_ranks_in_another_order_equal_hugging_face(parallel, order, ranks, models, data, hugging_face) -> None:
    """A permuted mesh trains the same, tied embeddings too; a rank's place in its groups is its coordinate."""
    for model in ("plain", "tied"):
        by_rank = ranks.run(4, "sft_steps", config(models[model], data["sft"], parallel), STEPS, order)
        assert_same_training(by_rank[0], hugging_face[model])
        assert [rank["places"] for rank in by_rank] == [rank["coordinates"] for rank in by_rank]
    tp, pp = parallel.get("tp", 1), parallel.get("pp", 1)
    assert [by_rank[rank]["coordinates"][0] for rank in order] == [position % tp for position in range(4)]
    assert [by_rank[rank]["coordinates"][2] for rank in order] == [position // (4 // pp) for position in range(4)]
