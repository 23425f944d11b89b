"""Losses against values worked out by hand, and the same loss and gradient however the batch is split.

Axes: B responses, T positions, N pairs. Padding holds 7, -9 and NaN throughout.
"""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from megarlhf.algo.losses import (
    centering,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_bonus,
    kl_penalty,
    pairwise_aligned_span,
    pairwise_last_token,
    token_nll,
    token_weights,
)

NAN = math.nan
MASK_BT = torch.tensor([[True, True, True], [True, False, False]])


def test_token_nll_by_hand():
    """(1 + 2 + 3 + 6) / 4 tokens."""
    logprobs_BT = torch.tensor([[-1.0, -2.0, -3.0], [-6.0, NAN, 7.0]], requires_grad=True)
    loss = token_nll(logprobs_BT, MASK_BT, denominator=4)
    assert loss.item() == 3.0
    loss.backward()
    torch.testing.assert_close(logprobs_BT.grad, torch.tensor([[-0.25] * 3, [-0.25, 0.0, 0.0]]))


def test_token_weights_sum_to_one():
    """4 tokens: 1/4 each; 2 sequences of 3 and 1 tokens: 1/6 and 1/2."""
    by_token_BT = token_weights(MASK_BT, "token", denominator=4)
    torch.testing.assert_close(by_token_BT, torch.tensor([[0.25] * 3, [0.25, 0.0, 0.0]]))
    by_sequence_BT = token_weights(MASK_BT, "sequence", denominator=2)
    torch.testing.assert_close(by_sequence_BT, torch.tensor([[1 / 6] * 3, [0.5, 0.0, 0.0]]))
    assert by_token_BT.sum().item() == pytest.approx(1.0) == by_sequence_BT.sum().item()
    with pytest.raises(ValueError, match=r"'row'.*token, sequence"):
        token_weights(MASK_BT, "row", denominator=1)  # type: ignore[arg-type]


RATIOS_BT = torch.tensor([[1.5, 0.5, 1.1], [0.5, NAN, 7.0]])
ADVANTAGES_BT = torch.tensor([[1.0, -1.0, 2.0], [3.0, NAN, -9.0]])


def test_clipped_policy_loss_by_hand():
    """clip .2 / .3. Tokens: -1.3 (clipped high), .8 (clipped low), -2.2, -1.5 (low, A > 0: not clipped)."""
    logprobs_BT = RATIOS_BT.log().requires_grad_()
    out = clipped_policy_loss(
        logprobs_BT,
        torch.zeros(2, 3),
        ADVANTAGES_BT,
        MASK_BT,
        clip_low=0.2,
        clip_high=0.3,
        denominator=4,
    )
    assert out.loss.item() == pytest.approx((-1.3 + 0.8 - 2.2 - 1.5) / 4)
    assert out.clipped.item() == 2
    assert out.ratio_sum.item() == pytest.approx(3.6)
    assert out.ratio_max.item() == pytest.approx(1.5)
    kl = (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5)) + (0.1 - math.log(1.1))
    assert out.kl_sum.item() == pytest.approx(kl)
    out.loss.backward()
    # d(-ratio A)/d logprob = -ratio A where not clipped, over 4.
    torch.testing.assert_close(logprobs_BT.grad, torch.tensor([[0.0, 0.0, -2.2], [-1.5, 0.0, 0.0]]) / 4)


def test_clipped_policy_loss_by_sequence():
    """Means of the rows (-1.3 + .8 - 2.2) / 3 = -.9 and -1.5, then of the two."""
    out = clipped_policy_loss(
        RATIOS_BT.log(),
        torch.zeros(2, 3),
        ADVANTAGES_BT,
        MASK_BT,
        clip_low=0.2,
        clip_high=0.3,
        denominator=2,
        aggregation="sequence",
    )
    assert out.loss.item() == pytest.approx(-1.2)


def test_policy_loss_with_a_wild_ratio_keeps_finite_gradients():
    """exp(200) is infinite in fp32: held at exp(20), no gradient, and no NaN from inf * 0."""
    logprobs_BT = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    out = clipped_policy_loss(
        logprobs_BT,
        torch.zeros(1, 3),
        torch.tensor([[1.0, 1.0, -1.0]]),
        torch.ones(1, 3).bool(),
        clip_low=0.2,
        clip_high=0.2,
        denominator=3,
    )
    assert out.clipped.item() == 2
    out.loss.backward()
    torch.testing.assert_close(logprobs_BT.grad, torch.tensor([[0.0, -1 / 3, 0.0]]))


