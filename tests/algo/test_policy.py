"""The policy loss against values worked out by hand: ratios, surrogates, and how much each token counts.

Legend: T response tokens end to end, N responses. Not covered: micro-batches (tests/trainers/test_losses.py).
"""

import math

import pytest
import torch

from megarlhf.algo.averaging import response_weights
from megarlhf.algo.policy import SURROGATES, Bounds, log_ratios, policy_loss
from megarlhf.algo.segments import Segments
from tests.operators import Operators
from tests.refuses import refuses

RESPONSES = Segments.of(torch.tensor([3, 0, 1]))
RATIOS_T = torch.tensor([1.5, 0.5, 1.1, 0.5], dtype=torch.float64)
ADVANTAGES_T = torch.tensor([1.0, -1.0, 2.0, 3.0], dtype=torch.float64)
EQUAL_T = torch.full((4,), 0.25, dtype=torch.float64)


def loss_and_gradient(ratios_T=RATIOS_T, advantages_T=ADVANTAGES_T, weights_T=EQUAL_T, responses=RESPONSES, **options):
    """Old log-probs are 0, so that a log-prob is its log-ratio."""
    logprobs_T = ratios_T.log().requires_grad_()
    out = policy_loss(logprobs_T, torch.zeros_like(ratios_T), advantages_T, weights_T, responses, **options)
    (gradient_T,) = torch.autograd.grad(out.loss, logprobs_T)
    return out, gradient_T


def test_clip_by_hand():
    """clip .2 / .3. Tokens: -1.3 (clipped high), .8 (clipped low), -2.2, -1.5 (low, A > 0: not clipped). The gradient
    of -r A is -r A where nothing is clipped."""
    out, gradient_T = loss_and_gradient(bounds=Bounds(low=0.2, high=0.3))
    assert out.loss.item() == pytest.approx((-1.3 + 0.8 - 2.2 - 1.5) / 4)
    assert out.clipped.item() == 2
    assert out.ratio_deviation.item() == pytest.approx(0.5 + 0.5 + 0.1 + 0.5)
    k3 = (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5)) + (0.1 - math.log(1.1))
    assert out.policy_kl.item() == pytest.approx(k3)
    torch.testing.assert_close(gradient_T, torch.tensor([0.0, 0.0, -2.2, -1.5], dtype=torch.float64) / 4)


def test_no_bound_from_below():
    """The second token is not clipped: -.5 x -1."""
    out, _ = loss_and_gradient(bounds=Bounds(low=None, high=0.3))
    assert (out.loss.item() * 4, out.clipped.item()) == (pytest.approx(-1.3 + 0.5 - 2.2 - 1.5), 1)


@pytest.mark.parametrize("bounds", [Bounds(dual=3.0), Bounds(delta=3.0)], ids=["dual", "delta"])
def test_dual_and_two_sided_clip_by_hand(bounds):
    """Where A < 0 a ratio of 5 costs 3 |A| and gives no gradient, one of 2 costs 2 |A|; where A > 0 nothing changes: a
    ratio of 5 is clipped at 1.2. The two names say the same where delta is above 1 + high."""
    ratios_T = torch.tensor([5.0, 2.0, 5.0, 0.5], dtype=torch.float64)
    advantages_T = torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    out, gradient_T = loss_and_gradient(ratios_T, advantages_T, bounds=bounds)
    assert out.loss.item() * 4 == pytest.approx(3 + 2 - 1.2 - 0.5)
    assert out.clipped.item() == 2
    torch.testing.assert_close(gradient_T * 4, torch.tensor([0.0, 2.0, 0.0, -0.5], dtype=torch.float64))


def test_cispo_by_hand():
    """Weights 1.3 (held), .5, 1.1, .5 times A: minus them the gradient, times log r = log p the loss."""
    held_T = torch.tensor([1.3, 0.5, 1.1, 0.5], dtype=torch.float64)
    out, gradient_T = loss_and_gradient(surrogate="cispo", bounds=Bounds(low=None, high=0.3))
    torch.testing.assert_close(gradient_T, -held_T * ADVANTAGES_T / 4)
    assert out.loss.item() == pytest.approx(-(held_T * ADVANTAGES_T * RATIOS_T.log()).sum().item() / 4)
    assert out.clipped.item() == 1
    bounded, gradient_T = loss_and_gradient(surrogate="cispo", bounds=Bounds(low=0.2, high=0.3))
    assert gradient_T[1].item() * 4 == pytest.approx(0.8), "held at .8 from below"
    assert bounded.clipped.item() == 3


