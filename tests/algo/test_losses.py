"""Losses against values worked out by hand, and the same loss and gradient however the batch is split.

Axes: B responses, T positions, N pairs. Padding holds 7, -9 and NaN throughout.
"""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from megarlhf.algo.losses import centering, clipped_value_loss, pairwise_aligned_span, pairwise_ranking, token_nll

NAN = math.nan
MASK_BT = torch.tensor([[True, True, True], [True, False, False]])


def test_token_nll_by_hand():
    """(1 + 2 + 3 + 6) / 4 tokens."""
    logprobs_BT = torch.tensor([[-1.0, -2.0, -3.0], [-6.0, NAN, 7.0]], requires_grad=True)
    loss = token_nll(logprobs_BT, MASK_BT, denominator=4)
    assert loss.item() == 3.0
    loss.backward()
    torch.testing.assert_close(logprobs_BT.grad, torch.tensor([[-0.25] * 3, [-0.25, 0.0, 0.0]]))


def test_clipped_value_loss_by_hand():
    """Old 0, return 1, clip .5. V=2: 1 against .25 -> 1. V=1: 0 against .25 -> .25. V=.2: .64. V=-3: 16."""
    values_T = torch.tensor([2.0, 1.0, 0.2, -3.0], requires_grad=True)
    old_values_T, returns_T, weights_T = torch.zeros(4), torch.ones(4), torch.full((4,), 0.25)
    out = clipped_value_loss(values_T, old_values_T, returns_T, weights_T, clip=0.5)
    assert out.loss.item() == pytest.approx(0.5 * (1 + 0.25 + 0.64 + 16) / 4)
    assert out.clipped.item() == 1
    out.loss.backward()
    torch.testing.assert_close(values_T.grad, torch.tensor([1.0, 0.0, -0.8, -4.0]) / 4)
    plain = clipped_value_loss(values_T, old_values_T, returns_T, weights_T, clip=None)
    assert plain.loss.item() == pytest.approx(0.5 * (1 + 0 + 0.64 + 16) / 4)
    assert plain.clipped.item() == 0
    some = clipped_value_loss(values_T, old_values_T, returns_T, torch.tensor([0.5, 0.0, 0.5, 0.0]), clip=0.5)
    assert some.loss.item() == pytest.approx(0.5 * (1 + 0.64) / 2), "by the weights"


def test_pairwise_ranking_by_hand():
    """Margins 0 and log 3: log 2 and log(4/3)."""
    loss = pairwise_ranking(torch.tensor([1.0, math.log(3)]), torch.tensor([1.0, 0.0]), denominator=torch.tensor(2))
    assert loss.item() == pytest.approx((math.log(2) + math.log(4 / 3)) / 2)


def _nls(margin):
    return -logsigmoid(torch.tensor(margin, dtype=torch.float64)).item()


def _span_inputs():
    """Three pairs; their losses worked out:

    0: part at position 1, lengths 4 and 3. Positions 1, 2, and 3 with the rejected's score at 2 held:
       margins 2-1, 3-0, 5-0
    1: the chosen (length 2) is a prefix of the rejected (length 4): positions 2, 3 with its score at 1 held:
       margins 1-3, 1-4
    2: equal texts of length 2: their last token, margin 0
    """
    chosen_tokens_BT = torch.tensor([[5, 6, 7, 8], [5, 6, -9, -9], [5, 6, 0, 0]])
    rejected_tokens_BT = torch.tensor([[5, 9, 7, -9], [5, 6, 7, 8], [5, 6, 1, 1]])
    chosen_BT = torch.tensor([[9.0, 2.0, 3.0, 5.0], [0.0, 1.0, NAN, 7.0], [1.0, 2.0, NAN, NAN]])
    rejected_BT = torch.tensor([[0.0, 1.0, 0.0, NAN], [0.0, 2.0, 3.0, 4.0], [1.0, 2.0, 7.0, -9.0]])
    lengths = torch.tensor([4, 2, 2]), torch.tensor([3, 4, 2])
    return chosen_BT, rejected_BT, chosen_tokens_BT, rejected_tokens_BT, *lengths


