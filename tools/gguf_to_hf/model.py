"""A GGUF file's metadata as an `Architecture`.

What a key says that nobody here computes is refused, and so are keys that are not known: llama.cpp would compute them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megarlhf.architectures.architecture import (
    Architecture,
    LinearRope,
    Llama3Rope,
    LongRope,
    RopeScaling,
    YarnRope,
)
from tools.gguf_to_hf.header import GGUFFile, shortest
from tools.gguf_to_hf.numbers import Numbers

MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "gpt2": "gpt2",
}
"""By llama.cpp's architecture. Its `llama` is Mistral and Mixtral too."""

ROPE_FREQUENCIES = "rope_freqs.weight"
"""Llama 3.1's scaling, as the divisor of each frequency."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""LongRoPE's."""
NOT_OF_THE_MODEL = (ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that config.json states, and no parameter holds."""

_REQUIRED: Any = object()
_SAY_NOTHING = ("rope.scaling.finetuned", "tensor_data_layout")
"""Keys that change nothing in what is computed."""


def architecture_of(file: GGUFFile, numbers: Numbers) -> Architecture:
    """Raises: ValueError for a family that is not known, a missing key, and whatever no family here computes."""
    if file.architecture not in MODEL_TYPES:
        raise ValueError(
            f"{file.path} is of llama.cpp's architecture {file.architecture!r}; known: "
            f"{', '.join(sorted(MODEL_TYPES))}. Use a model of one of these, or convert from a Hugging Face directory"
        )
    keys = _Keys(file)
    has = _Presence(file)
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head_dim = keys.whole("attention.key_length", default=None) or _equal_heads(file, hidden, heads)
    keys.require("attention.value_length", head_dim)
    arch: dict[str, Any] = {
        "num_layers": _layers(file, keys),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": keys.whole("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "ffn_size": keys.whole("feed_forward_length"),
        "vocab_size": _vocabulary(file, keys),
        "max_positions": keys.whole("context_length"),
        "tied_embeddings": _tied(file, numbers),
        "qkv_bias": has("attn_q.bias") or has("attn_qkv.bias"),
        "output_bias": has("attn_output.bias"),
        "mlp_bias": has("ffn_up.bias"),
        "qk_norm": has("attn_q_norm.weight"),
        **(_OF_GPT2 if file.architecture == "gpt2" else {"activation": "silu"}),
    }
    if file.architecture == "gpt2":
        arch["norm_eps"] = keys.number("attention.layer_norm_epsilon")
    else:
        arch["norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
        arch |= _rotary(keys, numbers, head_dim)
        arch |= _window_and_experts(keys)
    keys.require("attention.causal", True)
    keys.require_all_read()
    return Architecture(model_type=_model_type(file, arch), **arch)


_OF_GPT2: Mapping[str, Any] = {
    "activation": "gelu_new",
    "gated_mlp": False,
    "norm": "layer",
    "positions": "learned",
    "rope_theta": 0.0,
    "rope_scaling": None,
}


def _model_type(file: GGUFFile, arch: Mapping[str, Any]) -> str:
    if file.architecture == "llama" and arch.get("num_experts"):
        return "mixtral"
    if file.architecture == "llama" and arch.get("sliding_window"):
        return "mistral"
    return MODEL_TYPES[file.architecture]


def _equal_heads(file: GGUFFile, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(
            f"{file.path} has embeddings of {hidden} and {heads} heads, of which the first is no multiple, and no "
            "attention.key_length; it is damaged: copy it again"
        )
    return hidden // heads


def _vocabulary(file: GGUFFile, keys: _Keys) -> int:
    """Rows of the embedding; of its shape more is asked later."""
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor token_embd.weight: it is no whole model; name another file")
    rows = file.tensors["token_embd.weight"].shape[0]
    keys.require("vocab_size", rows)
    return rows


def _layers(file: GGUFFile, keys: _Keys) -> int:
    """Found out before tables of so many layers are made."""
    stored = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    stated: int = keys.whole("block_count")
    if stated != len(stored):
        raise ValueError(
            f"{file.path} states {stated} layers ({file.architecture}.block_count) and has tensors of {len(stored)}; "
            "copy it again"
        )
    return stated


def _tied(file: GGUFFile, numbers: Numbers) -> bool:
    """Without a head, or with a head that repeats the embedding. One that is rounded otherwise is a head of its own."""
    if "output.weight" not in file.tensors:
        return True
    embedding, head = file.tensors["token_embd.weight"], file.tensors["output.weight"]
    if (embedding.type, embedding.shape) != (head.type, head.shape):
        return False
    a, b = numbers.raw(embedding.name), numbers.raw(head.name)
    pieces = (slice(start, start + 1024) for start in range(0, len(a), 1024))
    return all(np.array_equal(a[rows], b[rows]) for rows in pieces)


def _window_and_experts(keys: _Keys) -> dict[str, Any]:
    found: dict[str, Any] = {"sliding_window": keys.whole("attention.sliding_window", default=None)}
    experts = keys.whole("expert_count", default=0, lowest=0)
    if experts:
        router = keys.file.tensors.get("blk.0.ffn_gate_inp.weight")
        if router is None:
            raise ValueError(f"{keys.file.path} has experts and no tensor blk.0.ffn_gate_inp.weight; copy it again")
        keys.require("expert_count", router.shape[0])  # before tables of so many experts are made
        found |= {
            "num_experts": experts,
            "experts_per_token": keys.whole("expert_used_count"),
            "expert_ffn_size": keys.whole("expert_feed_forward_length", default=keys.whole("feed_forward_length")),
            "renormalize_experts": True,  # as llama.cpp computes both families
        }
    else:
        keys.require("expert_used_count", 0)
    return found


def _rotary(keys: _Keys, numbers: Numbers, head_dim: int) -> dict[str, Any]:
    turned = keys.whole("rope.dimension_count", default=head_dim)
    theta = keys.number("rope.freq_base", default=10000.0)
    found: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(keys, numbers, theta, turned)}
    if keys.file.architecture == "phi3":
        found["rotary_share"] = turned / head_dim
    elif turned != head_dim:
        raise ValueError(
            f"{keys.file.path} turns {turned} of a head's {head_dim} channels (rope.dimension_count), which no family "
            f"of {keys.file.architecture!r} here does; use another model"
        )
    return found


# --- rotary scaling -------------------------------------------------------------------------------


def _scaling(keys: _Keys, numbers: Numbers, theta: float, turned: int) -> RopeScaling | None:
    tensors = keys.file.tensors
    kind = keys.text("rope.scaling.type", default="none")
    original = keys.whole("rope.scaling.original_context_length", default=keys.whole("context_length"), lowest=2)
    for name, expected in ((LONG_FACTORS, "longrope"), (SHORT_FACTORS, "longrope"), (ROPE_FREQUENCIES, "linear")):
        if name in tensors and kind not in ("none", expected):
            raise ValueError(
                f"{keys.file.path} has rope.scaling.type {kind!r} and the tensor {name}: no family here computes both; "
                "convert from the model's Hugging Face directory"
            )
    if LONG_FACTORS in tensors or SHORT_FACTORS in tensors:
        return _longrope(keys, numbers, original)
    if ROPE_FREQUENCIES in tensors:
        return _llama3(keys, _vector(numbers, ROPE_FREQUENCIES), theta, turned)
    factor = keys.number("rope.scaling.factor", default=keys.number("rope.scale_linear", default=1.0))
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return None if factor == 1.0 else LinearRope(factor=factor)
    if kind == "none":
        keys.require("rope.scaling.original_context_length", keys.whole("context_length"))
        return None
    if kind != "yarn":
        raise ValueError(
            f"{keys.file.path} has rope.scaling.type {kind!r}; known: none, linear, yarn, and the tensors of Llama 3.1 "
            "and of LongRoPE; use another model, or convert from its Hugging Face directory"
        )
    for key in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        keys.require(f"rope.scaling.{key}", 1.0)
    return YarnRope(
        factor=factor,
        original_max_positions=original,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", default=1.0),
        attention_factor=1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0,
        truncate=True,
    )


def _vector(numbers: Numbers, name: str) -> list[float]:
    return [shortest(value) for value in numbers.rows(name, slice(None)).flatten().tolist()]


def _longrope(keys: _Keys, numbers: Numbers, original: int) -> LongRope:
    """attention_factor: as transformers and vLLM compute it from the two lengths, which the file must agree with."""
    if missing := {LONG_FACTORS, SHORT_FACTORS} - set(keys.file.tensors):
        raise ValueError(f"{keys.file.path} has one of LongRoPE's tensors and lacks {missing.pop()}; copy it again")
    ratio = keys.whole("context_length") / original
    attention = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    keys.require("rope.scaling.attn_factor", attention, tolerance=1e-5)
    return LongRope(
        short_factor=tuple(_vector(numbers, SHORT_FACTORS)),
        long_factor=tuple(_vector(numbers, LONG_FACTORS)),
        original_max_positions=original,
        attention_factor=attention,
    )


_LLAMA3 = (1.0, 4.0, 8192)
"""low_freq_factor, high_freq_factor and original length of Llama 3.1, 3.2 and 3.3: a GGUF file states none of them."""


def _llama3(keys: _Keys, divisors: list[float], theta: float, turned: int) -> Llama3Rope | None:
    """The scaling whose divisors these are; its factor is the largest of them."""
    low, high, original = _LLAMA3
    factor = float(f"{max(divisors):.6g}")
    if len(divisors) != turned // 2 or not 1 <= factor < math.inf:
        raise ValueError(
            f"{keys.file.path}: {ROPE_FREQUENCIES} holds {len(divisors)} divisors of up to {factor:g}, expected "
            f"{turned // 2} of 1 or more; it is damaged: copy it again"
        )
    expected = []
    for channel in range(len(divisors)):
        turns = original * theta ** (-2 * channel / turned) / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1 / (kept + (1 - kept) / factor))
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            f"{keys.file.path}: {ROPE_FREQUENCIES} holds other divisors than Llama 3.1's scaling by {factor:g} of "
            f"{original} positions, which a GGUF file does not state; convert from the model's Hugging Face directory"
        )
    scaling = Llama3Rope(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=original)
    return None if factor == 1.0 else scaling


# --- metadata -------------------------------------------------------------------------------------


class _Presence:
    """Whether layers have a tensor; that all have it is found out later."""

    def __init__(self, file: GGUFFile) -> None:
        self._names = {
            name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.") and name.count(".") > 1
        }

    def __call__(self, name: str) -> bool:
        return name in self._names


class _Keys:
    """The metadata of the model, by names without the architecture's; knows which have been asked for."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self._prefix = file, f"{file.architecture}."
        self._read = {f"{self._prefix}{name}" for name in _SAY_NOTHING}

    def whole(self, name: str, *, default: Any = _REQUIRED, lowest: int = 1) -> Any:
        return self._get(name, default, f"a whole number, {lowest} or more", lambda v: type(v) is int and v >= lowest)

    def number(self, name: str, *, default: Any = _REQUIRED) -> float:
        return float(
            self._get(name, default, "a positive number", lambda v: type(v) in (int, float) and 0 < v < math.inf)
        )

    def text(self, name: str, *, default: str) -> str:
        return str(self._get(name, default, "a text", lambda v: type(v) is str))

    def require(self, name: str, expected: Any, *, tolerance: float = 1e-6) -> None:
        """Raises: ValueError where the file states another value; it may state none."""
        value = self._get(name, expected, "a number", lambda v: type(v) in (int, float, bool))
        if not math.isclose(value, expected, rel_tol=tolerance):
            raise ValueError(
                f"{self.file.path} has {self._prefix}{name} = {value!r}, expected {expected!r}: nothing else is "
                "computed here, or it contradicts what else the file says; use another model"
            )

    def require_all_read(self) -> None:
        """Raises: ValueError for keys that nobody asked for."""
        metadata = self.file.metadata
        unknown = [key for key in metadata if key.startswith(self._prefix) and key not in self._read]
        if unknown:
            raise ValueError(
                f"{self.file.path} states {', '.join(f'{key} = {metadata[key]!r}' for key in unknown)}, which is not "
                "known here: llama.cpp may compute another model than would be written; convert from the model's "
                "Hugging Face directory"
            )

    def _get(self, name: str, default: Any, what: str, valid: Callable[[Any], bool]) -> Any:
        key = f"{self._prefix}{name}"
        self._read.add(key)
        value = self.file.metadata.get(key, default)
        if isinstance(value, list) and len({str(item) for item in value}) == 1:
            value = value[0]  # one for each layer
        if value is _REQUIRED:
            raise ValueError(f"{self.file.path} does not state {key}, expected {what}; it is damaged: copy it again")
        if value is not default and not valid(value):
            raise ValueError(f"{self.file.path} has {key} = {value!r}, expected {what}; use another file")
        return value
