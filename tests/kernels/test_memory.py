"""What the log-prob kernels keep: gradients in place of the logits, and peaks far below a softmax's.

Not covered: a GPU's memory (benchmarks/gpu_logprob.py measures it).
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megarlhf.kernels import linear_token_logprobs, token_logprobs
from tests.kernels.cases import INTERPRETING, OURS, device_of, linear_truth, made, made_linear, run_backend, truth

over_ours = pytest.mark.parametrize("backend", OURS)


def in_place(backend):
    """A leaf, logits made of it, and the loss's gradient by them when it is written into memory of its own."""
    logits_TV, labels_T, _ = made(9, 300, true_vocab=290)
    device = device_of(backend)
    want = run_backend(backend, logits_TV, labels_T, torch.ones(2, 9), true_vocab=290)["gradient 0 by both"].to(device)
    leaf_TV = logits_TV.to(device).requires_grad_()
    options = {"true_vocab": 290, "inplace_backward": True, "backend": backend}
    return leaf_TV, leaf_TV * 1.0, labels_T.to(device), options, want


@over_ours
def test_inplace_backward_writes_over_the_logits(backend):
    leaf_TV, logits_TV, labels_T, options, want_TV = in_place(backend)
    seen = []
    logits_TV.register_hook(lambda gradient_TV: seen.append(gradient_TV.data_ptr()))
    logprobs_T, entropy_T = token_logprobs(logits_TV, labels_T, **options)
    (logprobs_T + entropy_T).sum().backward()
    assert seen == [logits_TV.data_ptr()]
    torch.testing.assert_close(leaf_TV.grad, want_TV, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits_TV.detach(), want_TV, rtol=1e-6, atol=1e-7)


@over_ours
def test_a_second_backward_over_overwritten_logits_is_refused(backend):
    _, logits_TV, labels_T, options, _ = in_place(backend)
    logprobs_T, _ = token_logprobs(logits_TV, labels_T, **options)
    logprobs_T.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="first backward wrote the gradient over the logits"):
        logprobs_T.sum().backward()


@over_ours
def test_others_who_kept_the_overwritten_logits_are_told(backend):
    _, logits_TV, labels_T, options, _ = in_place(backend)
    squares = logits_TV.square().sum()
    again_T, _ = token_logprobs(logits_TV, labels_T, backend=backend)
    logprobs_T, _ = token_logprobs(logits_TV, labels_T, **options)
    logprobs_T.sum().backward(retain_graph=True)
    for other in (squares, again_T.sum()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()


@over_ours
def test_a_leaf_is_not_overwritten(backend):
    leaf_TV, _, labels_T, options, _ = in_place(backend)
    with pytest.raises(ValueError, match="over a leaf's own values"):
        token_logprobs(leaf_TV, labels_T, **options)
    with torch.no_grad():
        token_logprobs(leaf_TV.detach(), labels_T, **options)


def extra_peak(work):
    """Bytes at the highest point above where `work` began, and what its results hold."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        results = work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak - sum(tensor.nbytes for tensor in results)


def step(function, leaves, labels_T, backward, **options):
    def work():
        with torch.set_grad_enabled(backward):
            logprobs_T, entropy_T = function(*leaves, labels_T, **options)
        results = [logprobs_T.detach(), entropy_T.detach()]
        if backward:
            results += torch.autograd.grad((logprobs_T + entropy_T).sum(), leaves)
        return results

    return work


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's own memory is not the kernels'")
@pytest.mark.parametrize("backward", [False, True])
def test_the_linear_kernel_never_holds_the_logits(backward):
    """Ten times below naive torch, and a small part of the logits."""
    inputs, labels_T, _ = made_linear(256, 64, 32000)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    ours = extra_peak(step(linear_token_logprobs, leaves, labels_T, backward, save_bytes=0, backend="chunked"))
    naive = extra_peak(step(linear_truth, leaves, labels_T, backward))
    logits_bytes = 256 * 32000 * 4
    assert naive >= 2 * logits_bytes
    assert 0 < ours < naive / 10
    assert ours < logits_bytes / 4
    # The budget is what it may hold beside that, where a backward is to come.
    budget = logits_bytes // 2
    kept = extra_peak(step(linear_token_logprobs, leaves, labels_T, backward, save_bytes=budget, backend="chunked"))
    if backward:
        assert ours + 0.8 * budget < kept <= ours + 1.1 * budget
    else:
        assert kept < 1.1 * ours


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's own memory is not the kernels'")
def test_the_logits_kernel_holds_little_beside_the_logits():
    """Forward: four numbers a token and blocks of a fixed size. Backward: the gradient, once."""
    peaks = {}
    for vocab in (16000, 32000):
        logits_TV, labels_T, _ = made(512, vocab)
        leaf_TV = logits_TV.requires_grad_()
        peaks[vocab] = [
            extra_peak(step(token_logprobs, [leaf_TV], labels_T, backward, backend="chunked"))
            for backward in (False, True)
        ]
        naive = extra_peak(step(truth, [leaf_TV], labels_T, True))
        assert max(peaks[vocab]) < leaf_TV.nbytes / 3
        assert max(peaks[vocab]) < naive / 6
    # Twice the vocabulary costs nothing more.
    assert peaks[32000] == pytest.approx(peaks[16000], rel=0.01)


SHARING = {
    "a row for all tokens": (lambda base_N: base_N[:300].expand(4, 300), r"expanded from fewer .*strides \(0, 1\)"),
    "overlapping rows": (
        lambda base_N: base_N.as_strided((4, 50), (10, 1)),
        r"expanded from fewer .*strides \(10, 1\)",
    ),
    "overlapping columns": (lambda base_N: base_N.as_strided((4, 50), (1, 3)), r"expanded from fewer"),
}


@pytest.mark.parametrize("name", SHARING)
@over_ours
def test_logits_that_share_memory_are_not_overwritten(backend, name):
    """One place for several gradients."""
    view, message = SHARING[name]
    logits_TV = view(torch.zeros(1200, requires_grad=True).mul(1.0))
    with pytest.raises(ValueError, match=message):
        token_logprobs(logits_TV, torch.arange(4), inplace_backward=True, backend=backend)


@over_ours
def test_views_of_a_leaf_are_not_overwritten(backend):
    """Nor would it be seen: the leaf's own memory would change. A view of a result is overwritten."""
    leaf_N = torch.randn(1200, requires_grad=True)
    for logits_TV in (leaf_N.view(4, 300), leaf_N.view(2, 2, 300).flatten(0, 1), leaf_N.view(8, 150)[2:6]):
        with pytest.raises(ValueError, match="over a leaf's own values"):
            token_logprobs(logits_TV, torch.arange(4), inplace_backward=True, backend=backend)
    before_N = leaf_N.detach().clone()
    logits_TV = leaf_N.mul(1.0).view(4, 300)
    token_logprobs(logits_TV, torch.arange(4), inplace_backward=True, backend=backend)[0].sum().backward()
    assert torch.equal(leaf_N.detach(), before_N)
    torch.testing.assert_close(leaf_N.grad.view(4, 300), logits_TV.detach())
