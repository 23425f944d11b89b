"""Weight gradients in bf16: what the local spec rounds, what TransformerEngine's layers add by themselves, and in which
dtype micro-batches are summed.

Not covered: TransformerEngine itself, which needs a GPU; a stand-in keeps to its protocol.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megarlhf.config import SFTConfig
from megarlhf.models.role import build_role
from megarlhf.parallel.loss import Loss, LossOutput
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.runtime import Runtime
from megarlhf.trainers.supervised.sft import SupervisedFineTuning
from tests.distributed import jobs
from tests.distributed.test_sft_layouts import config
from tests.distributed.tiny import write_family


def test_fused_weight_gradients_are_sums_in_fp32_counted_once(ranks, models, data) -> None:
    """Four micro-batches. Fused, `main_grad` is their sum in fp32 and what autograd got is not added; otherwise each is
    rounded to bf16 first, an error of up to half a step of 1 / 128."""
    cfg = config(models["plain"], data["sft"], {})
    cfg["actor"]["model"]["dtype"] = "bf16"
    fused = ranks.run(1, "fused_gradients", cfg, True)[0]
    rounded = ranks.run(1, "fused_gradients", cfg, False)[0]
    by_apex = ranks.run(1, "apex_gradients", cfg)[0]
    assert len(fused) == len(rounded) == len(by_apex) == 16, "four linear layers in each of four"
    for largest, error in (*fused, *by_apex):
        assert error <= 1e-6 * largest
    for largest, error in rounded:
        assert 1e-5 * largest < error < largest / 64


class _FirstIsLarge:
    """A loss, `LARGE` times as large for the first of the micro-batches that it is called with."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self.names, self._first = loss, loss.names, True

    def __call__(self, output: Tensor, batch: MicroBatch) -> LossOutput:
        value, sums, _ = self._loss(output, batch)
        factor, self._first = LARGE if self._first else 1.0, False
        return LossOutput(value * factor, sums)


def sums_of_micro_batches(runtime: Runtime, config: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """By parameter of a model in bf16, after one micro-batch with a large loss and `MANY` equal ones: the norm of what
    these add up to; how far `main_grad` is from all of them; and how far a sum in bf16 would be."""
    cfg = SFTConfig.model_validate(config)
    objective = SupervisedFineTuning(cfg)
    role = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1)
    parameters = dict(role.shard.module.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    samples = jobs._sft_samples(cfg)[:2]
    loss, (batch,) = objective.training_loss(role, samples), objective.micro_batches(role, samples)
    role.accumulate([batch], loss)
    single = {name: parameter.main_grad.clone() for name, parameter in parameters.items()}
    role.accumulate([batch] * (1 + MANY), _FirstIsLarge(loss))
    found = {}
    for name, parameter in parameters.items():
        assert parameter.main_grad.dtype == torch.float32
        one, in_bf16 = single[name], (single[name] * LARGE).bfloat16()
        for _ in range(MANY):
            in_bf16 += one.bfloat16()
        exact = one.double() * (LARGE + MANY)
        errors = (float((total.double() - exact).norm()) for total in (parameter.main_grad, in_bf16))
        found[name] = (float(one.norm()) * MANY, *errors)
    return found


LARGE, MANY = 4096.0, 16
"""What is added to a sum in bf16, which has 8 digits, is lost where it is a 4096th of it."""


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_gradients_of_micro_batches_are_summed_in_fp32(family, ranks, data, tmp_path) -> None:
    """Every parameter of the local spec: linear layers, biases, experts, router, both kinds of norms, tied and untied
    embeddings and the vocabulary's kernel. Layers of TransformerEngine's kind are above; between ranks gradients are
    summed in the same buffers."""
    size = {"qwen3_moe": {"num_hidden_layers": 1}, "gpt2": {"n_layer": 1}}[family]
    cfg = config(write_family(tmp_path / "model", family, **size), data["sft"], {})
    cfg["actor"]["model"]["dtype"] = "bf16"
    found = ranks.run(1, sums_of_micro_batches, cfg)[0]
    learnt = {name: each for name, each in found.items() if each[0] > 0}
    assert len(learnt) >= len(found) - 4, "experts without a token are a few"
    for name, (norm, error, in_bf16) in learnt.items():
        assert error <= 1e-3 * norm, name
        assert in_bf16 > 0.9 * norm, name
