"""Megatron-LM's arguments of an architecture and a layout, and the architecture that arguments describe.

Megatron-LM knows switches, not families: Mistral without a window is its Llama. It has no word for plain ReLU
(OPT), for OPT's two extra position rows, for the frequencies of Llama 3.1's rotary scaling (its own are 1, 4 and
8192 positions), for biases of the attention alone. So what we write also carries the fields of the
`Architecture` under a key of our own, which wins as long as it agrees with the arguments beside it.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from megarlhf.architectures.architecture import Architecture, Llama3Rope
from megarlhf.architectures.families import FAMILIES
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import Head, logical_tensors, padded_vocab_size
from megarlhf.architectures.rope import fields_of_scaling, scaling_of_fields
from megarlhf.weights.checkpoint.formats.megatron.fields import DECIDING
from megarlhf.weights.checkpoint.formats.megatron.infer import disagreements, infer, match_family, same
from megarlhf.weights.checkpoint.formats.megatron.stored import StoredArgs
from megarlhf.weights.checkpoint.formats.megatron.unsupported import Args, refuse_unsupported
from megarlhf.weights.transport.extent import CheckpointWeights

OWN_KEY = "megarlhf_architecture"

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MegatronWeights(CheckpointWeights):
    """A Megatron checkpoint, opened: nothing but headers has been read."""

    args: dict[str, Any]
    """Arguments of the run that saved the checkpoint, as far as they are plain data; empty when none are stored."""
    foreign: dict[str, str]
    """Arguments that are objects of other packages' classes, which are not read, and those classes."""
    arch: Architecture
    head: Head
    layout: MegatronLayout


