"""The family and the sizes of a model, from the arguments that Megatron-LM stored: switches, no names of families.

Nothing here knows a family either: one is recognised by its own words for config.json, the first registered one
that can say all that the arguments say.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from megarlhf.architectures.architecture import Architecture, Llama3Rope
from megarlhf.architectures.config_spec import ConfigField, ConfigSpec, write_facts
from megarlhf.architectures.families import FAMILIES
from megarlhf.architectures.hf_config import hf_config
from megarlhf.architectures.rope import ROPE_TYPES, read_rope
from megarlhf.weights.checkpoint.formats.megatron.unsupported import Args, refuse_unsupported, unsupported_args

_log = logging.getLogger(__name__)


def infer(args: Args, model_type: str) -> Architecture:
    """The arguments' sizes and switches under this name, whether a family of the name has such switches or not.

    Warns: when the vocabulary is the padded one.
    Raises: ValueError when an argument is missing.
    """
    _require(args)
    rope = _positions(args) == "rope"
    heads, hidden = args["num_attention_heads"], args["hidden_size"]
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    bias = _bias(args)
    num_experts = args.get("num_experts") or 0
    ffn = args.get("ffn_hidden_size") or 4 * hidden
    expert_ffn = (args.get("moe_ffn_hidden_size") or ffn) if num_experts else 0
    window = args.get("window_size")
    head_dim = args.get("kv_channels") or hidden // heads
    max_positions = args.get("max_position_embeddings") or args["seq_length"]
    return Architecture(
        model_type=model_type,
        num_layers=args["num_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=groups or heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=_vocab_size(args),
        max_positions=max_positions,
        norm_eps=float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5),
        tied_embeddings=not args.get("untie_embeddings_and_output_weights", False),
        qkv_bias=bias or bool(args.get("add_qkv_bias")),
        output_bias=bias,
        mlp_bias=bias,
        activation=_activation(args),
        gated_mlp=bool(args.get("swiglu")),
        norm="rms" if args.get("normalization") == "RMSNorm" else "layer",
        qk_norm=bool(args.get("qk_layernorm")),
        positions="rope" if rope else "learned",
        sliding_window=None if window is None else window[0] + 1,
        num_experts=num_experts,
        experts_per_token=args.get("moe_router_topk", 2) if num_experts else 0,
        expert_ffn_size=expert_ffn,
        renormalize_experts=not args.get("moe_router_pre_softmax") if num_experts else True,
        **(_rope(args, head_dim, max_positions) if rope else _NO_ROPE),
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _require(args: Args) -> None:
    missing = [key for key in ("num_layers", "hidden_size", "num_attention_heads") if not _is_size(args.get(key))]
    if not args.get("max_position_embeddings") and not args.get("seq_length"):
        missing.append("max_position_embeddings")
    if not args.get("vocab_size") and not args.get("padded_vocab_size"):
        missing.append("padded_vocab_size")
    if missing:
        raise ValueError(
            f"the checkpoint's args lack {', '.join(missing)}, which describe the model (NeMo and ms-swift store "
            "none); name a Hugging Face directory with its config.json (--reference-hf, in a run model.hf)"
        )


def _positions(args: Args) -> str:
    """Value of `position_embedding_type`, or what older runs had in its place."""
    kind = args.get("position_embedding_type")
    if kind is None:
        kind = "rope" if args.get("use_rotary_position_embeddings") else "learned_absolute"
    return str(kind)


def _bias(args: Args) -> bool:
    if args.get("add_bias_linear") is not None:
        return bool(args["add_bias_linear"])
    return not args.get("disable_bias_linear", False)


def _activation(args: Args) -> str:
    if args.get("swiglu"):
        return "silu"
    return "gelu_new" if args.get("bias_gelu_fusion", True) or args.get("openai_gelu") else "gelu"


_NO_ROPE: Mapping[str, Any] = {"rope_theta": 0.0, "rope_scaling": None, "rotary_share": 1.0}


def _rope(args: Args, head_dim: int, max_positions: int) -> dict[str, Any]:
    """Fields of an `Architecture` for a rotary embedding.

    Megatron-LM has a switch for Llama 3.1's scaling. ms-swift leaves that off, and `rotary_percent` at 1: it states
    `rope_scaling` and `partial_rotary_factor` as a config.json does (its swift/megatron/model/rope.py).

    Raises: ValueError when `rope_scaling` is none that we compute.
    """
    share = args.get("partial_rotary_factor")
    share = float(args.get("rotary_percent") or 1.0) if share is None else share
    theta, stated = float(args.get("rotary_base") or 10000.0), args.get("rope_scaling")
    if stated:
        config = {"rope_scaling": stated, "partial_rotary_factor": share, "rope_theta": theta}
        config["original_max_position_embeddings"] = args.get("original_max_position_embeddings")
        facts = {"head_dim": head_dim, "max_positions": max_positions, "rotary_share": 1.0}
        try:
            return read_rope(config, facts, theta=theta, types=ROPE_TYPES)
        except ValueError as error:
            raise RopeError(
                f"the checkpoint's args have rope_scaling = {stated!r}, read as that of a config.json: {error}"
            ) from error
    scaling = None
    if args.get("use_rope_scaling"):
        factor = float(args.get("rope_scaling_factor") or 8.0)
        scaling = Llama3Rope(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_share": float(share)}


class RopeError(ValueError):
    """A rotary scaling that arguments state and that is not computed here."""


def _vocab_size(args: Args) -> int:
    stated, padded = args.get("vocab_size"), args.get("padded_vocab_size")
    if stated:
        if padded and stated > padded:
            raise ValueError(
                f"the checkpoint's args have vocab_size = {stated}, more than padded_vocab_size = {padded}; correct "
                "them, or name a Hugging Face directory with the model's config.json"
            )
        return int(stated)
    assert padded, "_require saw to it"
    _log.warning(
        "the checkpoint's args state no vocab_size: its %d padded rows are taken for the vocabulary; a Hugging Face "
        "directory with the model's config.json would say how many are real",
        padded,
    )
    return int(padded)


ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_layers": ("num_layers",),
        "hidden_size": ("hidden_size",),
        "num_heads": ("num_attention_heads",),
        "num_kv_heads": ("num_query_groups", "group_query_attention"),
        "head_dim": ("kv_channels",),
        "ffn_size": ("ffn_hidden_size",),
        "vocab_size": ("vocab_size", "padded_vocab_size"),
        "max_positions": ("max_position_embeddings",),
        "norm": ("normalization",),
        "norm_eps": ("norm_epsilon", "layernorm_epsilon"),
        "positions": ("position_embedding_type", "use_rotary_position_embeddings"),
        "position_offset": ("max_position_embeddings",),
        "rope_theta": ("rotary_base",),
        "rope_scaling": ("use_rope_scaling", "rope_scaling"),
        "tied_embeddings": ("untie_embeddings_and_output_weights",),
        "qkv_bias": ("add_qkv_bias", "add_bias_linear", "disable_bias_linear"),
        "output_bias": ("add_bias_linear", "disable_bias_linear"),
        "mlp_bias": ("add_bias_linear", "disable_bias_linear"),
        "activation": ("swiglu", "bias_gelu_fusion", "openai_gelu"),
        "gated_mlp": ("swiglu",),
        "qk_norm": ("qk_layernorm",),
        "sliding_window": ("window_size",),
        "num_experts": ("num_experts",),
        "experts_per_token": ("moe_router_topk",),
        "expert_ffn_size": ("moe_ffn_hidden_size",),
        "renormalize_experts": ("moe_router_pre_softmax",),
        "rotary_share": ("rotary_percent", "partial_rotary_factor"),
    }
)
"""The arguments that decide each field of an `Architecture`, the one of today first."""

_UNCOMPARED = ("activation", "position_offset", "output_bias")
"""Fields that no argument can contradict: there is no word for ReLU, and the fusion that decides between the two GELUs
is switched for speed too; the two others Megatron has not by itself."""

_TELLING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {field: keys for field, keys in ARGUMENTS.items() if field not in _UNCOMPARED}
    | {
        "num_kv_heads": ("group_query_attention",),  # off, num_query_groups is Megatron's default of 1: it says nothing
        "vocab_size": ("vocab_size",),
        "qkv_bias": ("add_bias_linear", "disable_bias_linear"),
        "expert_ffn_size": ("moe_ffn_hidden_size", "ffn_hidden_size"),
    }
)
"""Fields that arguments can contradict, and the arguments of which one must be stated for that."""


def same(a: Any, b: Any) -> bool:
    """Equal, floats but for their last digits (an epsilon that went through float32)."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def disagreements(arch: Architecture, args: Args, described: Args) -> list[str]:
    """Differences between the arguments and `arch`. Arguments that are missing, or cannot be compared, are left out.

    The family is not compared: several have the same switches.

    described: the arguments that describe `arch`, which stand for what the others do not state (ms-swift stores some)
    """
    unsupported = unsupported_args(args)
    problems = [f"args say {key} = {args[key]!r}, which no family computes" for key in unsupported]
    padded = args.get("padded_vocab_size")
    if not args.get("vocab_size") and isinstance(padded, int) and arch.vocab_size > padded:
        problems.append(f"vocab_size: config.json says {arch.vocab_size}, args say padded_vocab_size = {padded}, less")
    stated = {key: value for key, value in args.items() if value is not None and key != "padded_vocab_size"}
    stated_otherwise = {key for keys in ARGUMENTS.values() if not stated.keys().isdisjoint(keys) for key in keys}
    others = {key: value for key, value in described.items() if key not in stated_otherwise}
    try:
        inferred = infer({**others, **stated}, arch.model_type)
    except RopeError as error:
        return [*problems, str(error)]
    except (ValueError, TypeError):
        return problems  # damaged: they state nothing
    for field, keys in _TELLING.items():
        stating = [key for key in keys if key in stated]
        if not stating or not set(keys).isdisjoint(unsupported) or not _comparable(field, arch, inferred, stated):
            continue
        of_config, of_args = (_compared(field, each, stated) for each in (arch, inferred))
        if not same(of_config, of_args):
            shown = ", ".join(f"{key} = {stated[key]!r}" for key in ARGUMENTS[field] if key in stated)
            problems.append(f"{field}: config.json says {of_config!r}, args say {of_args!r} ({shown})")
    return problems


