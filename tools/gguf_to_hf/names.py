"""Where the tensors of a model stand in a GGUF file: llama.cpp's names, and the order of their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import logical_tensors, table_of
from megarlhf.placement import Shape
from tools.gguf_to_hf.header import GGUFFile
from tools.gguf_to_hf.model import NOT_OF_THE_MODEL
from tools.gguf_to_hf.numbers import Numbers

_OUTSIDE: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_IN_A_LAYER: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""By Hugging Face's names, without the layer's, an expert's number, and .weight or .bias; of all families."""

_PAIRS_ADJACENT = ("llama", "mistral", "mixtral")
"""llama.cpp turns neighbouring channels of a head here, Hugging Face one of its first half with one of its second: rows
of q and k stand in another order."""
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""GPT-2's are [input, output] in Hugging Face."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a logical tensor is made of."""

    stored: str
    """The file's tensor."""
    shape: Shape
    """Of the logical tensor."""
    expert: int | None = None
    """Which of the matrices of `stored`."""
    heads: int = 0
    """Of a tensor whose rows are in llama.cpp's order: how many heads they are; 0: in Hugging Face's."""
    transposed: bool = False

    @property
    def stored_shape(self) -> Shape:
        """What the file's tensor, or an expert of it, must have."""
        return tuple(reversed(self.shape)) if self.transposed else self.shape

    @property
    def num_rows(self) -> int:
        """Of the logical tensor, in pieces of which it can be read; a vector, or what is transposed, is one row."""
        return 1 if self.transposed or len(self.shape) == 1 else self.shape[0]

    def read(self, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the logical tensor, as they follow one another in memory."""
        if self.num_rows == 1:
            whole = numbers.rows(self.stored, slice(None)).view(self.stored_shape)
            return whole.T.contiguous() if self.transposed else whole[self._order()] if self.heads else whole
        first = 0 if self.expert is None else self.expert * self.shape[0]
        rows = self._order()[start:stop] if self.heads else slice(first + start, first + stop)
        return numbers.rows(self.stored, rows)

    def _order(self) -> np.ndarray:
        """Row n of the logical tensor is row order[n] of the stored one."""
        stored = np.arange(self.shape[0]).reshape(self.heads, -1, 2)  # a head's pairs, and the two of each
        return stored.swapaxes(1, 2).reshape(-1)


def sources(file: GGUFFile, arch: Architecture) -> dict[str, Source]:
    """Of every logical tensor of the model.

    Raises: ValueError, listing every difference, unless the file holds exactly the model's tensors.
    """
    found = {name: _source(name, shape, arch) for name, shape in logical_tensors(arch).items()}
    problems, used = [], set(NOT_OF_THE_MODEL)
    if arch.tied_embeddings:
        used.add("output.weight")  # repeats the embedding where it is there
    for source in dict.fromkeys(found.values()):
        expected = source.stored_shape
        if source.expert is not None:
            expected = (arch.num_experts, *expected)
        stored = file.tensors.get(source.stored)
        if stored is None:
            problems.append(f"{source.stored} is missing")
        elif stored.shape != expected:
            problems.append(f"{source.stored} has shape {stored.shape}, expected {expected}")
        used.add(source.stored)
    problems += [f"{name} is not part of the model" for name in file.tensors if name not in used]
    if problems:
        problems = list(dict.fromkeys(problems))
        raise ValueError(
            f"{file.path} differs from what its metadata describes in {len(problems)} tensors: {'; '.join(problems)}. "
            "Copy it again, or use another model"
        )
    return found


def _source(name: str, shape: Shape, arch: Architecture) -> Source:
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(re.escape(table_of(arch).hf_layer).replace(r"\{layer\}", r"(\d+)") + r"(.+)", module)
    if layer is None:
        return Source(f"{_OUTSIDE[module]}.{kind}", shape)
    inside, expert = layer[2], None
    if numbered := re.fullmatch(r"(.+\.experts)\.(\d+)(\..+)", inside):
        inside, expert = numbered[1] + numbered[3], int(numbered[2])
    heads = 0
    if arch.model_type in _PAIRS_ADJACENT:
        heads = {"self_attn.q_proj": arch.num_heads, "self_attn.k_proj": arch.num_kv_heads}.get(inside, 0)
    stored = f"blk.{layer[1]}.{_IN_A_LAYER[inside]}.{kind}"
    return Source(stored, shape, expert, heads, f"{inside}.{kind}" in _TRANSPOSED)
