"""Our kernels on this device against fp64 over the shapes that found bugs elsewhere: what CI without a GPU cannot see.

Each check returns None, or what is wrong. A value may be off by FACTOR times what the reference, in fp32 on the same
inputs, is off; results that are stored in bf16 or fp16 also by their rounding.

Legend: T tokens, H hidden, V vocabulary columns.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import Deadline
from benchmarks.machine import ROOT
from megarlhf.kernels import Backend, linear_token_logprobs, token_logprobs

Check = Callable[[], str | None]
FACTOR = 4.0
IGNORE = -100
_ROUNDING = {torch.float32: 4e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_HUGE_BYTES = 50 * 2**30
"""40000 x 128256 in bf16 is 10 GB, its gradient as much, and the check of some rows a little."""


def run_checks(device: torch.device, deadline: Deadline) -> list[dict[str, Any]]:
    """Name, passed and reason of each; a check that raises has failed."""
    backend: Backend = "triton" if device.type == "cuda" else "chunked"
    checks = (*_logits_checks(device, backend), *_linear_checks(device, backend), *_others(device, backend))
    return results_of(checks, deadline)


def results_of(checks: Iterable[tuple[str, Check]], deadline: Deadline) -> list[dict[str, Any]]:
    """Each check's, told as it comes."""
    results = []
    for name, check in checks:
        if deadline.left() < 5.0:
            reason: str | None = "skipped: no time left"
        else:
            try:
                reason = check()
            except Exception as error:  # noqa: BLE001 -- any exception is a failed check, and the others still run
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        skipped = reason is not None and reason.startswith("skipped: ")
        results.append({"check": name, "passed": None if skipped else reason is None, "reason": reason})
        if reason is not None:
            print(f"check {name}: {reason}", flush=True)
    print(f"checks: {sum(result['passed'] is True for result in results)} of {len(results)} passed", flush=True)
    return results


def _logits_checks(device: torch.device, backend: Backend) -> Iterator[tuple[str, Check]]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    vocabs = ((517, None), (517, 500), (1100, None), (1100, 1025), (9001, None))
    for dtype, (vocab, true_vocab), temperature in itertools.product(dtypes, vocabs, (0.1, 1.0, 2.0)):
        name = f"logits {dtype} V={vocab} true_vocab={true_vocab} temperature={temperature}".replace("torch.", "")
        logits_TV, labels_T, by_2T = _made(37, vocab, device, dtype, true_vocab)
        options = {"temperature": temperature, "true_vocab": true_vocab}
        yield name, partial(_near_truth, backend, logits_TV, labels_T, by_2T, options)
    for dtype, offset in itertools.product(dtypes, (1e4, -1e4, -120.0)):
        logits_TV, labels_T, by_2T = _made(13, 1100, device, dtype)
        name = f"logits {dtype} offset {offset:g}".replace("torch.", "")
        yield name, partial(_near_truth, backend, logits_TV + offset, labels_T, by_2T, {})
    for dtype in dtypes:
        about = str(dtype).removeprefix("torch.")
        logits_TV, labels_T, by_2T = _made(13, 1100, device, dtype)
        peaked_TV = logits_TV.scatter(1, labels_T.clamp(min=0)[:, None], 40.0)
        yield f"logits {about} peaked", partial(_near_truth, backend, peaked_TV, labels_T, by_2T, {})
        wide_TV, labels_T, by_2T = _made(13, 1100, device, dtype)
        yield (
            f"logits {about} rows of a wider tensor",
            partial(_near_truth, backend, wide_TV[:, :517], labels_T % 517, by_2T, {}),
        )
        yield f"logits {about} -inf columns", partial(_masked, backend, *_made(13, 1100, device, dtype))
        for tokens in (0, 1):
            made = _made(tokens, 1100, device, dtype)
            yield f"logits {about} T={tokens}", partial(_near_truth, backend, *made, {})
        yield f"logits {about} repeats", partial(_repeats, backend, *_made(64, 9001, device, dtype))


