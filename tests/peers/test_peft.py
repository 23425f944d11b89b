"""Adapters against PEFT on transformers' models: `make test-peers`.

What the default tests hold against a wrapper written out (tests/distributed/lora.py) is held against PEFT itself here.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.lora import write_adapter
from tests.distributed.test_lora_layouts import assert_same
from tests.distributed.tiny import write_family
from tests.distributed.written_out import STEPS, config, sft_written_out

pytestmark = pytest.mark.peers


def on_base(model: Path, adapter: Path, *, trainable: bool = False) -> Any:
    """PEFT's model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter, is_trainable=trainable)


def logits(model: Any, vocab_size: int = 16) -> torch.Tensor:
    tokens = torch.arange(3 * 7).view(3, 7) * 5 % (vocab_size - 4) + 4
    with torch.no_grad():
        return model(tokens).logits


def name_of(parameter: str) -> str:
    return parameter.removeprefix("base_model.model.").replace(".default.", ".")


@pytest.mark.parametrize("rslora", [False, True])
def test_training_equals_peft(rslora, ranks, models, data, tmp_path) -> None:
    """Losses, gradients and the adapter after three steps, at TP2 x PP2. fp32."""
    adapter = write_adapter(tmp_path / "adapter", models["plain"], use_rslora=rslora)
    model = on_base(models["plain"], adapter, trainable=True)
    parameters = {name_of(name): p for name, p in model.named_parameters() if p.requires_grad}
    trace = sft_written_out(model, parameters, tokenizer=models["plain"], data=data["sft"])
    cfg = config(models["plain"], data["sft"], {"tp": 2, "pp": 2}, lora={"path": str(adapter)})
    assert_same(ranks.run(4, "sft_steps", cfg, STEPS)[0], trace)


FAMILIES = {
    "llama": {"targets": "all-linear"},
    "qwen3": {"targets": ["q_proj", "model.layers.1.mlp.*"]},
    "gpt2": {"targets": "all-linear"},
    "opt": {"targets": ["fc1", "v_proj", "out_proj"], "rslora": True},
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"targets": "all-linear"}),
    "qwen3_moe, rslora": ("qwen3_moe", {"targets": "all-linear", "rslora": True}),
    "qwen3_moe, some layers": ("qwen3_moe", {"targets": ["q_proj", "model.layers.1.mlp.experts.*"]}),
    "qwen3_moe, down alone": ("qwen3_moe", {"targets": ["o_proj", "experts.*.down_proj"]}),
    "mixtral": ("mixtral", {"targets": "all-linear"}),
    "mixtral, some layers": ("mixtral", {"targets": ["model.layers.0.*"]}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_is_peft_s(family, ranks, data, tmp_path) -> None:
    """The adapter loads in PEFT, adds what the merged export has in its weights, and PEFT's own save of it is one to
    start from. At TP2."""
    from transformers import AutoModelForCausalLM

    model = write_family(tmp_path / "model", family, vocab_size=16, num_hidden_layers=2)
    lora = {"rank": 4, "alpha": 6.0, "export": "both", **FAMILIES[family]}
    ranks.run(2, "lora_exports", config(model, data["sft"], {"tp": 2}, lora=lora), str(tmp_path / "out/actor"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out/actor", dtype=torch.float32)
    adapted = on_base(model, tmp_path / "out/actor_adapter")
    expected = logits(merged)
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=1e-5)
    assert (
        float((expected - logits(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))).abs().max()) > 0.01
    )
    adapted.save_pretrained(tmp_path / "theirs")
    again = {"path": str(tmp_path / "theirs"), "export": "both"}
    ranks.run(
        2, "lora_exports", config(model, data["sft"], {"pp": 2}, lora=again), str(tmp_path / "again/actor"), False
    )
    for name in ("actor/model.safetensors", "actor_adapter/adapter_model.safetensors"):
        from safetensors.numpy import load_file

        first, second = (load_file(tmp_path / folder / name) for folder in ("out", "again"))
        assert first.keys() == second.keys()
        for key, array in first.items():
            np.testing.assert_allclose(second[key], array, rtol=0, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("case", MIXTURES)
def test_experts_arrive_in_peft(case, ranks, data, tmp_path) -> None:
    """PEFT converts an adapter of experts by what adapter_config.json names, and leaves out without a word what it does
    not find there. At EP2; it is also one to start from."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    family, options = MIXTURES[case]
    model = write_family(tmp_path / "model", family, vocab_size=16, num_hidden_layers=2)
    lora = {"rank": 4, "alpha": 6.0, "export": "both", **options}
    ranks.run(2, "lora_exports", config(model, data["sft"], {"ep": 2}, lora=lora), str(tmp_path / "out/actor"))
    adapter = tmp_path / "out/actor_adapter"
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out/actor", dtype=torch.float32))
    torch.testing.assert_close(logits(on_base(model, adapter)), expected, rtol=0, atol=1e-5)
    again = {"path": str(adapter), "export": "merged"}
    ranks.run(1, "lora_exports", config(model, data["sft"], {}, lora=again), str(tmp_path / "again/actor"), False)
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again/actor", dtype=torch.float32))
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-6)
    tensors = load_file(adapter / "adapter_model.safetensors")
    without = {name: torch.zeros_like(each) if ".experts." in name else each for name, each in tensors.items()}
    save_file(without, adapter / "adapter_model.safetensors", {"format": "pt"})
    assert float((logits(on_base(model, adapter)) - expected).abs().max()) > 0.001


def test_a_new_adapter_starts_as_peft_s() -> None:
    """A uniform up to 1 / sqrt(columns), B zero; the numbers are other draws of it."""
    from peft.tuners.lora import Linear, LoraConfig

    theirs = Linear(torch.nn.Linear(400, 8), "default", LoraConfig(r=64, lora_alpha=64), r=64, lora_alpha=64)
    a = theirs.lora_A["default"].weight.detach()
    assert float(a.abs().max()) <= 1 / 20
    assert float(a.abs().max()) > 0.999 / 20
    assert float(a.std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.02)
    assert not theirs.lora_B["default"].weight.detach().any()
