"""Ragged inputs, fp64 truth and the comparison, for the tests of packed functions. One set of tests runs over all
backends; Triton's kernels run in the interpreter (test_packed_triton.py starts such a process), and on a GPU.
"""

import torch
from hypothesis import strategies as st

from megarlhf.kernels import packed_gae
from tests.kernels.cases import _ON_GPU, INTERPRETING, device_of

BACKENDS = ["triton"] if INTERPRETING else ["reference", "torch", _ON_GPU]
OURS = ["triton"] if INTERPRETING else ["torch", _ON_GPU]
"""Without the specification."""
FACTOR = 2.0
"""Largest error against fp64 truth that is allowed, in units of the fp32 loop's."""
LENGTHS = [[5], [1], [0], [3, 0, 1, 0, 7], [0, 0, 2], [300, 1, 129, 0, 128, 127], [1030, 2]]
"""Blocks of a kernel have 128 tokens or more: several of them, exactly one, one more and one less."""


RAGGED = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300)), max_size=6)


def tensor(*values):
    return torch.tensor(values)


def cu_seqlens_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def columns(lengths, seed=0, dtype=torch.float32):
    """(log-probs, the reference's, values) [T] and scores [N]."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    logprobs_T = -torch.rand(num_tokens, generator=generator) * 3
    ref_T = logprobs_T + 0.3 * torch.randn(num_tokens, generator=generator)
    values_T = torch.randn(num_tokens, generator=generator)
    scores_N = torch.randn(len(lengths), generator=generator)
    return tuple(tensor.to(dtype) for tensor in (logprobs_T, ref_T, values_T, scores_N))


def on_device(backend, arguments):
    device = device_of(backend)
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]


def gae_of(backend, *arguments, **options):
    """(advantages, returns) on the CPU."""
    options = dict(zip(options, on_device(backend, options.values()), strict=True))
    return tuple(output.cpu() for output in packed_gae(*on_device(backend, arguments), backend=backend, **options))


def called(function, backend, *arguments, **options):
    options = dict(zip(options, on_device(backend, options.values()), strict=True))
    result = function(*on_device(backend, arguments), backend=backend, **options)
    return result.cpu() if isinstance(result, torch.Tensor) else type(result)(*(part.cpu() for part in result))


def worst(actual, truth):
    return float((actual.double() - truth.double()).abs().max()) if truth.numel() else 0.0


def magnitude(advantages_T, lengths, decay):
    """The largest that a token's terms add up to where none cancel: sum_k decay^k |d_{t+k}|."""
    following_T = torch.cat([advantages_T[1:], advantages_T[:1]]).clone()
    following_T[[end - 1 for end in cu_seqlens_of(lengths)[1:].tolist() if end]] = 0
    terms_T = (advantages_T - decay * following_T).abs()
    if not len(terms_T):
        return 0.0
    # With k1, a coefficient of 1 and log-probs of 0 the reference's are the rewards; without values GAE sums them up.
    zeros_T, zeros_N = torch.zeros_like(terms_T), terms_T.new_zeros(len(lengths))
    options = {"gamma": decay, "lam": 1.0, "kl_coef": 1.0, "backend": "torch"}
    sums_T, _ = packed_gae(zeros_T, terms_T, zeros_T, zeros_N, cu_seqlens_of(lengths), **options)
    return float(sums_T.max())


def assert_no_worse(outputs, loop, truth, least=0.0):
    """Than FACTOR times the loop in fp32, or than a rounding of the largest number on the way, or than `least`."""
    rounding = 1.2e-7 * max([1e-3, *(float(true.abs().max()) for true in truth if true.numel())])
    for output, other, true in zip(outputs, loop, truth, strict=True):
        assert output.dtype == torch.float32
        assert output.shape == true.shape
        assert worst(output, true) <= FACTOR * max(worst(other, true), rounding, least)
