"""SFT with an adapter equals the same written out on transformers' model, gradient by gradient, at every layout.

Not covered: bf16; dropout, which is refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarlhf.architectures.adapters import is_adapter_tensor
from tests.distributed.lora import wrapped, write_adapter
from tests.distributed.written_out import STEPS, assert_same_training, config, sft_written_out

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


@pytest.fixture(scope="module")
def adapter(models, tmp_path_factory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "all", models["plain"])


@pytest.fixture(scope="module")
def written_out(models, data, adapter) -> dict[str, Any]:
    model, parameters = wrapped(models["plain"], adapter)
    return sft_written_out(model, parameters, tokenizer=models["plain"], data=data["sft"])


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Of the adapter: the layers under it have gradients of their own in ours, and are held still."""

    def of_adapter(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array for name, array in arrays.items() if is_adapter_tensor(name)}

    gradients = [of_adapter(step) for step in actual["gradients"]]
    assert_same_training(actual | {"gradients": gradients, "weights": of_adapter(actual["weights"])}, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_adapter_written_out(layout, ranks, models, data, adapter, written_out) -> None:
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


def test_only_the_adapter_has_gradients_and_optimizer_state(ranks, models, data) -> None:
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