def _linear_checks(device: torch.device, backend: Backend) -> Iterator[tuple[str, Check]]:
    shapes = ((70, 517, 500), (70, 1100, None), (33, 9001, None), (1, 1100, None), (0, 1100, None))
    for dtype, (tokens, vocab, true_vocab) in itertools.product((torch.float32, torch.bfloat16, torch.float16), shapes):
        generator = torch.Generator().manual_seed(tokens + vocab)
        hidden_TH = torch.randn(tokens, 128, generator=generator).to(device, dtype)
        weight_VH = (0.3 * torch.randn(vocab, 128, generator=generator)).to(device, dtype)
        _, labels_T, by_2T = _made(tokens, vocab, device, dtype, true_vocab)
        for save_bytes in (0, 2**40):
            name = f"linear {dtype} T={tokens} V={vocab} true_vocab={true_vocab} save_bytes={save_bytes}"
            options = {"true_vocab": true_vocab, "temperature": 0.7}
            check = partial(_linear, backend, hidden_TH, weight_VH, labels_T, by_2T, options, save_bytes)
            yield name.replace("torch.", ""), check


def _others(device: torch.device, backend: Backend) -> Iterator[tuple[str, Check]]:
    for label in (1100, -1):
        yield f"label {label} of 1100 is refused", partial(_bad_label, device, backend, label)
    yield "offsets past 2^31: 40000 x 128256", partial(_huge, device, backend)


