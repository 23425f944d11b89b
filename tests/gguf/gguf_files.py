"""GGUF files made of transformers' models and tokenizers, as llama.cpp's converter makes them. By gguf's own writer,
its table of names and its quantization."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.chat_styles import CHATML
from tests.weights.models import make_model

pytest.importorskip("gguf")  # what imports this file is skipped without it

from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize

ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
"""llama.cpp's word where it is another one."""
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

VOCAB = 352
"""Of the models: a few more than the tokenizers have, as usual."""

Tensors = dict[str, torch.Tensor]


def stored(tensor: torch.Tensor, kind: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    """Its bytes, and the type that it gets: vectors and rows that no block divides stay in F32."""
    type_ = GGMLQuantizationType[kind]
    values = tensor.detach().float().numpy()
    if values.ndim == 1 or values.shape[-1] % GGML_QUANT_SIZES[type_][0]:
        type_ = GGMLQuantizationType.F32
    return quantize(values, type_), type_


def rounded(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What a tensor becomes by being stored, by gguf itself: rows are quantized one by one."""
    return torch.from_numpy(np.array(dequantize(*stored(tensor, kind)))).view(tensor.shape)


def as_stored(model: Any, kind: str) -> Tensors:
    """The model's tensors, by Hugging Face's names on disk, as they are once stored."""
    return {
        name: rounded(tensor.T, kind).T if conv1d(name) else rounded(tensor, kind)
        for name, tensor in on_disk(model).items()
    }


def conv1d(name: str) -> bool:
    """Whether a tensor is GPT-2's, [input, output]."""
    return bool(re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name))


def on_disk(model: Any) -> Tensors:
    """As save_pretrained names them: experts apart, a tied head once."""
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if (stacked := re.fullmatch(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)", name)) is None:
            tensors[name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if mixtral(model) else name] = tensor
            continue
        block = "block_sparse_moe" if mixtral(model) else "mlp"
        names = ("w1", "w3", "w2") if mixtral(model) else ("gate_proj", "up_proj", "down_proj")
        for expert, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if stacked[2] == "gate_up_proj" else [matrix]
            for part, of in zip(parts, names[:2] if len(parts) == 2 else names[2:], strict=True):
                tensors[f"{stacked[1]}.{block}.experts.{expert}.{of}.weight"] = part
    return tensors


def mixtral(model: Any) -> bool:
    return bool(model.config.model_type == "mixtral")


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """A head's first and second half, channel by channel: what llama.cpp does with q and k of a Llama."""
    halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def gguf_tensors(model: Any) -> Tensors:
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    number = next(n for n, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    tensors: dict[str, Any] = {}
    for name, tensor in on_disk(model).items():
        if conv1d(name):
            tensor = tensor.T
        if number == MODEL_ARCH.LLAMA and re.search(r"\.[qk]_proj\.", name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = permuted(tensor, heads)
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            module = name.replace(expert[0], ".experts.").removesuffix(".weight")
            tensors.setdefault(f"{names.get_name(module)}.weight", []).append(tensor)
            continue
        module, _, kind = name.rpartition(".")
        found = names.get_name(module)
        assert found is not None, name
        tensors[f"{found}.{kind}"] = tensor
    return {name: torch.stack(of) if isinstance(of, list) else of for name, of in tensors.items()}


def add_sizes(writer: GGUFWriter, config: Any) -> None:
    heads = config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if head_dim != config.hidden_size // heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None) and config.model_type in ("mistral", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if experts := getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def rope_tensors(config: Any) -> Tensors:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if config.model_type == "gpt2":
        return {}
    rope = config.rope_parameters
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{n}.weight": torch.tensor(rope[f"{n}_factor"]) for n in ("long", "short")}
    if rope["rope_type"] != "llama3":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
    return {"rope_freqs.weight": plain / scaled}


def add_byte_level(
    writer: GGUFWriter, tokenizer: Any, pre: str, *, eos: str = "<|im_end|>", template: str | None = CHATML,
    pad_to: int = 0
) -> None:  # fmt: skip
    """A byte-level tokenizer of tokenizers, whose added tokens are its marks."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = [by_id[number] for number in range(len(by_id))]
    types = [TokenType.CONTROL if token in MARKS else TokenType.NORMAL for token in tokens]
    tokens += [f"[PAD{n}]" for n in range(len(tokens), pad_to)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types + [TokenType.UNUSED] * (len(tokens) - len(types)))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index(eos))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    if template is not None:
        writer.add_chat_template(template)


def write_gguf(
    path: Path, model: Any, tokenizer: Callable[[GGUFWriter], None], *, kind: str = "F32",
    change: Callable[[Tensors], None] = lambda tensors: None, metadata: Mapping[str, Any] | None = None
) -> Path:  # fmt: skip
    """`metadata`: further whole numbers and texts, or others in place of what would stand there."""
    config = model.config
    writer = GGUFWriter(path, ARCHITECTURES.get(config.model_type, config.model_type))
    writer.add_type("model")
    add_sizes(writer, config)
    tokenizer(writer)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    tensors = {**gguf_tensors(model), **rope_tensors(config)}
    change(tensors)
    for name, tensor in tensors.items():
        values, type_ = stored(tensor, kind)
        writer.add_tensor(name, values, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_tokenizer(writer: GGUFWriter, **changes: Any) -> None:
    """The tokenizer that the models have here, or another in some respect."""
    from tests.gguf.byte_level import trained

    add_byte_level(writer, **{"tokenizer": trained("smollm"), "pre": "smollm", "pad_to": VOCAB, **changes})


def tokens(writer: GGUFWriter) -> None:
    with_tokenizer(writer)


def small_llama() -> Any:
    return make_model("llama", vocab_size=VOCAB, num_hidden_layers=2)


def small_file(path: Path) -> Path:
    return write_gguf(path, small_llama(), tokens, kind="Q8_0")
