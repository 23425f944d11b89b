"""What layers of experts still hold when a step is over. Not covered: how much that is on a GPU (the rehearsal)."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from megarlhf.config import SFTConfig
from megarlhf.models.experts import Exchange
from megarlhf.models.role import build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.runtime import Runtime
from megarlhf.trainers.supervised.sft import SupervisedFineTuning
from tests.distributed import jobs
from tests.distributed.test_packed_layouts import write_ragged
from tests.distributed.tiny import write_family


def left_after_a_step(runtime: Runtime, tree: dict[str, Any]) -> dict[str, Any]:
    """How many inputs of layers with gradients there were and still are, and what dispatchers hold of a routing."""
    cfg = SFTConfig.model_validate(tree)
    actor = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1)
    inputs: list[weakref.ref[Tensor]] = []

    def note(layer: Any, args: Any, named: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            inputs.append(weakref.ref(named["hidden_states"]))

    for layer in actor.shard.module.decoder.layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    jobs.train_once(SupervisedFineTuning(cfg), actor, jobs._sft_samples(cfg)[:4])
    dispatchers = [layer.mlp.token_dispatcher for layer in actor.shard.module.decoder.layers]
    assert all(isinstance(each, Exchange) for each in dispatchers)
    return {
        "inputs": len(inputs),
        "alive": sum(each() is not None for each in inputs),
        "routing": [each.probs is not None or each.routing_map is not None for each in dispatchers],
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_inputs_and_routing_are_gone(recompute, ranks, tmp_path) -> None:
    """Upstream's dispatcher keeps the weights of experts, and through their graph the input of a layer that is computed
    again and the input's gradient."""
    tree = {
        "run": {"dir": "unused"},
        "actor": {
            "model": {"path": str(write_family(tmp_path / "model", "qwen3_moe", max_position_embeddings=256))},
            "recompute": recompute,
        },
        "data": {"train": str(write_ragged(tmp_path, seed=7)["sft"])},
        "train": {"num_steps": 1, "mini_batch_samples": 4, "micro_batch_samples": 2},
    }
    (found,) = ranks.run(1, left_after_a_step, tree)
    layers = len(found["routing"])
    assert layers > 1
    assert found["inputs"] >= 2 * layers, "at least two micro-batches"
    assert found["alive"] == 0
    assert not any(found["routing"])
