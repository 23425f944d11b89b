"""SFT with an adapter equals the same written out on transformers' model, gradient by gradient, at every layout.

Not covered: bf16; dropout, which is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarlhf.architectures.adapters import is_adapter_tensor
from megarlhf.data.samples import build_sft
from megarlhf.data.sources import load_records
from megarlhf.data.tokenizer import load_tokenizer
from tests.distributed.compare import assert_gradients_equal, assert_weights_equal
from tests.distributed.lora import wrapped, write_adapter
from tests.ranks import RankPool

LR, STEPS, MINI_BATCH = 1e-3, 3, 8

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": False}),
    "tp2sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp4": (4, {"tp": 4}),  # cuts inside KV groups
    "pp2": (2, {"pp": 2}),
    "tp2pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": False}),
    "pp2vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp2dp2": (4, {"tp": 2}),
}
ROLE: dict[str, dict[str, Any]] = {
    "dp2": {"recompute": "full"},
    "tp2dp2": {"offload": {"parameters": True, "optimizer": "stream"}, "recompute": "core_attention"},
}
"""What else is asked of the actor at a layout."""


def config(model: Path, data: Path, parallel: dict[str, Any], **role: Any) -> dict[str, Any]:
    return {
        "run": {"dir": "unused"},
        "actor": {"model": {"path": str(model)}, "parallel": parallel, "optim": {"lr": LR}, **role},
        "data": {"train": str(data)},
        "train": {"num_steps": STEPS, "mini_batch_samples": MINI_BATCH, "micro_batch_samples": 2},
    }


def train_written_out(model_path: Path, adapter: Path, data: Path) -> dict[str, Any]:
    """AdamW on the adapter alone, one sequence at a time: no padding, nothing of ours."""
    samples, _ = build_sft(
        load_records(data, fields=("prompt", "response")),
        load_tokenizer(model_path),
        max_prompt_tokens=64,
        max_response_tokens=64,
    )
    model, parameters = wrapped(model_path, adapter)
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
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
        trace["gradients"].append({n: p.grad.numpy().copy() for n, p in parameters.items() if p.grad is not None})
        trace["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)))
        optimizer.step()
    trace["weights"] = {name: p.detach().numpy().copy() for name, p in parameters.items()}
    return trace


@pytest.fixture(scope="module")
def adapter(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "all", models["plain"])


@pytest.fixture(scope="module")
def written_out(models: dict[str, Path], data: dict[str, Path], adapter: Path) -> dict[str, Any]:
    return train_written_out(models["plain"], adapter, data["sft"])


def of_adapter(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if is_adapter_tensor(name)}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(actual["grad_norm"], expected["grad_norm"], rtol=1e-5)
    assert len(actual["gradients"]) == len(expected["gradients"]) == STEPS
    for step in range(STEPS):
        relative = 1e-5 if step == 0 else 1e-4  # from the second step on each run's weights carry rounding of their own
        gradients = of_adapter(actual["gradients"][step])
        assert_gradients_equal(gradients, expected["gradients"][step], relative=relative, what=f"step {step}")
    assert_weights_equal(of_adapter(actual["weights"]), expected["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_adapter_written_out(
    layout: str, ranks: RankPool, models: dict[str, Path], data: dict[str, Path], adapter: Path, written_out: Any
) -> None:
    """q, k and v are one layer of Megatron's, gate and up another: their adapters are seven all the same. The base
    stays as it was, to the bit."""
    world_size, parallel = LAYOUTS[layout]
    cfg = config(models["plain"], data["sft"], parallel, lora={"path": str(adapter)}, **ROLE.get(layout, {}))
    by_rank = ranks.run(world_size, "sft_steps", cfg, STEPS)
    assert_same(by_rank[0], written_out)
    stored = {name: p.detach().numpy() for name, p in wrapped(models["plain"], adapter)[0].named_parameters()}
    base = {name: array for name, array in by_rank[0]["weights"].items() if not is_adapter_tensor(name)}
    for name, array in base.items():
        module, _, end = name.rpartition(".")
        expected = stored.get(name, stored.get(f"{module}.base.{end}"))
        np.testing.assert_array_equal(array, expected, err_msg=name)


def test_only_the_adapter_has_gradients_and_optimizer_state(
    ranks: RankPool, models: dict[str, Path], data: dict[str, Path]
) -> None:
    """In bf16, at TP2: of each element that is trained a gradient and an fp32 copy with two moments, 16 bytes; of the
    base nothing but its 2 bytes of weight. Full tuning has all of it for every element."""
    found = []
    for how in ({}, {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}):
        cfg = config(models["plain"], data["sft"], {"tp": 2}, **how)
        cfg["actor"]["model"]["dtype"] = "bf16"
        found.append(ranks.run(2, "trained_bytes", cfg)[0])
    full, lora = found
    assert lora["parameters"] == full["parameters"] + 2 * lora["adapter"]
    for each in found:
        assert each["optimizer"] == 12 * each["adapter"]
        assert 4 * each["adapter"] <= each["gradients"] <= 4 * each["adapter"] + 1024  # with the buffer's padding
    assert full["gradients"] + full["optimizer"] > 20 * (lora["gradients"] + lora["optimizer"])