def _made(
    tokens: int, vocab: int, device: torch.device, dtype: torch.dtype, true_vocab: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels of which every seventh is ignored, and upstream gradients for both results."""
    generator = torch.Generator().manual_seed(tokens * vocab)
    logits_TV = 3.0 * torch.randn(tokens, vocab, generator=generator)
    labels_T = torch.randint(0, true_vocab or vocab, (tokens,), generator=generator)
    labels_T[tokens // 2 :: 7] = labels_T[tokens // 2 :: 7] if tokens == 1 else IGNORE
    by_2T = torch.randn(2, tokens, generator=generator)
    return logits_TV.to(device, dtype), labels_T.to(device), by_2T.to(device)


def _results(function: Callable[..., Any], leaves: tuple[Tensor, ...], by_2T: Tensor) -> dict[str, Tensor]:
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    outputs = function(*leaves)
    grads = torch.autograd.grad(outputs, leaves, tuple(by_2T.to(outputs[0].dtype)))
    named = {"logprob": outputs[0].detach(), "entropy": outputs[1].detach()}
    return named | {f"gradient {number}": grad for number, grad in enumerate(grads)}


def _compare(want: dict[str, Tensor], their: dict[str, Tensor], our: dict[str, Tensor]) -> str | None:
    for name, truth in want.items():
        if not bool(our[name].isfinite().all()):
            return f"{name} is not finite"
        if truth.numel() == 0:
            continue
        error = float((our[name].double() - truth).abs().max())
        allowed = float((their[name].double() - truth).abs().max())
        rounding = _ROUNDING[our[name].dtype] * max(float(truth.abs().max()), 1e-3)
        if not error <= FACTOR * max(allowed, rounding):
            return f"{name} is off by {error:.3g}, the reference by {allowed:.3g}"
    return None


def _near_truth(
    backend: Backend, logits_TV: Tensor, labels_T: Tensor, by_2T: Tensor, options: dict[str, Any]
) -> str | None:
    def of(chosen: Backend) -> Callable[..., Any]:
        return lambda z_TV: token_logprobs(z_TV, labels_T, backend=chosen, **options)

    want = _results(of("reference"), (logits_TV.double(),), by_2T)
    their, our = (_results(of(chosen), (logits_TV,), by_2T) for chosen in _pair(backend))
    return _compare(want, their, our)


def _pair(backend: Backend) -> tuple[Backend, Backend]:
    return "reference", backend


def _masked(backend: Backend, logits_TV: Tensor, labels_T: Tensor, by_2T: Tensor) -> str | None:
    """Columns [100, 300) at -inf: the same as without them, and nothing flows back into them."""
    labels_T = torch.where(labels_T > 0, labels_T % 100, labels_T)
    masked_TV = logits_TV.clone()
    masked_TV[:, 100:300] = -torch.inf
    kept_TV = torch.cat([logits_TV[:, :100], logits_TV[:, 300:]], 1)

    def of(chosen: Backend) -> Callable[..., Any]:
        return lambda z_TV: token_logprobs(z_TV, labels_T, backend=chosen)

    want = _results(of("reference"), (kept_TV.double(),), by_2T)
    their = _results(of("reference"), (kept_TV,), by_2T)
    our = _results(of(backend), (masked_TV,), by_2T)
    grad_TV = our["gradient 0"]
    if int(torch.count_nonzero(grad_TV[:, 100:300])):
        return "a gradient flows into columns of -inf"
    our["gradient 0"] = torch.cat([grad_TV[:, :100], grad_TV[:, 300:]], 1)
    return _compare(want, their, our)


def _repeats(backend: Backend, logits_TV: Tensor, labels_T: Tensor, by_2T: Tensor) -> str | None:
    first, second = (
        _results(lambda z_TV: token_logprobs(z_TV, labels_T, backend=backend), (logits_TV,), by_2T) for _ in range(2)
    )
    different = [name for name in first if not torch.equal(first[name], second[name])]
    return f"two runs differ in {different}" if different else None


def _linear(
    backend: Backend,
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    by_2T: Tensor,
    options: dict[str, Any],
    save_bytes: int,
) -> str | None:
    def of(chosen: Backend, **more: Any) -> Callable[..., Any]:
        return lambda x_TH, w_VH: linear_token_logprobs(x_TH, w_VH, labels_T, backend=chosen, **options, **more)

    inputs = (hidden_TH, weight_VH)
    want = _results(of("reference"), (hidden_TH.double(), weight_VH.double()), by_2T)
    their = _results(of("reference"), inputs, by_2T)
    our, again = (_results(of(backend, save_bytes=save_bytes), inputs, by_2T) for _ in range(2))
    different = [name for name in our if not torch.equal(our[name], again[name])]
    return f"two runs differ in {different}" if different else _compare(want, their, our)


def _bad_label(device: torch.device, backend: Backend, label: int) -> str | None:
    """In a process of its own: a device assertion ends the use of the device."""
    script = (
        "import torch; from megarlhf.kernels import token_logprobs\n"
        f"labels = torch.tensor([3, {label}], device={device.type!r})\n"
        f"print(token_logprobs(torch.zeros(2, 1100, device={device.type!r}), labels, backend={backend!r})[0].tolist())"
    )
    return not_refused(script, "device-side assert" if device.type == "cuda" else "outside the vocabulary")


def not_refused(script: str, words: str) -> str | None:
    """What is wrong where `script`, in a process of its own, does not fail with `words`; None: it does."""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode == 0:
        return f"nothing was raised; it printed {done.stdout.strip()}"
    return None if words in done.stderr else f"it failed otherwise: {done.stderr.strip().splitlines()[-1:]}"


def _huge(device: torch.device, backend: Backend) -> str | None:
    """The first, a middle and the last rows; offsets in the last are past 2^32."""
    if device.type != "cuda" or torch.cuda.mem_get_info()[0] < _HUGE_BYTES:
        return "skipped: needs 50 GiB of free GPU memory"
    tokens, vocab = 40000, 128256
    logits_TV = torch.randn(tokens, vocab, dtype=torch.bfloat16, device=device).requires_grad_()
    labels_T = torch.randint(vocab, (tokens,), device=device)
    by_2T = torch.randn(2, tokens, device=device)
    outputs = token_logprobs(logits_TV, labels_T, backend=backend)
    (grad_TV,) = torch.autograd.grad(outputs, (logits_TV,), tuple(by_2T))
    rows = torch.tensor([0, 16743, 16744, 20000, 33487, 39999], device=device)
    our = {"logprob": outputs[0][rows].detach(), "entropy": outputs[1][rows].detach(), "gradient 0": grad_TV[rows]}
    some_TV = logits_TV.detach()[rows]

    def reference(z_TV: Tensor) -> Any:
        return token_logprobs(z_TV, labels_T[rows], backend="reference")

    want, their = (_results(reference, (z_TV,), by_2T[:, rows]) for z_TV in (some_TV.double(), some_TV))
    return _compare(want, their, our)
