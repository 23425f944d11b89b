"""A tiny Llama as Hugging Face writes it, with the demo's tokenizer, and a little data."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tools.demo.make_data import base_files


def write_tiny_llama(directory: Path, *, seed: int = 0, tied: bool = False, llama3_rope: bool = False) -> Path:
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
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.08,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=tied,
        # Numbers that bite within ten positions, and none of them Llama 3.1's own.
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 64,
        }
        if llama3_rope
        else {"rope_type": "default", "rope_theta": 10000.0},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is loaded wrongly
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
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
