"""Inputs, truth in fp64 and the comparison, for the tests of log-prob kernels. One set of tests runs over all backends.

Triton's kernels run where TRITON_INTERPRET=1 was set before Triton was imported (test_triton.py starts such a process),
and on a GPU.
"""

import os
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarlhf.kernels import linear_token_logprobs, token_logprobs

IGNORE = -100
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
FACTOR = 2.0
"""Largest error against fp64 truth that is allowed, in units of torch's own fp32 error. Not 1: both are the largest of
a few hundred roundings, and which of two correct orders of summation is luckier differs from case to case; over many
cases the root mean squares' ratio is 1 (0.8 to 1.1)."""

_ON_GPU = pytest.param("triton", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="")])
BACKENDS = ["triton"] if INTERPRETING else ["reference", "chunked", _ON_GPU]
OURS = ["triton"] if INTERPRETING else ["chunked", _ON_GPU]
"""Without the specification."""


def device_of(backend):
    return "cuda" if backend == "triton" and not INTERPRETING else "cpu"


def truth(logits_TV, labels_T, *, temperature=1.0, true_vocab=None, ignore_index=IGNORE):
    """(log-probs, entropy) by log_softmax, in fp32 or the wider dtype given; ignored rows 0."""
    wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    log_TV = torch.log_softmax(wide_TV[:, :true_vocab] / temperature, -1)
    kept_T = labels_T != ignore_index
    logprobs_T = log_TV.gather(1, labels_T.clamp(min=0)[:, None])[:, 0]
    terms_TV = torch.where(log_TV.isfinite(), log_TV.exp() * log_TV.clamp(min=-1e30), 0.0)
    return torch.where(kept_T, logprobs_T, 0.0), torch.where(kept_T, -terms_TV.sum(-1), 0.0)


def linear_truth(hidden_TH, weight_VH, labels_T, *, response_mask=None, **options):
    if response_mask is not None:
        labels_T = labels_T.masked_fill(~response_mask, IGNORE)
    return truth(hidden_TH @ weight_VH.t(), labels_T, **options)


def made(num_tokens, vocab, seed=0, *, scale=3.0, true_vocab=None):
    """fp32 logits, labels with some ignored rows, and an upstream gradient for each output."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = scale * torch.randn(num_tokens, vocab, generator=generator)
    return logits_TV, *_targets(num_tokens, true_vocab or vocab, generator)


def made_linear(num_tokens, num_hidden, vocab, seed=0, *, scale=3.0, true_vocab=None):
    """(hidden states, weight), whose logits are about `scale`, then as `made`."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(num_tokens, num_hidden, generator=generator)
    weight_VH = scale * num_hidden**-0.5 * torch.randn(vocab, num_hidden, generator=generator)
    return (hidden_TH, weight_VH), *_targets(num_tokens, true_vocab or vocab, generator)


