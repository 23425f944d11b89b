"""Adapters of tiny models, and what they compute, written out on transformers' models: a wrapper around nn.Linear, with
nothing of ours. That PEFT computes the same: tests/peers/test_peft.py."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RANK, ALPHA = 4, 6.0
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


class Wrapped(nn.Module):
    """W x + scale B A x, as Hu et al. write it."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base = base
        self.A, self.B, self.scale = nn.Parameter(a.clone()), nn.Parameter(b.clone()), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


def linear_layers(model: Any, targets: tuple[str, ...] = LINEAR) -> dict[str, nn.Module]:
    """By name, those of transformers' model that end in one of the targets."""
    return {name: module for name, module in model.named_modules() if name.endswith(targets)}


def write_adapter(
    directory: Path, model: Path, *, targets: tuple[str, ...] = LINEAR, rank: int = RANK, seed: int = 5, **config: Any
) -> Path:
    """A PEFT adapter of a model, A and B drawn: with B zero, as in a new one, A would have no gradient."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in linear_layers(base, targets).items():
        outputs, inputs = layer.weight.shape
        if type(layer).__name__ == "Conv1D":
            inputs, outputs = layer.weight.shape
        for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    stated = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "r": rank,
        "lora_alpha": ALPHA, "lora_dropout": 0.0, "target_modules": list(targets), "bias": "none",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps({**stated, **config}))
    return directory


def read_adapter(directory: Path) -> dict[str, Tensor]:
    """By the name of the linear layer and the letter: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
    from safetensors.torch import load_file

    return {
        name.removeprefix(PREFIX): tensor for name, tensor in load_file(directory / "adapter_model.safetensors").items()
    }


def wrapped(model: Path, adapter: Path) -> tuple[Any, dict[str, nn.Parameter]]:
    """transformers' model with the adapter on it, its base frozen; the adapter's parameters by their names on disk."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base.requires_grad_(False)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, found = read_adapter(adapter), {}
    for name, layer in linear_layers(base, tuple(LINEAR)).items():
        if f"{name}.lora_A.weight" in tensors:
            a, b = (tensors[f"{name}.lora_{letter}.weight"] for letter in "AB")
            parent, _, last = name.rpartition(".")
            scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
            wrapper = Wrapped(layer, a, b, scale)
            setattr(base.get_submodule(parent), last, wrapper)
            found |= {f"{name}.lora_A.weight": wrapper.A, f"{name}.lora_B.weight": wrapper.B}
    return base, found
