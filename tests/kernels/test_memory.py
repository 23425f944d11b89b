"""What the log-prob kernels keep: peaks far below a softmax's.

Not covered: a GPU's memory (benchmarks/gpu_logprob.py measures it).
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megarlhf.kernels import linear_token_logprobs, token_logprobs
from tests.kernels.cases import linear_truth, made, made_linear, truth


def extra_peak(work):
    """Bytes at the highest point above where `work` began, and what its results hold."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        results = work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
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
