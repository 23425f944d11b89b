"""KL estimators: values by hand, and value and gradient in expectation over a three-token vocabulary."""

import math

import pytest
import torch

from megarlhf.algo.kl import kl_estimate, ratio_weighted
from tests.refuses import refuses


def test_estimates_by_hand():
    """pi = 1/2, ref = 1/4: log r = -log 2. Equal: all zero."""
    logprobs_T = torch.log(torch.tensor([0.5, 0.25], dtype=torch.float64))
    ref_logprobs_T = torch.log(torch.tensor([0.25, 0.25], dtype=torch.float64))
    log2 = math.log(2)
    for kind, value in (("k1", log2), ("k2", log2**2 / 2), ("k3", 0.5 - 1 + log2), ("abs", log2)):
        got_T = kl_estimate(logprobs_T, ref_logprobs_T, kind)
        torch.testing.assert_close(got_T, torch.tensor([value, 0.0], dtype=torch.float64))
        held_T = kl_estimate(logprobs_T, ref_logprobs_T, kind, clamp=0.2)
        torch.testing.assert_close(held_T, torch.tensor([min(value, 0.2), 0.0], dtype=torch.float64))
    assert kl_estimate(ref_logprobs_T, logprobs_T, "k1", clamp=0.2)[0] == -0.2, "from below too"
    assert kl_estimate(ref_logprobs_T, logprobs_T, "abs")[0] == pytest.approx(log2)


LOGITS_V = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64)
REF_LOGPROBS_V = torch.log_softmax(torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64), 0)


def _value_and_gradient(of):
    logits_V = LOGITS_V.clone().requires_grad_()
    value = of(torch.log_softmax(logits_V, 0))
    return value.detach(), torch.autograd.grad(value, logits_V)[0]


def _expected(kind):
    return _value_and_gradient(lambda logp_V: (logp_V.exp().detach() * kl_estimate(logp_V, REF_LOGPROBS_V, kind)).sum())


FORWARD = _value_and_gradient(lambda logp_V: (logp_V.exp() * (logp_V - REF_LOGPROBS_V)).sum())
REVERSE = _value_and_gradient(lambda logp_V: (REF_LOGPROBS_V.exp() * (REF_LOGPROBS_V - logp_V)).sum())


def test_which_value_is_unbiased():
    """k1 and k3 are KL(pi || ref) in expectation, k2 is not."""
    for kind in ("k1", "k3"):
        torch.testing.assert_close(_expected(kind)[0], FORWARD[0])
    assert abs(_expected("k2")[0] - FORWARD[0]) > 1e-3


def test_which_gradient_is_right():
    """In a loss: k1 none, k2 that of KL(pi || ref), k3 that of KL(ref || pi); the two are not alike."""
    torch.testing.assert_close(_expected("k1")[1], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(_expected("k2")[1], FORWARD[1])
    torch.testing.assert_close(_expected("k3")[1], REVERSE[1])
    assert (FORWARD[1] - REVERSE[1]).abs().max() > 1e-3


@pytest.mark.parametrize("old_logits", [LOGITS_V, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_weighted_by_the_ratio_value_and_gradient_are_those_of_the_kl(kind, old_logits):
    """In expectation over the policy that drew the samples, whether that is the present one or an older one."""
    old_logp_V = torch.log_softmax(old_logits, 0)

    def loss(logp_V):
        kl_V = kl_estimate(logp_V, REF_LOGPROBS_V, kind)
        return (old_logp_V.exp() * ratio_weighted(kl_V, logp_V - old_logp_V)).sum()

    for found, expected in zip(_value_and_gradient(loss), FORWARD, strict=True):
        torch.testing.assert_close(found, expected)


def test_weighted_by_the_ratio_by_hand():
    """A KL of .5 at a ratio of 2, and of .25 at 1."""
    found_T = ratio_weighted(torch.tensor([0.5, 0.25]), torch.tensor([math.log(2), 0.0]))
    assert found_T.tolist() == pytest.approx([1.0, 0.25])


def test_unknown_kind_lists_the_known():
    with refuses("'k4'", "k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
