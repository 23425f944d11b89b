"""What the benchmark of packed rows times: GAE, whitening, moving rows, attention; and who does it.

Legend: T tokens of all sequences end to end, N sequences, R the longest, H heads, D numbers a head.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarlhf.kernels import packed_gae, packed_whiten

GAMMA, LAM, KL_COEF = 0.99, 0.95, 0.1
OURS = "megarlhf"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to do the work."""

    name: str
    call: Callable[[], Any]
    wrong: Callable[[Any], str | None]
    """What is wrong with a result, or None."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One problem, everybody who solves it, and the bytes that have to move."""

    kind: str
    name: str
    num_bytes: int
    """Read or written once, of the packed row; 0 where bytes are not the limit."""
    candidates: list[Candidate]
    missing: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0


def lengths_of(name: str, num_sequences: int, longest: int) -> Tensor:
    """Equal, or a lognormal with a long tail: most are an eighth of the longest or less."""
    if name == "equal":
        return torch.full((num_sequences,), longest)
    drawn_N = torch.randn(num_sequences, generator=torch.Generator().manual_seed(0)).exp()
    return (drawn_N * longest / 12).long().clamp(1, longest)


@dataclass(frozen=True)
class Rows:
    """Sequences on a device, and where they stand in a padded tensor."""

    lengths_N: Tensor
    device: torch.device

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.cat([self.lengths_N.new_zeros(1), self.lengths_N.cumsum(0)]).to(self.device)

    @property
    def mask_NR(self) -> Tensor:
        return (torch.arange(int(self.lengths_N.max())) < self.lengths_N[:, None]).to(self.device)

    def padded(self, x_T: Tensor) -> Tensor:
        padded_NR = x_T.new_zeros(self.mask_NR.shape)
        padded_NR[self.mask_NR] = x_T
        return padded_NR