def args_of(arch: Architecture, layout: MegatronLayout, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that a checkpoint's `args` state, by Megatron-LM's names; all that its
    `--use-checkpoint-args` and `--use-mp-args-from-checkpoint-args` read, and ours under `OWN_KEY`."""
    args = model_args(arch) | _layout_args(arch, layout) | _run_args(layout, dtype)
    inferred = infer(args, arch.model_type)
    unstated = [f.name for f in fields(arch) if getattr(inferred, f.name) != getattr(arch, f.name)]
    if unstated:
        _log.warning(
            "Megatron's arguments cannot state this model's %s: only megarlhf reads it back, Megatron would compute "
            "with %s",
            ", ".join(f"{name} = {getattr(arch, name)!r}" for name in unstated),
            ", ".join(repr(getattr(inferred, name)) for name in unstated),
        )
    return args | {OWN_KEY: asdict(arch) | {"rope_scaling": fields_of_scaling(arch.rope_scaling)}}


def model_args(arch: Architecture) -> dict[str, Any]:
    """Arguments that describe the model, apart from layout and run."""
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
        "rotary_percent": arch.rotary_share,
        "rotary_interleaved": False,
        # Its word for Llama 3.1's scaling; the others it does not know.
        "use_rope_scaling": isinstance(arch.rope_scaling, Llama3Rope),
        "rope_scaling_factor": arch.rope_scaling.factor if isinstance(arch.rope_scaling, Llama3Rope) else 8.0,
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
    chunks = layout.chunk_layers(arch.num_layers)
    stages = [sum(map(len, of_rank)) for of_rank in chunks]
    equal_chunks = all(len({len(chunk) for chunk in of_rank}) == 1 for of_rank in chunks)
    if equal_chunks and len(set(stages)) == 1:
        if layout.vpp > 1:
            args["num_layers_per_virtual_pipeline_stage"] = stages[0] // layout.vpp
    elif equal_chunks and len(set(stages[1:-1])) <= 1:
        args |= {"decoder_first_pipeline_num_layers": stages[0], "decoder_last_pipeline_num_layers": stages[-1]}
    else:
        args["pipeline_model_parallel_layout"] = _stage_string(chunks)
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


def layout_of(args: Args, padded_vocab: int) -> MegatronLayout:
    """The layout that arguments state; the files of a torch_dist checkpoint know none."""

    def stated(name: str) -> int:
        return int(args.get(name) or 1)

    return MegatronLayout(
        tp=stated("tensor_model_parallel_size"),
        pp=stated("pipeline_model_parallel_size"),
        vpp=stated("virtual_pipeline_model_parallel_size"),
        ep=stated("expert_model_parallel_size"),
        layers_per_stage=_stages(
            args, stated("pipeline_model_parallel_size"), stated("virtual_pipeline_model_parallel_size")
        ),
        padded_vocab=padded_vocab,
        spec="local" if args.get("transformer_impl") == "local" else "te",
        experts="grouped" if args.get("moe_grouped_gemm") else "each",
    )


def _stages(args: Args, pp: int, vpp: int) -> tuple[int, ...] | None:
    """Layers of each stage where the arguments state uneven ones: a first or a last, or a whole layout, which says
    those of all virtual stages."""
    spelled = args.get("pipeline_model_parallel_layout")
    if isinstance(spelled, str) and pp > 1 and set(spelled) <= set("EtmL|"):
        chunks = [chunk.count("t") for chunk in spelled.split("|")]
        if len(chunks) == pp * vpp:
            return tuple(chunks)
        return tuple(sum(chunks[rank::pp]) for rank in range(pp))
    first, last = (args.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    num_layers = int(args.get("num_layers") or 0)
    if pp < 2 or not num_layers or not (first or last):
        return None
    even = pp - bool(first) - bool(last)
    middle = (num_layers - (first or 0) - (last or 0)) // max(1, even)
    return (*([first] if first else []), *[middle] * even, *([last] if last else []))


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


def described_arch(args: StoredArgs) -> Architecture:
    """`arch_of` of a checkpoint's arguments.

    Raises: ValueError also when an argument that decides what the model computes is an object of a class.
    """
    if unread := args.classes(DECIDING):
        raise ValueError(
            f"the checkpoint's args say what the model is in objects of classes that are not read: {unread}. Name a "
            "Hugging Face directory with the model's config.json (--reference-hf, in a run model.hf)"
        )
    return arch_of(args.values)


def arch_of(args: Args) -> Architecture:
    """The architecture that a checkpoint's arguments describe.

    The vocabulary is `vocab_size` if stated, else the padded one (with a warning).

    Raises: ValueError that names every argument which no family has, or which is missing.
    """
    refuse_unsupported(args)
    own_fields = args.get(OWN_KEY)
    if own_fields is not None:
        arch = _stored_architecture(own_fields)
        changed = _changed(arch, args)
        if not changed:
            return arch
        _log.warning("%s contradicts the arguments beside it and is ignored: %s", OWN_KEY, "; ".join(changed))
    return match_family(args)


def contradictions(arch: Architecture, args: Args) -> list[str]:
    """Where a config.json's architecture is not the one that a checkpoint's arguments describe; each a sentence.

    Our own key says it whole if it agrees with the arguments beside it; otherwise only what they state counts.
    """
    problems = disagreements(arch, args, model_args(arch))
    try:
        stored_arch = None if args.get(OWN_KEY) is None else _stored_architecture(args[OWN_KEY])
    except ValueError:
        stored_arch = None
    if stored_arch is None or _changed(stored_arch, args):
        return problems
    named = {line.split(":")[0] for line in problems}
    ignored = _meaningless(arch, stored_arch) | named
    return problems + [
        f"{f.name}: config.json says {getattr(arch, f.name)!r}, args say {getattr(stored_arch, f.name)!r} ({OWN_KEY})"
        for f in fields(arch)
        if f.name not in ignored and not same(getattr(arch, f.name), getattr(stored_arch, f.name))
    ]


def _meaningless(arch: Architecture, stored_arch: Architecture) -> set[str]:
    """Fields whose difference makes no other model."""
    ignored = set()
    same_type = replace(arch, model_type=stored_arch.model_type)
    if stored_arch.model_type in FAMILIES and logical_tensors(arch) == logical_tensors(same_type):
        ignored.add("model_type")  # Mistral without a window is a Llama
    if arch.positions == stored_arch.positions == "rope":
        ignored.add("max_positions")
    if arch.num_experts and stored_arch.num_experts:
        ignored.add("ffn_size")
    if arch.activation in _TANH_GELU and stored_arch.activation in _TANH_GELU:
        ignored.add("activation")
    return ignored


def _changed(arch: Architecture, args: Args) -> list[str]:
    expected = model_args(arch)
    return [f"{key} = {args[key]!r} (there {expected[key]!r})" for key in expected if not _agrees(args, expected, key)]


def _agrees(args: Args, expected: Args, key: str) -> bool:
    value = args.get(key, expected[key])
    if isinstance(value, list | tuple):
        return expected[key] is not None and tuple(value) == tuple(expected[key])
    return value == expected[key] or (value is None and key == "vocab_size")


def _stored_architecture(own_fields: Any) -> Architecture:
    try:
        return Architecture(**{**own_fields, "rope_scaling": scaling_of_fields(own_fields["rope_scaling"])})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"the checkpoint's {OWN_KEY} is not readable ({error}); it was edited or written by another version: "
            "remove it from args, or name a Hugging Face directory with the model's config.json"
        ) from error
