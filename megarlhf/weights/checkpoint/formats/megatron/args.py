"""Megatron-LM's arguments of an architecture and a layout, and the architecture that arguments describe.

Megatron-LM knows switches, not families: Mistral without a window is its Llama. It has no word for plain ReLU
(OPT), for OPT's two extra position rows, for the frequencies of Llama 3.1's rotary scaling (its own are 1, 4 and
8192 positions), for biases of the attention alone. So what we write also carries the fields of the
`Architecture` under a key of our own, which wins as long as it agrees with the arguments beside it.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from megarlhf.architectures.architecture import Architecture, Llama3Rope
from megarlhf.architectures.families import FAMILIES
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import logical_tensors, padded_vocab_size
from megarlhf.weights.checkpoint.formats.megatron.infer import disagreements, infer, recognise, same
from megarlhf.weights.checkpoint.formats.megatron.unsupported import Args, refuse_unknown

OWN_KEY = "megarlhf_architecture"

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")

_log = logging.getLogger(__name__)


def args_of(arch: Architecture, layout: MegatronLayout, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that a checkpoint's `args` state, by Megatron-LM's names; all that its
    `--use-checkpoint-args` and `--use-mp-args-from-checkpoint-args` read, and ours under `OWN_KEY`."""
    args = model_args(arch) | _layout_args(arch, layout) | _run_args(layout, dtype)
    again = infer(args, arch.model_type)
    lost = [f.name for f in fields(arch) if getattr(again, f.name) != getattr(arch, f.name)]
    if lost:
        _log.warning(
            "Megatron's arguments cannot state this model's %s: only megarlhf reads it back, Megatron would compute "
            "with %s",
            ", ".join(f"{name} = {getattr(arch, name)!r}" for name in lost),
            ", ".join(repr(getattr(again, name)) for name in lost),
        )
    return args | {OWN_KEY: asdict(arch)}


def model_args(arch: Architecture) -> dict[str, Any]:
    """What describes the model, apart from layout and run."""
    rope = arch.positions == "rope"
    theta = int(arch.rope_theta) if float(arch.rope_theta).is_integer() else arch.rope_theta
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_size,
        "num_attention_heads": arch.num_heads,
        "group_query_attention": arch.num_kv_heads != arch.num_heads,
        "num_query_groups": arch.num_kv_heads,
        "kv_channels": arch.head_dim,
        "seq_length": arch.max_positions,
        # Rows of the table of learned positions, OPT's offset included.
        "max_position_embeddings": arch.max_positions + arch.position_offset,
        "vocab_size": arch.vocab_size,
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": rope,
        "rotary_base": theta if rope else 10000,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": arch.rope_scaling is not None,
        "rope_scaling_factor": 8.0 if arch.rope_scaling is None else arch.rope_scaling.factor,
        "normalization": "RMSNorm" if arch.norm == "rms" else "LayerNorm",
        "norm_epsilon": arch.norm_eps,
        "layernorm_epsilon": arch.norm_eps,
        "apply_layernorm_1p": False,
        "qk_layernorm": arch.qk_norm,
        "swiglu": arch.gated_mlp,
        "squared_relu": False,
        # Megatron's fused GELU is the tanh approximation, its other one is exact.
        "bias_gelu_fusion": arch.activation in _TANH_GELU,
        "add_bias_linear": arch.mlp_bias,
        "add_qkv_bias": arch.qkv_bias,
        "untie_embeddings_and_output_weights": not arch.tied_embeddings,
        # Tokens to the left and to the right of a token, without itself.
        "window_size": None if arch.sliding_window is None else (arch.sliding_window - 1, 0),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "apply_query_key_layer_scaling": False,
        **_expert_args(arch),
    }


def _expert_args(arch: Architecture) -> dict[str, Any]:
    if not arch.num_experts:
        return {"num_experts": None, "moe_ffn_hidden_size": None}
    return {
        "num_experts": arch.num_experts,
        "moe_ffn_hidden_size": arch.expert_ffn_size,
        "moe_router_topk": arch.experts_per_token,
        "moe_router_pre_softmax": not arch.renormalize_experts,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": 1,
        "moe_token_dispatcher_type": "alltoall",
    }