def _comparable(field: str, arch: Architecture, inferred: Architecture, stated: Args) -> bool:
    """Whether the field means something in both, and Megatron has a word for what `arch` has."""
    rope, experts = (arch.positions, inferred.positions) == ("rope", "rope"), arch.num_experts and inferred.num_experts
    if field == "rope_scaling":  # Megatron has a word for Llama 3.1's scaling and for none, ms-swift for each
        return rope and (bool(stated.get("rope_scaling")) or isinstance(arch.rope_scaling, Llama3Rope | None))
    if field in ("rope_theta", "rotary_share"):
        return rope
    if field == "max_positions":
        return (arch.positions, inferred.positions) == ("learned", "learned")  # a rotary model's are extended at will
    if field in ("experts_per_token", "expert_ffn_size", "renormalize_experts"):
        return bool(experts)
    if field == "ffn_size":
        return not experts
    if field == "qkv_bias":
        return not (arch.mlp_bias and inferred.mlp_bias)  # add_bias_linear: all or none
    return True


def _compared(field: str, arch: Architecture, stated: Args) -> Any:
    if field == "rope_scaling" and not stated.get("rope_scaling"):  # Megatron has no word for the frequencies
        return arch.rope_scaling.factor if isinstance(arch.rope_scaling, Llama3Rope) else None
    return arch.max_positions + arch.position_offset if field == "max_positions" else getattr(arch, field)


