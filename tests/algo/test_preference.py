"""The losses on preference pairs against numbers worked out by hand.

log-odds of ln 3 are a sigmoid of 3/4: -log of it is ln(4/3) = .287682. Not covered: against other projects
(tests/peers); how log-probs are made (tests/distributed/test_dpo_layouts.py).
"""

import math

import pytest
import torch

from megarlhf.algo import preference

LN3, LN43 = math.log(3.0), math.log(4.0 / 3.0)


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


def test_dpo_by_hand():
    """beta = .5: margins of 2 ln 3 and 0 are rewards of ln 3 and 0. Gradient: -beta (1 - sigmoid)."""
    margin_P = row(2 * LN3, 0.0)
    loss_P = preference.dpo(margin_P, beta=0.5)
    assert loss_P.tolist() == pytest.approx([0.287682072, 0.693147181])
    (gradient_P,) = torch.autograd.grad(loss_P.sum(), margin_P)
    assert gradient_P.tolist() == pytest.approx([-0.125, -0.25])


def test_smoothed_dpo_by_hand():
    """A quarter of the labels is wrong: 3/4 ln(4/3) + 1/4 ln 4 = .215762 + .346574. At sigmoid = 3/4 = 1 - eps the
    loss is at its minimum."""
    margin_P = row(2 * LN3)
    loss_P = preference.dpo(margin_P, beta=0.5, label_smoothing=0.25)
    assert loss_P.tolist() == pytest.approx([0.562335145])
    (gradient_P,) = torch.autograd.grad(loss_P.sum(), margin_P)
    assert gradient_P.tolist() == pytest.approx([0.0], abs=1e-12)


def test_ipo_by_hand():
    """1 / (2 x .25) = 2: margins of 3 and 2 are 1 and 0 away; the slope at 3 is 2."""
    margin_P = row(3.0, 2.0)
    loss_P = preference.ipo(margin_P, beta=0.25)
    assert loss_P.tolist() == [1.0, 0.0]
    assert torch.autograd.grad(loss_P.sum(), margin_P)[0].tolist() == [2.0, 0.0]


def test_simpo_by_hand():
    """beta = 2: (2 x (-1 + 2)) - (2 - ln 3) = ln 3; smoothed as dpo."""
    chosen_P, rejected_P = row(-1.0), row(-2.0)
    options = {"beta": 2.0, "margin": 2.0 - LN3}
    assert preference.simpo(chosen_P, rejected_P, **options).tolist() == pytest.approx([LN43])
    smoothed_P = preference.simpo(chosen_P, rejected_P, label_smoothing=0.25, **options)
    assert smoothed_P.tolist() == pytest.approx([0.562335145])


def test_orpo_by_hand():
    """p = 3/4 and 1/2 are odds of 3 and 1; of equal responses the loss is ln 2. Of odds: d log odds / d log p =
    1 / (1 - p) = 4 and 2, times 1 - 3/4."""
    chosen_P, rejected_P = row(math.log(0.75), math.log(0.5)), row(math.log(0.5), math.log(0.5))
    loss_P = preference.orpo(chosen_P, rejected_P)
    assert loss_P.tolist() == pytest.approx([LN43, 0.693147181])
    gradients = torch.autograd.grad(loss_P[0], (chosen_P, rejected_P))
    assert [gradient[0].item() for gradient in gradients] == pytest.approx([-1.0, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_response_that_is_certain_has_finite_odds(dtype):
    chosen_P = torch.zeros(1, dtype=dtype, requires_grad=True)
    rejected_P = torch.full((1,), -40.0, dtype=dtype, requires_grad=True)
    for pair in ((chosen_P, rejected_P), (rejected_P, chosen_P)):
        loss = preference.orpo(*pair).sum()
        gradients = torch.autograd.grad(loss, pair)
        assert math.isfinite(loss.item())
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_kto_by_hand():
    """beta = 2, z = 1: a gain of ln 3 / 2 above z loses 1 - 3/4 and a loss at z 1/2; with weights 2 and 1 the pair
    has 1/2 (.5 + .5). Gradient: -1/2 x 2 x beta x 3/16 and 1/2 x beta x 1/4."""
    chosen_P, rejected_P = row(1.0 + LN3 / 2), row(1.0)
    loss_P = preference.kto(chosen_P, rejected_P, beta=2.0, point=1.0, desirable_weight=2.0, undesirable_weight=1.0)
    assert loss_P.tolist() == pytest.approx([0.5])
    gradients = torch.autograd.grad(loss_P.sum(), (chosen_P, rejected_P))
    assert [gradient.item() for gradient in gradients] == pytest.approx([-0.375, 0.25])


def test_the_point_of_kto_is_never_below_zero():
    assert preference.kl_point(torch.tensor([-1.0, 2.0, 5.0])).item() == 2.0
    assert preference.kl_point(torch.tensor([-3.0, 1.0])).item() == 0.0
    assert not preference.kl_point(row(1.0)).requires_grad