def test_clipped_value_loss_by_hand():
    """Old 0, return 1, clip .5. V=2: 1 against .25 -> 1. V=1: 0 against .25 -> .25. V=.2: .64. V=-3: 16."""
    values_BT = torch.tensor([[2.0, 1.0, 0.2], [-3.0, NAN, 7.0]], requires_grad=True)
    old_values_BT = torch.tensor([[0.0, 0.0, 0.0], [0.0, -9.0, NAN]])
    returns_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 7.0, 7.0]])
    out = clipped_value_loss(values_BT, old_values_BT, returns_BT, MASK_BT, clip=0.5, denominator=4)
    assert out.loss.item() == pytest.approx(0.5 * (1 + 0.25 + 0.64 + 16) / 4)
    assert out.clipped.item() == 1
    out.loss.backward()
    torch.testing.assert_close(values_BT.grad, torch.tensor([[1.0, 0.0, -0.8], [-4.0, 0.0, 0.0]]) / 4)
    plain = clipped_value_loss(values_BT, old_values_BT, returns_BT, MASK_BT, clip=None, denominator=4)
    assert plain.loss.item() == pytest.approx(0.5 * (1 + 0 + 0.64 + 16) / 4)
    assert plain.clipped.item() == 0


def test_pairwise_last_token_by_hand():
    """Margins 0 and log 3: log 2 and log(4/3)."""
    loss = pairwise_last_token(torch.tensor([1.0, math.log(3)]), torch.tensor([1.0, 0.0]), denominator=torch.tensor(2))
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


def test_kl_penalty_and_entropy_by_hand():
    """log r = -1, 0, 2 and 1: k2 = .5, 0, 2 | .5. Entropies 1, 2, 3 | 4."""
    ref_logprobs_BT = torch.tensor([[-1.0, 0.0, 2.0], [1.0, 7.0, NAN]])
    logprobs_BT = torch.tensor([[0.0, 0.0, 0.0], [0.0, NAN, -9.0]], requires_grad=True)
    loss = kl_penalty(logprobs_BT, ref_logprobs_BT, MASK_BT, kind="k2", denominator=4)
    assert loss.item() == pytest.approx(3 / 4)
    loss.backward()
    torch.testing.assert_close(logprobs_BT.grad, torch.tensor([[1.0, 0.0, -2.0], [-1.0, 0.0, 0.0]]) / 4)
    by_sequence = kl_penalty(logprobs_BT, ref_logprobs_BT, MASK_BT, kind="k2", denominator=2, aggregation="sequence")
    assert by_sequence.item() == pytest.approx((2.5 / 3 + 0.5) / 2)
    entropy_BT = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, -9.0]])
    assert entropy_bonus(entropy_BT, MASK_BT, denominator=4).item() == 2.5
    assert entropy_bonus(entropy_BT, MASK_BT, denominator=2, aggregation="sequence").item() == 3.0


def _batch(num_rows=6, num_positions=5):
    generator = torch.Generator().manual_seed(0)
    x_KBT = torch.randn(4, num_rows, num_positions, generator=generator, dtype=torch.float64)
    lengths_B = torch.tensor([5, 1, 3, 2, 4, 1])
    mask_BT = torch.arange(num_positions)[None, :] < lengths_B[:, None]
    return x_KBT.masked_fill(~mask_BT, NAN), mask_BT, lengths_B


def _policy(x, rows, aggregation, denominator):
    x_KBT, mask_BT, _ = _batch()
    bounds = {"clip_low": 0.2, "clip_high": 0.3, "denominator": denominator, "aggregation": aggregation}
    return clipped_policy_loss(x[rows], x_KBT[1][rows], x_KBT[2][rows], mask_BT[rows], **bounds).loss


def _span(x, rows, denominator):
    x_KBT, _, lengths_B = _batch()
    tokens_BT = torch.arange(30).reshape(6, 5) % 3
    inputs = x, x_KBT[1].flip(0), tokens_BT, tokens_BT.flip(0), lengths_B, lengths_B.flip(0)
    return pairwise_aligned_span(*(value[rows] for value in inputs), denominator=denominator)


SPLIT_LOSSES = {
    "token_nll": lambda x, rows: token_nll(x[rows], _batch()[1][rows], denominator=16),
    "policy_by_token": lambda x, rows: _policy(x, rows, "token", 16),
    "policy_by_sequence": lambda x, rows: _policy(x, rows, "sequence", 6),
    "value": lambda x, rows: (
        clipped_value_loss(
            x[rows], _batch()[0][1][rows], _batch()[0][2][rows], _batch()[1][rows], clip=0.2, denominator=16
        ).loss
    ),
    "kl": lambda x, rows: kl_penalty(x[rows], _batch()[0][1][rows], _batch()[1][rows], kind="k3", denominator=16),
    "entropy": lambda x, rows: entropy_bonus(x[rows], _batch()[1][rows], denominator=16),
    "pairwise_last": lambda x, rows: pairwise_last_token(x[rows][:, 0], _batch()[0][1][rows][:, 0], denominator=6),
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
