"""The public log-prob functions.

Legend: T tokens, H hidden, V vocabulary columns of this rank.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.kernels import reference
from megarlhf.kernels.arguments import require_inputs, require_labels, require_mask
from megarlhf.kernels.backends import choose_backend
from megarlhf.kernels.linear_logprob import LinearLogprobOptions, LinearTokenLogprobs
from megarlhf.kernels.logprob import TokenLogprobs
from megarlhf.kernels.statistics import local_vocab_range
from megarlhf.kernels.tiles import LogprobOptions, Tiles
from megarlhf.kernels.tiles_torch import TorchTiles

Backend = Literal["auto", "triton", "chunked", "reference"]
"""`auto`: Triton on a GPU, chunked torch on a CPU and for fp64."""


def token_logprobs(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    true_vocab: int | None = None,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    return_entropy: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(logits / temperature)[label] and the entropy of the softmax, without a softmax in memory.

    Shapes:  logits_TV [T, V] bf16, fp16, fp32 or fp64, rows at any stride; labels_T [T] int64 in the global
             vocabulary -> ([T], [T]) fp32 (fp64 for fp64), nats. Ignored tokens give 0 and no gradient.
    Maths:   (z_y - m) - log s and log s - sum e^(z - m) (z - m) / s, m = max z, s = sum e^(z - m), in fp32 over all
             ranks; columns from `true_vocab` on are padding and left out. Without `return_entropy`: zeros.
    Group:   tensor-parallel group; rank r owns columns [r V, (r + 1) V). One all-gather of four numbers per token,
             merged in rank order: the same bits on every rank. The backward needs no communication.
    Memory:  four numbers per token beside the logits; in the backward one gradient of the logits
    Spec:    reference.py::token_logprobs
    Raises:  ValueError for a label outside [0, true_vocab) that is not `ignore_index`; on a GPU a device assertion
    """
    group = _unless_single(group)
    require_inputs(logits_TV, logits_TV.size(0), labels_T, temperature)
    columns, vocab = local_vocab_range(logits_TV.size(-1), true_vocab, group)
    options = LogprobOptions(temperature, ignore_index, vocab, return_entropy)
    name = _choose_backend(backend, logits_TV, labels_T, labels_T != ignore_index, options)
    if name == "reference":
        return reference.token_logprobs(logits_TV, labels_T, options, group)
    return TokenLogprobs.apply(logits_TV, labels_T, columns, group, _tiles(name, options))


def linear_token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    true_vocab: int | None = None,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    response_mask: Tensor | None = None,
    rows_T: Tensor | None = None,
    save_bytes: int = 2**28,
    return_entropy: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs` of the logits hidden @ weight^T, which never exist as a whole.

    Shapes:  hidden_TH [T, H], weight_VH [V, H], labels_T [T] int64 in the global vocabulary, response_mask [T] bool,
             rows_T [T] int64: the row of hidden_TH for each label; None: its own -> ([T], [T]) fp32 (fp64 for fp64).
             Under `sequence_parallel` hidden_TH is this rank's [T / tp, H]; results, labels and mask are of all T
             tokens, in rank order.
    Maths:   as in `token_logprobs`; logits, sums over tokens and sums over the vocabulary in fp32.
    Rows:    tokens outside `response_mask` give 0 and cost nothing, forward and backward; finding them on a GPU waits
             for the device, once. The same holds for ignored tokens on a CPU. On a GPU without a mask, ignored tokens
             take part in products with a gradient of 0, so their hidden states must be numbers.
             A row may have several labels: it is multiplied for each, and their gradients are summed in their order.
    Group:   forward: one all-gather of [T, 4]; backward: one all-reduce of the hidden states' gradient in fp32, during
             the products for the weight. Under sequence parallelism it is a reduce-scatter; the hidden states gathered
             in the forward are kept, or gathered again if `save_bytes` is too small.
    Weight:  the gradient is added to `weight_VH.main_grad` if it exists, and autograd gets none; a tied embedding's own
             gradient still comes through autograd. A weight with `only_main_grad` is marked when its gradient is
             complete, as Megatron's overlap of gradient sums demands.
    Memory:  one slice of logits (on a GPU the larger of 64 MiB and T x 1 KiB, and half as much for its gradient in
             bf16; T x 4 KiB on a CPU); in the backward an fp32 gradient of the hidden states (T x H x 4 bytes); up to
             `save_bytes` of gathered hidden states, then of logits, kept for the backward, which recomputes the rest.
    Spec:    reference.py::linear_token_logprobs
    Raises:  as `token_logprobs`
    """
    group = _unless_single(group)
    num_parts = group.size() if group is not None and sequence_parallel else 1
    require_inputs(hidden_TH, hidden_TH.size(0) * num_parts, labels_T, temperature)
    columns, vocab = local_vocab_range(weight_VH.size(0), true_vocab, group)
    kept_T = labels_T != ignore_index
    if response_mask is not None:
        require_mask("response_mask", response_mask, labels_T)
        kept_T = kept_T & response_mask
    softmax = LogprobOptions(temperature, ignore_index, vocab, return_entropy)
    name = _choose_backend(backend, hidden_TH, labels_T, kept_T, softmax)
    if name == "reference":
        return reference.linear_token_logprobs(
            hidden_TH, weight_VH, labels_T.masked_fill(~kept_T, ignore_index), softmax, group, sequence_parallel, rows_T
        )
    # Inside an autograd function gradients are always off: only here is it known whether a backward may follow.
    budget = save_bytes if torch.is_grad_enabled() else 0
    tiles = _tiles(name, softmax)
    options = LinearLogprobOptions(columns, group, sequence_parallel, budget, tiles, rows_repeat=rows_T is not None)
    if labels_T.device.type != "cpu" and response_mask is None and rows_T is None:
        return LinearTokenLogprobs.apply(hidden_TH, weight_VH, labels_T, None, options)
    return _of_kept_tokens(hidden_TH, weight_VH, labels_T, kept_T, rows_T, options)


def _of_kept_tokens(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    kept_T: Tensor,
    rows_T: Tensor | None,
    options: LinearLogprobOptions,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of the kept tokens only; 0 elsewhere."""
    kept_K = kept_T.nonzero()[:, 0]
    rows_K = kept_K if rows_T is None else rows_T[kept_K]
    results = LinearTokenLogprobs.apply(hidden_TH, weight_VH, labels_T[kept_K], rows_K, options)
    logprobs_T, entropy_T = (part_K.new_zeros(len(labels_T)).index_copy(0, kept_K, part_K) for part_K in results)
    return logprobs_T, entropy_T


def _choose_backend(backend: Backend, values: Tensor, labels_T: Tensor, kept_T: Tensor, options: LogprobOptions) -> str:
    """Choose the backend. Checks the labels too, unless Triton's kernel does it on a GPU."""
    name = choose_backend(backend, values, device=values.device, kernels="log-prob", fallback="chunked")
    if name != "triton" or labels_T.device.type == "cpu":
        require_labels(labels_T, kept_T, options.vocab, options.ignore_index)
    return name


def _unless_single(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, or None for a group of one rank."""
    return None if group is None or group.size() == 1 else group


def _tiles(name: str, options: LogprobOptions) -> Tiles:
    if name == "chunked":
        return TorchTiles(options)
    if name == "triton":
        from megarlhf.kernels.tiles_triton import TritonTiles

        return TritonTiles(options)
    raise ValueError(f"backend {name!r} is not known; use auto, triton, chunked or reference")