def test_sapo_by_hand():
    """Gates 4 / tau sigmoid(tau (r - 1)), tau 1 where A > 0 and 2 where not. On-policy the gradient is that of -r A."""
    bounds = Bounds(temperature_positive=1.0, temperature_negative=2.0)
    out, _ = loss_and_gradient(surrogate="sapo", bounds=bounds)
    sigmoid = [1 / (1 + math.exp(-x)) for x in (0.5, 2 * -0.5, 0.1, -0.5)]
    expected = -4 * sigmoid[0] + 2 * sigmoid[1] - 2 * 4 * sigmoid[2] - 3 * 4 * sigmoid[3]
    assert out.loss.item() * 4 == pytest.approx(expected)
    _, on_policy_T = loss_and_gradient(torch.ones_like(RATIOS_T), surrogate="sapo", bounds=bounds)
    torch.testing.assert_close(on_policy_T, -ADVANTAGES_T / 4)


def test_plain_policy_gradient_by_hand():
    """-A log p: the gradient is -A whatever the ratio."""
    out, gradient_T = loss_and_gradient(surrogate="policy_gradient")
    torch.testing.assert_close(gradient_T, -ADVANTAGES_T / 4)
    assert out.loss.item() == pytest.approx(-(ADVANTAGES_T * RATIOS_T.log()).sum().item() / 4)


def test_ratios_of_a_response_by_hand():
    """1.5 x .5 x 1.1 = .825, whose cube root is the geometric one; a response of one token is its own."""
    zeros_T = torch.zeros(4, dtype=torch.float64)
    product, root = math.log(0.825), math.log(0.825) / 3
    for kind, expected in (("sequence", [product] * 3), ("geometric", [root] * 3)):
        log_ratio_T = log_ratios(RATIOS_T.log(), zeros_T, RESPONSES, kind)
        assert log_ratio_T.tolist() == pytest.approx([*expected, math.log(0.5)])
    with refuses("'word'", "token, sequence, geometric"):
        log_ratios(zeros_T, zeros_T, RESPONSES, "word")


def test_gspo_by_hand():
    """One ratio s of the response: each token's gradient is s / 3 times the sum of the weights x -A of all three. The
    first response is inside the clip of .1 / .1, the second outside on the side where nothing is clipped."""
    weights_T = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2], dtype=torch.float64)
    advantages_T = torch.tensor([2.0, 2.0, 2.0, 3.0], dtype=torch.float64)
    bounds = Bounds(low=0.1, high=0.1)
    out, gradient_T = loss_and_gradient(RATIOS_T, advantages_T, weights_T, ratio="geometric", bounds=bounds)
    s = 0.825 ** (1 / 3)
    assert 0.9 < s < 1.1
    assert out.loss.item() == pytest.approx(0.5 * (-2 * s) + 0.5 * -1.5)
    assert gradient_T.tolist() == pytest.approx([-2 * s / 6] * 3 + [-1.5 / 2])