def _layout_args(arch: Architecture, layout: MegatronLayout) -> dict[str, Any]:
    args: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp,
        "context_parallel_size": 1,
        "data_parallel_size": layout.ep,
        "world_size": layout.tp * layout.pp * layout.ep,
        "sequence_parallel": False,
        "padded_vocab_size": layout.padded_vocab,
        "make_vocab_size_divisible_by": _vocab_multiple(arch.vocab_size, layout),
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "transformer_impl": "transformer_engine" if layout.spec == "te" else "local",
        "moe_grouped_gemm": layout.experts == "grouped",
        "moe_use_legacy_grouped_gemm": layout.experts == "grouped" and layout.spec == "local",
    }
    stages = [sum(len(chunk) for chunk in chunks) for chunks in layout.chunk_layers(arch.num_layers)]
    if len(set(stages)) == 1:
        if layout.vpp > 1:
            args["num_layers_per_virtual_pipeline_stage"] = stages[0] // layout.vpp
    elif len(set(stages[1:-1])) <= 1:
        args |= {"decoder_first_pipeline_num_layers": stages[0], "decoder_last_pipeline_num_layers": stages[-1]}
    else:
        args["pipeline_model_parallel_layout"] = _stage_string(layout.chunk_layers(arch.num_layers))
    return args


def _vocab_multiple(vocab: int, layout: MegatronLayout) -> int:
    """128 if that made the rows, else the least that does: in another layout it pads no more than it must."""
    if layout.padded_vocab == padded_vocab_size(vocab, layout.tp):
        return 128
    share, padding = layout.padded_vocab // layout.tp, layout.padded_vocab - vocab
    return next(m for m in range(padding // layout.tp + 1, share + 1) if share % m == 0)


def _stage_string(chunks: list[list[range]]) -> str:
    """`Ett|ttt|tL`: Megatron's spelling of any split, the virtual stages of all ranks one after another."""
    ordered = [chunks[rank][v] for v in range(len(chunks[0])) for rank in range(len(chunks))]
    return "E" + "|".join("t" * len(chunk) for chunk in ordered) + "L"


def _run_args(layout: MegatronLayout, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": None,
        "no_save_optim": True,
        "no_save_rng": True,
        "use_distributed_optimizer": False,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def arch_of(args: Args) -> Architecture:
    """The architecture that a checkpoint's arguments describe.

    The vocabulary is `vocab_size` if stated, else the padded one (with a warning).

    Raises: ValueError that names every argument which no family has, or which is missing.
    """
    refuse_unknown(args)
    own = args.get(OWN_KEY)
    if own is not None:
        arch = _own(own)
        changed = _changed(arch, args)
        if not changed:
            return arch
        _log.warning("%s contradicts the arguments beside it and is ignored: %s", OWN_KEY, "; ".join(changed))
    return recognise(args)


def contradictions(arch: Architecture, args: Args) -> list[str]:
    """Where a config.json's architecture is not the one that a checkpoint's arguments describe; each a sentence.

    Our own key says it whole if it agrees with the arguments beside it; otherwise only what they state counts.
    """
    wrong = disagreements(arch, args)
    try:
        own = None if args.get(OWN_KEY) is None else _own(args[OWN_KEY])
    except ValueError:
        own = None
    if own is None or _changed(own, args):
        return wrong
    known = {line.split(":")[0] for line in wrong}
    ignored = _meaningless(arch, own) | known
    return wrong + [
        f"{f.name}: config.json says {getattr(arch, f.name)!r}, args say {getattr(own, f.name)!r} ({OWN_KEY})"
        for f in fields(arch)
        if f.name not in ignored and not same(getattr(arch, f.name), getattr(own, f.name))
    ]


def _meaningless(arch: Architecture, own: Architecture) -> set[str]:
    """Fields whose difference makes no other model."""
    ignored = set()
    like_own = replace(arch, model_type=own.model_type)
    if own.model_type in FAMILIES and logical_tensors(arch) == logical_tensors(like_own):
        ignored.add("model_type")  # Mistral without a window is a Llama
    if arch.positions == own.positions == "rope":
        ignored.add("max_positions")
    if arch.num_experts and own.num_experts:
        ignored.add("ffn_size")
    if arch.activation in _TANH_GELU and own.activation in _TANH_GELU:
        ignored.add("activation")
    return ignored


def _changed(arch: Architecture, args: Args) -> list[str]:
    told = model_args(arch)
    return [f"{key} = {args[key]!r} (there {told[key]!r})" for key in told if not _agrees(args, told, key)]


def _agrees(args: Args, told: Args, key: str) -> bool:
    value = args.get(key, told[key])
    if isinstance(value, list | tuple):
        return told[key] is not None and tuple(value) == tuple(told[key])
    return value == told[key] or (value is None and key == "vocab_size")


def _own(own: Any) -> Architecture:
    try:
        rope = own["rope_scaling"]
        return Architecture(**{**own, "rope_scaling": None if rope is None else Llama3Rope(**rope)})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"the checkpoint's {OWN_KEY} is not readable ({error}); it was edited or written by another version: "
            "remove it from args, or name a Hugging Face directory with the model's config.json"
        ) from error