@dataclass(frozen=True, kw_only=True)
class _Refused:
    """A family that cannot say what the arguments say."""

    family: str
    misfits: list[str]
    """Fields of the architecture; none where each is possible but not all together."""
    why: ValueError


def match_family(args: Args) -> Architecture:
    """The architecture that the arguments describe: of the first registered family whose config.json can state it.

    Every layer has experts or none has, so beside experts the size of a dense MLP means nothing: a family that
    writes both sizes as one is given the experts'.

    Raises: ValueError that names every argument concerned, and the nearest family.
    """
    refuse_unsupported(args)
    described = infer(args, "")
    ffn_sizes = (described.ffn_size, described.expert_ffn_size) if described.num_experts else (described.ffn_size,)
    refused = []
    for name, family in FAMILIES.items():
        for ffn_size in ffn_sizes:
            candidate = replace(described, model_type=name, ffn_size=ffn_size)
            try:
                hf_config(candidate)  # reads back what it writes
            except ValueError as error:
                refused.append(_Refused(family=name, misfits=_misfits(candidate, family.config), why=error))
            else:
                return candidate
    raise _of_no_family(args, refused)


def _misfits(arch: Architecture, spec: ConfigSpec) -> list[str]:
    """Fields that a config.json of this family cannot state as they are. Rotary numbers are left to `positions`."""
    facts, config = vars(arch), write_facts(vars(arch), spec)

    def can_state(fact: Any, value: Any) -> bool:
        if not isinstance(fact, ConfigField):
            return bool(value == (fact(facts) if callable(fact) else fact))
        if value is None:
            return fact.null_is_none or fact.default is None
        # Two fields may share a key, which then says the value of one.
        return bool(config[fact.name] == value == fact.read(fact.name, value))

    misfits = []
    for field in fields(arch):
        if field.name in ("model_type", "rope_theta", "rope_scaling"):
            continue
        try:
            fits = can_state(spec.facts.get(field.name, field.default), facts[field.name])
        except ValueError:
            fits = False
        if not fits:
            misfits.append(field.name)
    return misfits


def _of_no_family(args: Args, refused: list[_Refused]) -> ValueError:
    def names(misfits: Iterable[str]) -> list[str]:
        candidates = [[key for key in ARGUMENTS[field] if key in args] or [ARGUMENTS[field][0]] for field in misfits]
        return list(dict.fromkeys(key for keys in candidates for key in keys))

    nearest = min(refused, key=lambda family: len(family.misfits))
    anywhere = {field for family in refused for field in family.misfits}
    shown = [f"{key} = {args.get(key)!r}" for key in names(field for field in ARGUMENTS if field in anywhere)]
    differs = f"which differs in {', '.join(names(nearest.misfits))}"
    if not nearest.misfits:
        differs = f"whose config.json would be refused ({nearest.why})"
    return ValueError(
        f"the checkpoint's args describe a model of no known family: {', '.join(shown)}; the nearest is "
        f"{nearest.family}, {differs}. Name a Hugging Face directory with the model's config.json, or add a family "
        "(docs/new-architecture.md)"
    )