def test_a_wild_ratio_keeps_finite_gradients():
    """exp(200) is infinite in fp32: held at exp(20), no gradient, and no NaN from inf * 0."""
    logprobs_T = torch.tensor([200.0, 0.0, -200.0], requires_grad=True)
    advantages_T, weights_T = torch.tensor([1.0, 1.0, -1.0]), torch.full((3,), 1 / 3)
    out = policy_loss(logprobs_T, torch.zeros(3), advantages_T, weights_T, Segments.of(torch.tensor([3])))
    assert out.clipped.item() == 2
    out.loss.backward()
    torch.testing.assert_close(logprobs_T.grad, torch.tensor([0.0, -1 / 3, 0.0]))


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", ["token", "sequence", "geometric"])
def test_on_policy_every_loss_has_the_policy_gradient(surrogate, ratio):
    """At ratio 1 with one advantage for a response: -A of each token, but for the product of a response's ratios, which
    every token's loss holds: times the length."""
    advantages_T = torch.tensor([2.0, 2.0, 2.0, -1.0], dtype=torch.float64)
    _, gradient_T = loss_and_gradient(torch.ones_like(RATIOS_T), advantages_T, surrogate=surrogate, ratio=ratio)
    moved = 3.0 if ratio == "sequence" and surrogate in ("clip", "sapo") else 1.0
    factors_T = torch.tensor([moved] * 3 + [1.0], dtype=torch.float64)
    torch.testing.assert_close(gradient_T, -advantages_T * factors_T / 4)


def test_no_token_and_an_unknown_loss():
    empty = torch.zeros(0, requires_grad=True)
    for ratio in ("token", "geometric"):
        out = policy_loss(empty, empty, empty, empty, Segments.of(torch.tensor([0, 0])), ratio=ratio)
        assert out.loss.item() == 0
        out.loss.backward()
    with refuses("'clap'", "clip, cispo, sapo, policy_gradient"):
        policy_loss(empty, empty, empty, empty, Segments.of(torch.tensor([0])), surrogate="clap")


def test_sums_of_responses_add_in_a_fixed_order():
    """No operator that adds by index, whose order on a GPU changes from run to run."""
    with Operators() as noted:
        log_ratios(RATIOS_T.log(), torch.zeros(4, dtype=torch.float64), RESPONSES, "geometric")
    assert "segment_reduce" in noted.names
    assert not [name for name in noted.names for part in ("index_add", "scatter", "put") if part in name]


LENGTHS_N = torch.tensor([3, 0, 1, 4])


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("token", {}, [1 / 8, 0, 1 / 8, 1 / 8]),
        ("sequence", {}, [1 / 9, 0, 1 / 3, 1 / 12]),
        ("constant", {"constant": 10}, [1 / 30, 0, 1 / 30, 1 / 30]),
        ("bnpo", {"block": 2}, [1 / 6, 0, 1 / 10, 1 / 10]),
        ("bnpo", {"block": 1}, [1 / 9, 0, 1 / 3, 1 / 12]),
        ("bnpo", {"block": 4}, [1 / 8, 0, 1 / 8, 1 / 8]),
    ],
)
def test_weights_by_hand(kind, options, expected):
    """Of 8 tokens in responses of 3, 0, 1 and 4, the empty one in no denominator. Blocks of two have 3 and 5 tokens."""
    weights_N = response_weights(LENGTHS_N, kind, **options)
    assert weights_N.tolist() == pytest.approx(expected)
    assert weights_N.dtype == torch.float64
    total = float((weights_N * LENGTHS_N).sum())
    assert total == pytest.approx(8 / 30 if kind == "constant" else 1.0)


def test_what_is_left_out_may_count_in_the_denominator():
    """The empty response is one of four; the mean over tokens knows no responses."""
    found = response_weights(LENGTHS_N, "sequence", count_left_out=True)
    assert found.tolist() == pytest.approx([1 / 12, 0, 1 / 4, 1 / 16])
    found = response_weights(LENGTHS_N, "constant", constant=10, count_left_out=True)
    assert found.tolist() == pytest.approx([1 / 40, 0, 1 / 40, 1 / 40])
    token = response_weights(LENGTHS_N, "token", count_left_out=True)
    assert token.tolist() == response_weights(LENGTHS_N, "token").tolist()


def test_weights_of_nothing_and_of_what_is_not_known():
    for kind in ("token", "sequence", "bnpo"):
        assert response_weights(torch.tensor([0, 0]), kind, block=1).tolist() == [0, 0]
    with refuses("'row'", "token, sequence, constant, bnpo"):
        response_weights(LENGTHS_N, "row")
    with refuses("constant", "1 or more", "None"):
        response_weights(LENGTHS_N, "constant")
    with refuses("block", "1 response or more", "None"):
        response_weights(LENGTHS_N, "bnpo")
