"""Tiny models as Hugging Face writes them, with the demo's tokenizer, and a little data."""

import json
from pathlib import Path
from typing import Any

import torch

from tools.demo.make_data import base_files

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""Numbers that bite within ten positions, and none of them Llama 3.1's own."""


def write_tiny_llama(
    directory: Path, *, seed: int = 0, tied: bool = False, llama3_rope: bool = False, num_layers: int = 4
) -> Path:
    """Random weights: log-probs far from uniform, rounding not amplified. vLLM on a CPU has head_dim 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.model").write_bytes(base_files()["tokenizer.model"])
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        head_dim=32,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.08,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=tied,
        rope_parameters=LLAMA3_ROPE if llama3_rope else {"rope_type": "default", "rope_theta": 10000.0},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is loaded wrongly
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def write_reward_model(directory: Path, base: Path, *, seed: int = 9, std: float = 0.08) -> Path:
    """The trunk of a tiny Llama with a random scalar head, as Hugging Face writes it: one label, `score.weight`."""
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(seed)
    model = LlamaForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=std)
    model.save_pretrained(directory)
    (directory / "tokenizer.model").write_bytes((base / "tokenizer.model").read_bytes())
    return directory


YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
    "attention_factor": 1.3,
}  # fmt: skip
"""Of 16 channels some are divided, some kept, some between."""
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 4.0, 6.0, 8.0], "partial_rotary_factor": 0.5,
}  # fmt: skip
"""Half of a head of 16 is turned."""

COMMON: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.08, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
ROPE: dict[str, Any] = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 96}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", ROPE),
    "llama3_rope": ("llama", {**ROPE, "rope_parameters": LLAMA3_ROPE}),
    "llama_yarn": ("llama", {**ROPE, "max_position_embeddings": 128, "rope_parameters": YARN_ROPE}),
    "llama_biased": ("llama", {**ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama_mlp_biased": ("llama", {**ROPE, "mlp_bias": True}),
    "mistral": ("mistral", {**ROPE, "sliding_window": 8}),
    "qwen2": ("qwen2", {**ROPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**ROPE, "head_dim": 32}),
    "qwen3_biased": ("qwen3", {**ROPE, "head_dim": 32, "attention_bias": True}),
    "gpt2": ("gpt2", {**COMMON, "n_inner": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "opt": ("opt", {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}),
    "mixtral": ("mixtral", {**ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **ROPE, "head_dim": 32, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe_renormalized": (
        "qwen3_moe",
        {**ROPE, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "phi3": ("phi3", {**ROPE, "sliding_window": 8}),
    "phi3_longrope": ("phi3", {**ROPE, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
}  # fmt: skip
"""(model_type, settings) of one tiny model for each thing that a family does in its own way."""


def write_family(directory: Path, name: str, *, scalar: bool = False, seed: int = 0, **changes: Any) -> Path:
    """A random model of a family: norms and biases are random too, since ones and zeros hide mistakes."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    model_type, settings = FAMILIES[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**settings, **changes, **({"num_labels": 1} if scalar else {})})
    model = (AutoModelForSequenceClassification if scalar else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:  # some families start their experts or router from torch.empty or zeros
                parameter.normal_(std=0.08)
    model.save_pretrained(directory)
    (directory / "tokenizer.model").write_bytes(base_files()["tokenizer.model"])
    return directory


def write_data(directory: Path) -> dict[str, Path]:
    """The three kinds of file, with prompts of different lengths."""
    rows: dict[str, list[dict[str, str]]] = {"sft": [], "pairs": [], "prompts": []}
    for n in range(64):
        a, b = 3 + 7 * n % 90, 1 + 13 * n % 95
        prompt, answer = f"{a}+{b}=", str(a + b)
        rows["sft"].append({"prompt": prompt, "response": answer})
        rows["pairs"].append({"prompt": prompt, "chosen": answer, "rejected": str(a + b + 1 + n % 100)})
        rows["prompts"].append({"prompt": prompt, "answer": answer})
    paths = {}
    for name, lines in rows.items():
        paths[name] = directory / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths
