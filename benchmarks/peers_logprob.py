"""Who else computes log-probs, each in the mode its documentation recommends, and what that mode leaves out.

A loader imports one package and returns its candidates for a kind of problem; what does not import is listed with the
reason. Signatures were read in liger-kernel 0.8.5, cut-cross-entropy 25.1.1, trl 1.16.0, verl 0.9.1 and megatron-core
0.16.1; a version that has changed them raises, is listed, and is not timed.

Legend: T tokens, H hidden, V vocabulary columns.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_truth import Gives, Shape
from megarlhf.kernels import linear_token_logprobs, token_logprobs

OURS = "megarlhf"
MODES = ("forward", "forward+backward")
_ALL = 2**62
_TRL_COLUMNS = 32768
"""What its trainers pass."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to do the work. `call` takes the inputs and the labels and returns (values,) or (values, entropy)."""

    name: str
    gives: Gives
    call: Callable[..., tuple[Tensor, ...]]
    note: str = ""
    sign: int = 1
    """-1: the values are losses. Turning them round would be a kernel more than the peer needs."""
    products: int = 3
    """Matrix products, of 2THV each, that forward and backward take: 4 where the logits are made twice."""
    overwrites: bool = False
    """The backward's gradient takes the place of the logits: each call gets a copy, made outside the timing."""
    modes: tuple[str, ...] = MODES


class UnavailableError(Exception):
    """Why a peer is not here."""


def candidates(
    shape: Shape, device: torch.device, exclude: Sequence[str] = ()
) -> tuple[list[Candidate], dict[str, str]]:
    """All for this kind of problem, ours first; and the packages that are missing, with the reason."""
    here, missing = [], {}
    for package, loader in LOADERS.items():
        if excluded(package, exclude):
            missing[package] = "excluded by --exclude"
            continue
        try:
            here += loader(shape, device)
        except Exception as error:  # noqa: BLE001 -- a peer's import may raise anything; the reason is listed
            missing[package] = f"{type(error).__name__}: {error}".splitlines()[0]
    return here, missing


def excluded(name: str, parts: Sequence[str]) -> bool:
    """Contains one of the parts; "=NAME" is that name alone."""
    return any(name == part[1:] if part.startswith("=") else part in name for part in parts)


def versions() -> dict[str, str | None]:
    """Of every package that could be here; None: not installed."""
    version_of: dict[str, str | None] = {}
    for name in ("torch", "triton", "transformers", *DISTRIBUTIONS.values()):
        try:
            version_of[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version_of[name] = None
    return version_of


def ours(shape: Shape, device: torch.device) -> list[Candidate]:
    """Triton on a GPU; the rehearsal's chunked torch on a CPU."""
    backend: Any = "triton" if device.type == "cuda" else "chunked"
    made = []
    ways: tuple[tuple[str, Gives, bool], ...] = (("", "logprob+entropy", True), (", log-prob only", "logprob", False))
    for suffix, gives, entropy in ways:
        options: dict[str, Any] = {"backend": backend, "return_entropy": entropy}
        if shape.kind == "logits":
            call = partial(_first, token_logprobs, entropy, options)
            made.append(Candidate(name=OURS + suffix, gives=gives, call=call))
            continue
        for name, save, products in (("nothing kept", 0, 4), ("all kept", _ALL, 3)):
            call = partial(_first, linear_token_logprobs, entropy, options | {"save_bytes": save})
            candidate = Candidate(name=f"{OURS}, {name}{suffix}", gives=gives, call=call, products=products)
            # Without a backward nothing is ever kept.
            made.append(candidate if save == 0 else _only_both(candidate))
    if shape.kind == "linear":
        call = partial(_after_product, partial(_first, token_logprobs, True, {"backend": backend}))
        note = "bf16 logits are made by one product and kept"
        made.append(Candidate(name=f"product, then {OURS}", gives="logprob+entropy", call=call, note=note))
    return made


def _only_both(candidate: Candidate) -> Candidate:
    return replace(candidate, modes=MODES[1:])


def _first(function: Callable[..., Any], both: bool, options: dict[str, Any], *inputs: Tensor) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, Tensor] = function(*inputs, **options)
    return outputs if both else outputs[:1]


def _after_product(then: Callable[..., Any], hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Any:
    return then(hidden_TH @ weight_VH.t(), labels_T)


def of_torch(shape: Shape, device: torch.device) -> list[Candidate]:
    """torch's own: the three ways a trainer writes it down, in fp32 from bf16 logits."""
    naive = [
        Candidate(name="torch cross_entropy", gives="logprob", sign=-1, call=_cross_entropy),
        Candidate(name="torch log_softmax + gather", gives="logprob", call=_gathered),
        Candidate(name="torch naive with entropy", gives="logprob+entropy", call=_naive),
    ]
    if shape.kind == "logits":
        return naive
    made = [replace(peer, name=f"product, then {peer.name}", call=partial(_after_product, peer.call)) for peer in naive]
    # torch 2.13 and later; its chunked path makes the gradient again for reduction="none".
    if (options := getattr(torch.nn, "LinearCrossEntropyOptions", None)) is not None:
        call = partial(_torch_linear, options())
        made.append(Candidate(name="torch linear_cross_entropy", gives="logprob", sign=-1, products=4, call=call))
    return made


def _cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, ...]:
    return (F.cross_entropy(logits_TV.float(), labels_T, reduction="none"),)


def _gathered(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, ...]:
    return (logits_TV.float().log_softmax(-1).gather(1, labels_T[:, None])[:, 0],)


def _naive(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, ...]:
    log_TV = logits_TV.float().log_softmax(-1)
    return log_TV.gather(1, labels_T[:, None])[:, 0], -(log_TV.exp() * log_TV).sum(-1)


def _torch_linear(options: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> tuple[Tensor, ...]:
    function: Any = F.linear_cross_entropy  # type: ignore[attr-defined,unused-ignore]
    return (function(hidden_TH, weight_VH, labels_T, reduction="none", options=options),)


def compiled(shape: Shape, device: torch.device) -> list[Candidate]:
    """torch.compile of the naive form. Inductor needs a C++ compiler on a CPU, and a C compiler through Triton."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise UnavailableError("no C++ compiler")
    made: list[Candidate] = []
    forms: list[tuple[str, Gives, Any]]
    forms = [("with entropy", "logprob+entropy", _naive), ("log-prob only", "logprob", _gathered)]
    for name, gives, function in forms:
        whole = function if shape.kind == "logits" else partial(_after_product, function)
        call = torch.compile(lambda *inputs, whole=whole: whole(*inputs), dynamic=False)
        made.append(Candidate(name=f"torch.compile, naive {name}", gives=gives, call=call))
    return made if shape.kind == "logits" else made[:1]


def liger(shape: Shape, device: torch.device) -> list[Candidate]:
    """liger-kernel 0.8.5. The cross entropy writes its gradient over the logits, for a per-token loss too."""
    _needs_triton(device)
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction
    from liger_kernel.transformers.functional import liger_cross_entropy, liger_fused_linear_cross_entropy
    from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy

    if shape.kind == "logits":
        parallel = LigerVocabParallelCrossEntropy()
        return [
            Candidate(
                name="liger cross_entropy",
                gives="logprob",
                sign=-1,
                overwrites=True,
                call=lambda z, y: (liger_cross_entropy(z, y, reduction="none"),),
                note="no TP, no entropy; the gradient overwrites the logits",
            ),
            Candidate(
                name="liger vocab-parallel cross_entropy",
                gives="logprob",
                sign=-1,
                call=lambda z, y: (parallel(z[:, None], y[:, None])[:, 0],),
                note="TP; no entropy; keeps an fp32 softmax",
            ),
        ]
    fused, scaled = liger_fused_linear_cross_entropy, LigerFusedLinearScaledCrossEntropyFunction.apply
    return [
        Candidate(
            name="liger fused linear, mean",
            gives="mean loss",
            sign=-1,
            call=lambda x, w, y: (fused(x, w, y),),
            note="mean only: the gradient is made in the forward, so none per token; no entropy, no TP",
        ),
        Candidate(
            name="liger fused linear, per token",
            gives="logprob",
            sign=-1,
            products=4,
            call=lambda x, w, y: (fused(x, w, y, reduction="none", accum_dtype=torch.float32),),
            note="weight gradient summed in fp32 as its documentation advises; no entropy, no TP",
        ),
        Candidate(
            name="liger fused linear scaled",
            gives="logprob+entropy",
            sign=-1,
            products=4,
            call=lambda x, w, y: tuple(scaled(x, w, y, 1.0, -100, 1, True)),
            note="CuTe kernels on compute capability 9.0 (needs nvidia-cutlass-dsl), token chunks in torch elsewhere",
        ),
    ]


def apple(shape: Shape, device: torch.device) -> list[Candidate]:
    """cut-cross-entropy 25.1.1. With its filter, gradients of softmax entries below 2^-12 are left out."""
    _needs_triton(device)
    from cut_cross_entropy import linear_cross_entropy

    if shape.kind == "logits":
        return []
    made = []
    for name, eps in (("", "high"), (", no filter", None)):
        call = partial(_cut, partial(linear_cross_entropy, reduction="none", filter_eps=eps))
        note = "no entropy, no TP" + ("; its default leaves small gradients out" if eps else "")
        name = f"cut-cross-entropy{name}"
        made.append(Candidate(name=name, gives="logprob", sign=-1, products=4, call=call, note=note))
    return made


def _cut(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    return (function(*inputs),)


def trl(shape: Shape, device: torch.device) -> list[Candidate]:
    """trl 1.16.0. Its kernel modules alone: the package itself imports a trainer's dependencies."""
    _as_namespaces("trl", "trl.kernels", "trl.trainer")
    if "trl.trainer.utils" not in sys.modules:
        stub: Any = types.ModuleType("trl.trainer.utils")
        # What the real one returns where DeepSpeed has not split the parameters.
        stub.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()
        sys.modules["trl.trainer.utils"] = stub
    if shape.kind == "linear":
        chunked = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction.apply
        made = []
        ways: list[tuple[str, Gives, tuple[str, ...]]]
        ways = [("", "logprob+entropy", ("entropy",)), (", log-prob only", "logprob", ())]
        for suffix, gives, outputs in ways:
            call = partial(_trl_chunked, chunked, outputs)
            note = "no TP; bf16 tiles of 4096 tokens, 32768 columns; gradients summed in fp32"
            name = f"trl chunked log-prob{suffix}"
            made.append(Candidate(name=name, gives=gives, products=4, call=call, note=note))
        if device.type == "cuda":
            kernel = importlib.import_module("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy
            call = partial(_after_product, kernel)
            made.append(Candidate(name="product, then trl", gives="logprob+entropy", call=call, note="no TP"))
        return made
    _needs_triton(device)
    kernel = importlib.import_module("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy
    note = "no TP"
    return [
        Candidate(name="trl selective_log_softmax_and_entropy", gives="logprob+entropy", call=kernel, note=note),
        Candidate(
            name="trl selective_log_softmax",
            gives="logprob",
            call=lambda z, y: kernel(z, y)[:1],
            note=note + "; the entropy is computed and thrown away",
        ),
    ]


def _trl_chunked(function: Any, outputs: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Any:
    return function(hidden_TH, weight_VH, None, labels_T, 1.0, _TRL_COLUMNS, None, 1.0, outputs)[: 1 + len(outputs)]


def verl(shape: Shape, device: torch.device) -> list[Candidate]:
    """verl 0.9.1. Its kernel modules alone, on a stand-in for the module that asks which accelerator there is."""
    if device.type != "cuda":
        raise UnavailableError("asserts CUDA tensors")
    if shape.kind == "logits":
        return []
    _as_namespaces("verl", "verl.utils", "verl.utils.kernel")
    stub: Any = types.ModuleType("verl.utils.device")
    stub.get_device_name, stub.get_torch_device = (lambda: "cuda"), (lambda: torch.cuda)
    stub.get_device_capability, stub.is_cuda_available = torch.cuda.get_device_capability, True
    sys.modules["verl.utils.device"] = stub
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    note = "TP; the backward's logits gradient is bf16"
    call = partial(_verl, function)
    return [Candidate(name="verl linear_cross_entropy", gives="logprob+entropy", products=4, call=call, note=note)]


def _verl(function: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> tuple[Tensor, ...]:
    return tuple(function(hidden_TH, weight_VH, labels_T, 1.0, "none", None))


def megatron(shape: Shape, device: torch.device) -> list[Candidate]:
    """megatron-core 0.16.1: [T, 1, V] logits, a group of one rank. Both keep an fp32 softmax; no entropy."""
    if shape.kind == "linear":
        return []
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    group = parallel_state.get_tensor_model_parallel_group()
    note = "TP; no entropy; keeps an fp32 softmax"
    return [
        Candidate(
            name="megatron fused cross entropy",
            gives="logprob",
            sign=-1,
            call=lambda z, y: (fused_vocab_parallel_cross_entropy(z[:, None], y[:, None], group)[:, 0],),
            note=note,
        ),
        Candidate(
            name="megatron cross entropy",
            gives="logprob",
            sign=-1,
            call=lambda z, y: (vocab_parallel_cross_entropy(z[:, None], y[:, None])[:, 0],),
            note=note,
        ),
    ]


def planted(shape: Shape, device: torch.device) -> list[Candidate]:
    """Two that are wrong, to see the gate refuse them; not among the peers."""
    right = _naive if shape.kind == "logits" else partial(_after_product, _naive)

    def wrong_values(*inputs: Tensor) -> tuple[Tensor, ...]:
        logprobs_T, entropy_T = right(*inputs)
        return logprobs_T + 0.25, entropy_T

    def wrong_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        logprobs_T, entropy_T = right(*inputs)
        # The same value, but half of the gradient.
        return 0.5 * (logprobs_T + logprobs_T.detach()), entropy_T

    return [
        Candidate(name="planted: wrong values", gives="logprob+entropy", call=wrong_values),
        Candidate(name="planted: wrong gradients", gives="logprob+entropy", call=wrong_gradients, modes=MODES[1:]),
    ]


def _needs_triton(device: torch.device) -> None:
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        raise UnavailableError("Triton kernels need a GPU")


def _as_namespaces(*names: str) -> None:
    """Empty packages in place of real ones, so that a module inside imports without what the package imports."""
    if names[0] in sys.modules:
        return
    root = importlib.util.find_spec(names[0])
    if root is None or not root.submodule_search_locations:
        raise UnavailableError("not installed")
    for name in names:
        package = types.ModuleType(name)
        below = name.split(".")[1:]
        package.__path__ = [os.path.join(path, *below) for path in root.submodule_search_locations]
        sys.modules[name] = package


LOADERS: dict[str, Callable[[Shape, torch.device], list[Candidate]]] = {
    OURS: ours,
    "torch": of_torch,
    "trl": trl,
    "liger-kernel": liger,
    "cut-cross-entropy": apple,
    "verl": verl,
    "megatron-core": megatron,
    "torch.compile": compiled,
}
DISTRIBUTIONS = {name: name for name in ("liger-kernel", "cut-cross-entropy", "trl", "verl", "megatron-core")}
