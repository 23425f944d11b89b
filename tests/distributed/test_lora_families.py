"""Adapters of every family, experts among them: their gradients follow from those of the merged weights.

With W' = W + s B A the chain rule says dB = s dW' A^T and dA = s B^T dW'. dW' is what full tuning of the merged model
finds, which other tests hold against Hugging Face. Not covered: a scalar head.
"""

from typing import Any

import numpy as np
import pytest
import torch

from megarlhf.architectures.adapters import is_adapter_tensor
from tests.distributed.compare import assert_gradients_equal
from tests.distributed.lora import ALPHA, RANK
from tests.distributed.tiny import write_family
from tests.distributed.written_out import config

CASES: dict[str, tuple[str, tuple[int, dict[str, Any]]]] = {
    "gpt2": ("gpt2", (1, {})),
    "gpt2 TP2": ("gpt2", (2, {"tp": 2})),
    "opt TP2": ("opt", (2, {"tp": 2, "sequence_parallel": False})),
    "biased TP2": ("llama_biased", (2, {"tp": 2})),
    "experts": ("qwen3_moe", (1, {})),
    "experts EP2": ("qwen3_moe", (2, {"ep": 2})),
    "experts TP2": ("mixtral", (2, {"tp": 2, "sequence_parallel": True})),
    "experts EP2 TP2": ("qwen3_moe", (4, {"ep": 2, "tp": 2})),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_follow_from_those_of_the_merged_weights(case, ranks, data, tmp_path) -> None:
    """Also that every linear layer has an adapter, and that the gradient norm is that of all of them."""
    family, (world_size, parallel) = CASES[case]
    model = write_family(tmp_path / "model", family, vocab_size=16, num_hidden_layers=2)
    cfg = config(model, data["sft"], parallel, lora={"rank": RANK, "alpha": ALPHA})
    adapted = ranks.run(world_size, "lora_gradients", cfg, str(tmp_path / "merged"))[0]
    full = ranks.run(1, "sft_steps", config(tmp_path / "merged", data["sft"], {}), 1)[0]
    np.testing.assert_allclose(adapted["loss"], full["loss"][0], rtol=1e-5)
    tensors, expected = adapted["weights"], {}
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        a, b = (torch.from_numpy(tensors[f"{module}.lora_{letter}.weight"]).double() for letter in "AB")
        gradient = torch.from_numpy(full["gradients"][0][f"{module}.weight"]).double()
        gradient = gradient.T if family == "gpt2" else gradient
        expected[f"{module}.lora_B.weight"] = (ALPHA / RANK * gradient @ a.T).numpy()
        expected[name] = (ALPHA / RANK * b.T @ gradient).numpy()
    actual = {name: array for name, array in adapted["gradients"].items() if is_adapter_tensor(name)}
    assert_gradients_equal(actual, expected, relative=2e-5, what=case)
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in expected.values()))
    np.testing.assert_allclose(adapted["grad_norm"], norm, rtol=1e-5)
    kinds = tuple(f"{kind}.weight" for kind in ("proj", "c_attn", "c_fc", "fc1", "fc2", "w1", "w2", "w3"))
    linear = [name.removesuffix(".weight") for name in full["gradients"][0] if name.endswith(kinds)]
    assert {f"{name}.lora_A.weight" for name in linear} == {name for name in expected if "lora_A" in name}