def _targets(num_tokens, vocab, generator):
    labels_T = torch.randint(0, vocab, (num_tokens,), generator=generator)
    labels_T[num_tokens // 2 :: 7] = IGNORE
    return labels_T, torch.randn(2, num_tokens, generator=generator)


OUTPUTS = ("logprob", "entropy")
UPSTREAM = ("logprob", "entropy", "both")


def run(function, inputs, labels_T, weights_2T, device="cpu", **options):
    """By name: both outputs, and each input's gradient by each output alone and by both together."""
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    leaves = [tensor.detach().to(device).requires_grad_() for tensor in inputs]
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    outputs = function(*leaves, labels_T.to(device), **options)
    weights_2T = weights_2T.to(device, outputs[0].dtype)
    results = dict(zip(OUTPUTS, outputs, strict=True))
    for upstream, (by_logprob, by_entropy) in zip(UPSTREAM, ((1, 0), (0, 1), (1, 1)), strict=True):
        total = (by_logprob * weights_2T[0] * outputs[0] + by_entropy * weights_2T[1] * outputs[1]).sum()
        for index, gradient in enumerate(torch.autograd.grad(total, leaves, retain_graph=True)):
            results[f"gradient {index} by {upstream}"] = gradient
    return {name: tensor.detach().cpu() for name, tensor in results.items()}


def run_backend(backend, inputs, labels_T, weights_2T, **options):
    """`run` with our function for these inputs."""
    function = token_logprobs if isinstance(inputs, torch.Tensor) else linear_token_logprobs
    return run(partial(function, backend=backend), inputs, labels_T, weights_2T, device_of(backend), **options)


def assert_near_truth(backend, inputs, labels_T, weights_2T, *, least=0.0, **options):
    """No worse than FACTOR times torch in fp32. For half-precision inputs: times the specification on the same inputs.

    The least that is allowed: `least`, three roundings of the largest value, and at a temperature one of the largest
    logit, which moves a near tie between two likely tokens, in torch and here, in some direction.
    """
    linear = not isinstance(inputs, torch.Tensor)
    several = inputs if linear else (inputs,)
    dtype = several[0].dtype
    true_function, function = (linear_truth, linear_token_logprobs) if linear else (truth, token_logprobs)
    spec = partial(function, backend="reference")
    shared = {name: value for name, value in options.items() if name != "save_bytes"}
    wide = tuple(tensor.double() for tensor in several)
    expected = run(true_function, wide, labels_T, weights_2T, **shared)
    theirs = run(true_function if dtype == torch.float32 else spec, inputs, labels_T, weights_2T, **shared)
    ours = run_backend(backend, inputs, labels_T, weights_2T, **options)
    assert ours.keys() == expected.keys()
    temperature = options.get("temperature", 1.0)
    of_logits = 0.0 if linear or temperature == 1.0 else 2**-24 * largest(inputs) / temperature
    for name, want in expected.items():
        assert ours[name].dtype == theirs[name].dtype == (torch.float32 if name in OUTPUTS else dtype)
        assert ours[name].shape == want.shape
        # Triton's interpreter truncates to bf16, where a GPU rounds: one unit in the last place.
        truncated = INTERPRETING and ours[name].dtype == torch.bfloat16
        error = largest(ours[name] - want, truncated * 2**-7 * want.abs())
        allowed = largest(theirs[name] - want)
        rounding = max(4e-7 * max(largest(want), 1e-3), of_logits, least)
        assert error <= FACTOR * max(allowed, rounding), f"{name}: error {error:.3g}, torch's {allowed:.3g}"


def largest(values, free=0.0):
    """The largest magnitude, above what is free; of no values 0."""
    return float((values.abs() - free).max()) if values.numel() else 0.0


def assert_same_bits(some, other):
    assert some.keys() == other.keys()
    for name in some:
        assert torch.equal(some[name], other[name]), name


def far_apart(small_TV, path, monkeypatch):
    """17 rows of bf16 as far apart as those of 40000 x 128256 logits, in a file whose holes take no space."""
    stride = 2500 * 128256
    assert stride < 2**31 < 16 * stride == 40000 * 128256
    if INTERPRETING:
        from triton.runtime.interpreter import GridExecutor

        # Copies the whole memory of each tensor onto itself, where that is a CPU's.
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    assert len(small_TV) == 17
    size = 16 * stride + small_TV.size(1)
    whole = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    far_TV = whole.as_strided(small_TV.shape, (stride, 1))
    return far_TV.copy_(small_TV)


class Recorded(TorchDispatchMode):
    """Scope that notes matrix products and collectives in the order in which they are started.

    events: ("product", (rows, columns), inner) or (name of the collective, shape, None).
    """

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        space, _, name = str(function).partition(".")
        if space == "c10d":
            first = args[0]
            while isinstance(first, list | tuple):
                first = first[0]
            self.events.append((name.partition(".")[0], tuple(first.shape), None))
        elif name.partition(".")[0] in ("mm", "addmm"):
            left = args[-2]
            self.events.append(("product", tuple(output.shape), left.shape[1]))
        return output

    def products(self):
        return [shape for shape, _ in self.products_and_inner()]

    def products_and_inner(self):
        return [(shape, inner) for name, shape, inner in self.events if name == "product"]

    def collectives(self):
        return [name for name, _, _ in self.events if name != "product"]
