"""adapter_config.json as PEFT reads it. That PEFT computes what the merged model does: tests/peers/test_peft.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import LoraConfig
from megarlhf.weights.checkpoint.peft import adapted, adapter_config, require_readable_by_peft
from tests.distributed.tiny import write_family
from tests.refuses import refuses

ENDS = {"qwen3_moe": ["down_proj", "gate_proj", "up_proj"], "mixtral": ["w1", "w2", "w3"]}
FOLDER = {"qwen3_moe": "mlp", "mixtral": "block_sparse_moe"}
ATTENTION = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]


def with_lora(family: str, directory: Path, **lora: Any) -> Architecture:
    arch = architecture_from_hf(write_family(directory / family, family))
    return adapted(arch, LoraConfig.model_validate({"rank": 4, "alpha": 6.0, **lora}))


def stated(family: str, directory: Path, **lora: Any) -> dict[str, Any]:
    arch = with_lora(family, directory, **lora)
    assert arch.adapter is not None
    return adapter_config(arch.adapter, arch, "lm", "base")


@pytest.mark.parametrize("family", ENDS)
def test_experts_of_every_layer_are_named_by_their_ends(family: str, tmp_path: Path) -> None:
    """PEFT turns these names, and no others, into those of the tensors that hold all experts of a layer."""
    assert stated(family, tmp_path)["target_modules"] == sorted([*ATTENTION, *ENDS[family]])


@pytest.mark.parametrize("family", ENDS)
def test_experts_of_some_layers_are_found_with_and_without_a_number(family: str, tmp_path: Path) -> None:
    """By their names in the files, and by those that PEFT tries on transformers' model, where all experts are one
    tensor in a folder `mlp`. No other layer, no router and no attention is."""
    folder, ends = FOLDER[family], ENDS[family]
    targets = [f"model.layers.[13].{folder}.*", "model.layers.0.self_attn.q_proj"]
    pattern = stated(family, tmp_path, targets=targets)["target_modules"]
    names = [
        f"model.layers.{n}.{f}.experts.{m}{end}"
        for n in (1, 3)
        for f in {folder, "mlp"}
        for m in ("", "0.", "12.")
        for end in ends
    ]
    assert all(re.fullmatch(pattern, name) for name in [*names, "model.layers.0.self_attn.q_proj"])
    others = [name.replace("layers.1", "layers.0").replace("layers.3", "layers.2") for name in names]
    others += [f"model.layers.1.{folder}.gate", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts"]
    assert not any(re.fullmatch(pattern, name) for name in others)


def test_the_scale_of_experts_is_one_that_joining_keeps(tmp_path: Path) -> None:
    """PEFT doubles rank and alpha of gate and up: alpha / r stays, alpha / sqrt(r) does not. 6 / sqrt(4) = 12 / 4."""
    experts = stated("qwen3_moe", tmp_path, rslora=True)
    assert (experts["use_rslora"], experts["r"], experts["lora_alpha"]) == (False, 4, 12)
    dense = stated("qwen3", tmp_path, rslora=True)
    assert (dense["use_rslora"], dense["r"], dense["lora_alpha"]) == (True, 4, 6)


UNREADABLE = {
    "gate alone": ["q_proj", "gate_proj"], "no down": ["gate_proj", "up_proj"],
    "gate and up of other layers": ["down_proj", "layers.0.mlp.*.gate_proj", "layers.1.mlp.*.up_proj"],
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_experts_that_peft_would_leave_out_are_not_exported(case: str, tmp_path: Path) -> None:
    """tests/peers/test_peft.py has what it reads: all three, down alone, and no experts."""
    with refuses("all three", "targets", "export merged"):
        require_readable_by_peft(with_lora("qwen3_moe", tmp_path, targets=UNREADABLE[case]))
    for number, targets in enumerate(("all-linear", ["down_proj"], ["q_proj"], ["model.layers.0.*"])):
        require_readable_by_peft(with_lora("qwen3_moe", tmp_path / str(number), targets=targets))
    require_readable_by_peft(with_lora("qwen3", tmp_path, targets=["gate_proj"]))