def test_pairwise_aligned_span_by_hand():
    chosen_BT, rejected_BT, *rest = _span_inputs()
    chosen_BT.requires_grad_()
    loss = pairwise_aligned_span(chosen_BT, rejected_BT, *rest, denominator=3)
    expected = (_nls(1.0) + _nls(3.0) + _nls(5.0)) / 3 + (_nls(-2.0) + _nls(-3.0)) / 2 + math.log(2)
    assert loss.item() == pytest.approx(expected / 3)
    loss.backward()
    reached_BT = [[False, True, True, True], [False, True, False, False], [False, True, False, False]]
    assert (chosen_BT.grad != 0).tolist() == reached_BT


def test_pairwise_aligned_span_does_not_depend_on_padding():
    """Other tokens and scores on padding, and a rejected side padded two positions further."""
    inputs = _span_inputs()
    before = pairwise_aligned_span(*inputs, denominator=3)
    chosen_BT, rejected_BT, chosen_tokens_BT, rejected_tokens_BT, chosen_lengths_B, rejected_lengths_B = inputs
    chosen_tokens_BT[1, 2:] = torch.tensor([7, 8])
    chosen_BT[1, 2:] = 1e6
    rejected_tokens_BT = torch.cat([rejected_tokens_BT, torch.full((3, 2), 6)], dim=1)
    rejected_BT = torch.cat([rejected_BT, torch.full((3, 2), NAN)], dim=1)
    lengths = chosen_lengths_B, rejected_lengths_B
    after = pairwise_aligned_span(chosen_BT, rejected_BT, chosen_tokens_BT, rejected_tokens_BT, *lengths, denominator=3)
    assert after.item() == before.item()


def _batch(num_rows=6, num_positions=5):
    generator = torch.Generator().manual_seed(0)
    x_KBT = torch.randn(4, num_rows, num_positions, generator=generator, dtype=torch.float64)
    lengths_B = torch.tensor([5, 1, 3, 2, 4, 1])
    mask_BT = torch.arange(num_positions)[None, :] < lengths_B[:, None]
    return x_KBT.masked_fill(~mask_BT, NAN), mask_BT, lengths_B


def _span(x, rows, denominator):
    x_KBT, _, lengths_B = _batch()
    tokens_BT = torch.arange(30).reshape(6, 5) % 3
    inputs = x, x_KBT[1].flip(0), tokens_BT, tokens_BT.flip(0), lengths_B, lengths_B.flip(0)
    return pairwise_aligned_span(*(value[rows] for value in inputs), denominator=denominator)


SPLIT_LOSSES = {
    "token_nll": lambda x, rows: token_nll(x[rows], _batch()[1][rows], denominator=16),
    "pairwise_last": lambda x, rows: pairwise_ranking(x[rows][:, 0], _batch()[0][1][rows][:, 0], denominator=6),
    "pairwise_span": lambda x, rows: _span(x, rows, 6),
}
SPLITS = ([range(6)], [range(2), range(2, 6)], [[5, 0], [3], [1, 4, 2]], [[b] for b in range(6)])


@pytest.mark.parametrize("name", SPLIT_LOSSES)
def test_any_split_gives_the_same_loss_and_gradient(name):
    """Micro-batches of unequal rows and tokens, in any order. Not covered: splits within a row."""
    results = []
    for split in SPLITS:
        x_BT = _batch()[0][0].clone().requires_grad_()
        losses = [SPLIT_LOSSES[name](x_BT, list(rows)) for rows in split]
        torch.stack(losses).sum().backward()
        results.append((sum(loss.item() for loss in losses), x_BT.grad))
    whole_loss, whole_grad_BT = results[0]
    assert whole_loss != 0
    assert whole_grad_BT.isfinite().all()
    assert whole_grad_BT.abs().sum() > 0
    for loss, grad_BT in results[1:]:
        assert loss == pytest.approx(whole_loss, rel=1e-12)
        torch.testing.assert_close(grad_BT, whole_grad_BT, rtol=1e-12, atol=0)


def test_centering_by_hand() -> None:
    """(1 + 2)^2 + (0.5 - 1.5)^2 = 10 over 4 pairs of the mini-batch."""
    loss = centering(torch.tensor([1.0, 0.5]), torch.tensor([2.0, -1.5]), denominator=4)
    torch.testing.assert_close(loss, torch.tensor(2.5))
