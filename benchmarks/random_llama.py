"""A Llama of about 0.76 billion random bf16 parameters, as Hugging Face stores one: something to convert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import logical_tensors
from megarlhf.weights.checkpoint.hf_writer import open_hf_writer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 1536,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 6144,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def write_random_llama(directory: Path, *, config: dict[str, Any] | None = None, seed: int = 0) -> int:
    """Writes the model in four shards; returns its parameters."""
    config = config or CONFIG
    tensors = logical_tensors(architecture_from_hf(config))
    total = sum(torch.Size(shape).numel() for shape in tensors.values())
    generator = torch.Generator().manual_seed(seed)
    specs = {name: (shape, torch.bfloat16) for name, shape in tensors.items()}
    with open_hf_writer(directory, specs, config, max_shard_bytes=2 * total // 4 + (64 << 20)) as writer:
        for name, shape in tensors.items():
            writer.write(name, (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16))
    return total