def first_line(error: Exception) -> str:
    """One line of it, of which the first words tell."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def close(actual: Tensor, truth: Tensor, allowed: float) -> str | None:
    """Largest error over the largest number."""
    error = float((actual.double() - truth.double()).abs().max() / truth.double().abs().max().clamp(min=1e-3))
    return None if error <= allowed else f"off by {error:.3g} of the largest number, more than {allowed:g}"


# --- GAE ------------------------------------------------------------------------------------------


def gae_work(name: str, rows: Rows) -> Work:
    """KL (k1) in the reward, score at the end, GAE, returns; fp32."""
    tokens, number = int(rows.lengths_N.sum()), len(rows.lengths_N)
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(3, tokens, generator=generator).to(rows.device)
    inputs = (*columns.unbind(), torch.randn(number, generator=generator).to(rows.device))
    cu_seqlens, options = rows.cu_seqlens, {"gamma": GAMMA, "lam": LAM, "kl_coef": KL_COEF}
    wide = [column.double() for column in inputs]
    truth = packed_gae(*wide, cu_seqlens, backend="torch", **options)
    mask_NR, padded = rows.mask_NR, [rows.padded(column) for column in inputs[:3]]

    def packed_wrong(outputs: Any) -> str | None:
        return close(outputs[0], truth[0], 1e-5) or close(outputs[1], truth[1], 1e-5)

    def padded_wrong(outputs: Any) -> str | None:
        return close(outputs[1][mask_NR], truth[1], 1e-5)

    note = "padded inputs made before, results left padded"
    scans = {"torch, padded scan by doubling": _doubling, "torch, padded, a Python loop": _loop}
    candidates = [
        Candidate(name=OURS, call=partial(packed_gae, *inputs, cu_seqlens, **options), wrong=packed_wrong),
        Candidate(
            name=f"{OURS}, torch",
            call=partial(packed_gae, *inputs, cu_seqlens, backend="torch", **options),
            wrong=packed_wrong,
        ),
        *(
            Candidate(
                name=way, call=partial(_padded_gae, *padded, inputs[3], mask_NR, scan), wrong=padded_wrong, note=note
            )
            for way, scan in scans.items()
        ),
    ]
    rewards_NR = _shaped(*padded[:2], inputs[3], mask_NR)
    peers, missing = _gae_peers(rewards_NR, padded[2], mask_NR)
    candidates += [
        Candidate(name=peer, call=call, wrong=padded_wrong, note=about) for peer, (call, about) in peers.items()
    ]
    return Work(
        kind="GAE", name=name, num_bytes=4 * (5 * tokens + number), candidates=candidates, missing=missing,
        tokens=tokens, padded_tokens=mask_NR.numel(),
    )  # fmt: skip


def _shaped(logprobs_NR: Tensor, ref_NR: Tensor, scores_N: Tensor, mask_NR: Tensor) -> Tensor:
    last_N1 = mask_NR.sum(1, keepdim=True) - 1
    rewards_NR = torch.where(mask_NR, KL_COEF * (ref_NR - logprobs_NR), 0.0)
    return rewards_NR.scatter(1, last_N1, rewards_NR.gather(1, last_N1) + scores_N[:, None])


def _padded_gae(
    logprobs_NR: Tensor,
    ref_NR: Tensor,
    values_NR: Tensor,
    scores_N: Tensor,
    mask_NR: Tensor,
    scan: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    rewards_NR = _shaped(logprobs_NR, ref_NR, scores_N, mask_NR)
    advantages_NR = scan(rewards_NR + GAMMA * F.pad(values_NR[:, 1:], (0, 1)) - values_NR)
    return advantages_NR, advantages_NR + values_NR


def _loop(deltas_NR: Tensor) -> Tensor:
    advantages_NR, running_N = torch.empty_like(deltas_NR), torch.zeros_like(deltas_NR[:, 0])
    for t in reversed(range(deltas_NR.shape[1])):
        running_N = deltas_NR[:, t] + GAMMA * LAM * running_N
        advantages_NR[:, t] = running_N
    return advantages_NR


def _doubling(deltas_NR: Tensor) -> Tensor:
    sums_NR, step = deltas_NR.clone(), 1
    while step < deltas_NR.shape[1]:
        sums_NR[:, :-step] += (GAMMA * LAM) ** step * sums_NR[:, step:]
        step *= 2
    return sums_NR


def _gae_peers(
    rewards_NR: Tensor, values_NR: Tensor, mask_NR: Tensor
) -> tuple[dict[str, tuple[Callable[[], Any], str]], dict[str, str]]:
    """Functions that do GAE alone: rewards were shaped and padded before. One that has changed raises and is listed."""
    missing = {
        "trl": "its GAE is a part of the trainer's loop, no function",
        "openrlhf": "its GAE is a method of a class that starts Ray, no function",
    }
    peers: dict[str, tuple[Callable[[], Any], str]] = {}
    try:
        gae = importlib.import_module("verl.trainer.ppo.core_algos").compute_gae_advantage_return
        call = partial(gae, rewards_NR, values_NR, mask_NR.float(), GAMMA, LAM)
        peers["verl"] = (call, "GAE of shaped rewards, padded; advantages whitened: gate by returns")
    except Exception as error:  # noqa: BLE001 -- a peer's import may raise anything; the reason is listed
        missing["verl"] = first_line(error)
    try:
        chunked = importlib.import_module("slime.utils.ppo_utils").chunked_gae
        peers["slime, chunked"] = (partial(chunked, rewards_NR, values_NR, GAMMA, LAM), "GAE of shaped rewards, padded")
    except Exception as error:  # noqa: BLE001 -- as above
        missing["slime"] = first_line(error)
    return peers, missing


# --- whitening ------------------------------------------------------------------------------------


def whiten_work(name: str, rows: Rows) -> Work:
    """Over all tokens, in fp64 within; read for the moments, read again, written."""
    tokens = int(rows.lengths_N.sum())
    x_T = torch.randn(tokens, generator=torch.Generator().manual_seed(2)).to(rows.device) * 3 + 1
    truth = packed_whiten(x_T.double(), backend="torch")
    mask_NR, padded_NR = rows.mask_NR, rows.padded(x_T)

    def masked() -> Tensor:
        count = mask_NR.sum()
        mean = (padded_NR * mask_NR).sum() / count
        variance = ((padded_NR - mean).square() * mask_NR).sum() / count
        return (padded_NR - mean) * torch.rsqrt(variance + 1e-8) * mask_NR

    def wrong(actual: Any) -> str | None:
        return close(actual, truth, 1e-5)

    candidates = [
        Candidate(name=OURS, call=partial(packed_whiten, x_T), wrong=wrong),
        Candidate(name=f"{OURS}, torch", call=partial(packed_whiten, x_T, backend="torch"), wrong=wrong),
        Candidate(name="torch, padded, masked", call=masked, wrong=lambda actual: wrong(actual[mask_NR]), note="fp32"),
    ]
    return Work(
        kind="whitening", name=name, num_bytes=12 * tokens, candidates=candidates, tokens=tokens,
        padded_tokens=mask_NR.numel(),
    )  # fmt: skip


# --- rows to and from padding ---------------------------------------------------------------------


def packing_works(name: str, rows: Rows) -> Iterator[Work]:
    """Out of padding and back, as a step of its own: a kernel for it against indexing."""
    tokens, mask_NR = int(rows.lengths_N.sum()), rows.mask_NR
    x_T = torch.randn(tokens, generator=torch.Generator().manual_seed(3)).to(rows.device)
    padded_NR, cu_seqlens, index_T = rows.padded(x_T), rows.cu_seqlens, rows.mask_NR.reshape(-1).nonzero()[:, 0]

    def by_mask() -> Tensor:
        copy_NR = torch.zeros_like(padded_NR)
        copy_NR[mask_NR] = x_T
        return copy_NR

    def by_index() -> Tensor:
        return torch.zeros_like(padded_NR).view(-1).index_copy_(0, index_T, x_T).view_as(padded_NR)

    pack: dict[str, Callable[[], Any]] = {
        "x[mask]": lambda: padded_NR[mask_NR],
        "an index kept from before": lambda: padded_NR.view(-1).index_select(0, index_T),
    }
    unpack: dict[str, Callable[[], Any]] = {"x[mask] = packed": by_mask, "an index kept from before": by_index}
    missing = {}
    if rows.device.type == "cuda":
        from benchmarks.gpu_packed_move import pack_rows, unpack_rows

        pack["a Triton kernel"] = partial(pack_rows, padded_NR, cu_seqlens, tokens)
        unpack["a Triton kernel"] = partial(unpack_rows, x_T, cu_seqlens, padded_NR.shape[1])
    else:
        missing["a Triton kernel"] = "needs a GPU"
    for kind, calls, want, moved in (
        ("pack", pack, x_T, 2 * tokens),
        ("unpack", unpack, padded_NR, tokens + padded_NR.numel()),
    ):
        wrong = partial(lambda want, got: None if torch.equal(got, want) else "other numbers", want)
        candidates = [Candidate(name=label, call=call, wrong=wrong) for label, call in calls.items()]
        yield Work(
            kind=kind, name=name, num_bytes=4 * moved, candidates=candidates, missing=missing, tokens=tokens,
            padded_tokens=padded_NR.numel(),
        )  # fmt: skip


# --- attention ------------------------------------------------------------------------------------


def attention_works(name: str, rows: Rows, heads: int, size: int) -> Iterator[Work]:
    """Causal attention over packed rows (torch's varlen_attn) and over padded ones; bf16, fp32 on a CPU."""
    tokens, longest = int(rows.lengths_N.sum()), int(rows.lengths_N.max())
    dtype = torch.bfloat16 if rows.device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(4)
    packed = [torch.randn(tokens, heads, size, generator=generator).to(rows.device, dtype) for _ in range(3)]
    mask_NR, borders = rows.mask_NR, rows.cu_seqlens.int()
    padded = []
    for x_THD in packed:
        x_NRHD = x_THD.new_zeros(*mask_NR.shape, heads, size)
        x_NRHD[mask_NR] = x_THD
        padded.append(x_NRHD.transpose(1, 2).contiguous())
    last = slice(int(borders[-2]), tokens)
    truth = _plain_attention(*(tensor[last].double() for tensor in packed))
    forwards: dict[str, tuple[Callable[..., Tensor], list[Tensor], Callable[[Tensor], Tensor]]] = {}
    forwards["padded: scaled_dot_product_attention"] = (
        partial(F.scaled_dot_product_attention, is_causal=True),
        padded,
        lambda out: out.transpose(1, 2)[-1, : int(rows.lengths_N[-1])],
    )
    missing = {}
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        call = partial(_varlen, varlen, borders, longest)
        call(*packed)
        forwards["packed: varlen_attn"] = (call, packed, lambda out: out[last])
    except Exception as error:  # noqa: BLE001 -- whatever it lacks here is listed
        missing["packed: varlen_attn"] = first_line(error)
    for mode in ("forward", "forward+backward"):
        candidates = []
        for label, (call, inputs, part) in forwards.items():
            run = partial(call, *inputs) if mode == "forward" else partial(_both, call, inputs)
            wrong = partial(_attention_wrong, part, truth, 2e-2 if dtype == torch.bfloat16 else 1e-4)
            candidates.append(Candidate(name=label, call=run, wrong=wrong))
        yield Work(
            kind=f"attention, {mode}", name=name, num_bytes=0, candidates=candidates, missing=missing,
            tokens=tokens, padded_tokens=mask_NR.numel(),
        )  # fmt: skip


def _varlen(varlen: Callable[..., Any], borders: Tensor, longest: int, *qkv: Tensor) -> Tensor:
    output = varlen(*qkv, borders, borders, longest, longest, window_size=(-1, 0))
    return output if isinstance(output, Tensor) else output[0]


def _both(call: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = call(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out)))


def _attention_wrong(part: Callable[[Tensor], Tensor], truth: Tensor, allowed: float, result: Any) -> str | None:
    out = result if isinstance(result, Tensor) else result[0]
    return close(part(out), truth, allowed)


def _plain_attention(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> Tensor:
    """One sequence, causal, by the book."""
    scores_HTT = torch.einsum("thd,shd->hts", query_THD, key_THD) / math.sqrt(query_THD.shape[-1])
    later_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool, device=scores_HTT.device).triu(1)
    return torch.einsum("hts,shd->thd", scores_HTT.masked_fill(later_TT, -torch.inf).softmax(-1), value_THD)
