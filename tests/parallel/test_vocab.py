"""Log-probs of next tokens and chosen logits from hidden states, on one rank and on two.

Not covered: the kernels at large (tests/kernels), Megatron's modules (tests/distributed).
"""

import pytest
import torch
import torch.distributed as dist

from megarlhf.kernels.linear_logprob import add_rows_, add_sorted_rows_
from megarlhf.parallel.vocab import Vocabulary, logits_at, next_token_logprobs
from tests.refuses import refuses

B, S, H, PADDED, TRUE = 3, 4, 8, 12, 11


def problem():
    """Hidden states, matrix, tokens and mask of the whole, fp64; the rows have masks of different lengths."""
    generator = torch.Generator().manual_seed(3)
    hidden_SBH = torch.randn(S, B, H, dtype=torch.float64, generator=generator)
    weight_VH = torch.randn(PADDED, H, dtype=torch.float64, generator=generator)
    tokens_BS = torch.randint(TRUE, (B, S), generator=generator)
    mask_BS = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    return hidden_SBH, weight_VH, tokens_BS, mask_BS


def by_hand(hidden_SBH, weight_VH, tokens_BS, mask_BS, temperature):
    """One position at a time."""
    logprobs_BS, entropy_BS = torch.zeros(B, S, dtype=torch.float64), torch.zeros(B, S, dtype=torch.float64)
    for row, position in mask_BS.nonzero().tolist():
        logits_V = weight_VH[:TRUE] @ hidden_SBH[position - 1, row] / temperature
        logprob_V = logits_V.log_softmax(0)
        logprobs_BS[row, position] = logprob_V[tokens_BS[row, position]]
        entropy_BS[row, position] = -(logprob_V.exp() * logprob_V).sum()
    return logprobs_BS, entropy_BS


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_each_masked_token_is_predicted_by_the_one_before_it(backend):
    hidden_SBH, weight_VH, tokens_BS, mask_BS = problem()
    vocabulary = Vocabulary(weight_VH, TRUE, None, backend=backend)
    actual = next_token_logprobs(vocabulary, hidden_SBH, tokens_BS, mask_BS, temperature=0.7)
    expected = by_hand(hidden_SBH, weight_VH, tokens_BS, mask_BS, 0.7)
    assert int((expected[0] != 0).sum()) == 3
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    alone, nothing = next_token_logprobs(
        vocabulary, hidden_SBH, tokens_BS, mask_BS, temperature=0.7, return_entropy=False
    )
    torch.testing.assert_close(alone, expected[0], rtol=1e-12, atol=1e-12)
    assert not nothing.any()


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_one_position_predicts_several_tokens(backend):
    """Its hidden state is looked up for each, and gets the sum of their gradients."""
    hidden_SBH, weight_VH, tokens_BS, _ = problem()
    tokens_BS, mask_BS = tokens_BS.flatten()[None, :6], torch.tensor([[False, False, True, True, False, True]])
    predictors_S, places = torch.tensor([0, 0, 1, 1, 0, 3]), [2, 3, 5]
    hidden_S1H = hidden_SBH.flatten(0, 1)[:6, None].requires_grad_()
    vocabulary = Vocabulary(weight_VH.requires_grad_(), TRUE, None, backend=backend)
    logprobs_1S, entropy_1S = next_token_logprobs(vocabulary, hidden_S1H, tokens_BS, mask_BS, predictors_S=predictors_S)
    factors = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    (logprobs_1S[0, places] @ factors + (entropy_1S[0, places] * factors).sum()).backward()
    found = [each.grad.clone() for each in (hidden_S1H, weight_VH)]
    hidden_S1H.grad = weight_VH.grad = None
    all_KV = (hidden_S1H[predictors_S[places], 0] @ weight_VH[:TRUE].t()).log_softmax(-1)
    expected_K = all_KV[range(3), tokens_BS[0, places]]
    (expected_K @ factors - ((all_KV.exp() * all_KV).sum(-1) * factors).sum()).backward()
    torch.testing.assert_close(logprobs_1S[0, places], expected_K, rtol=1e-12, atol=1e-12)
    assert not logprobs_1S[0, [0, 1, 4]].any()
    for ours, grad in zip(found, (hidden_S1H.grad, weight_VH.grad), strict=True):
        torch.testing.assert_close(ours, grad, rtol=1e-12, atol=1e-12)


def test_what_a_gpu_adds_up_is_the_same():
    """Its own way, which a CPU takes too; in the order of the labels."""
    rows_K, some_KH = torch.tensor([3, 0, 3, 5, 0, 3]), torch.randn(6, 4)
    expected = torch.zeros(6, 4)
    for row, each_H in zip(rows_K.tolist(), some_KH, strict=True):
        expected[row] += each_H
    for add in (add_rows_, add_sorted_rows_):
        assert torch.equal(add(torch.zeros(6, 4), rows_K, some_KH), expected)


def test_logits_of_chosen_positions():
    """In any order, twice too; padding is cut off."""
    hidden_SBH, weight_VH, _, _ = problem()
    logits = logits_at(Vocabulary(weight_VH, TRUE, None), hidden_SBH, torch.tensor([2, 0, 2]), torch.tensor([1, 3, 1]))
    expected = torch.stack([weight_VH[:TRUE] @ hidden_SBH[s, b] for b, s in ((2, 1), (0, 3), (2, 1))])
    torch.testing.assert_close(logits, expected)


def test_a_stage_without_outputs_has_no_matrix():
    with refuses("last pipeline stage", error=AssertionError):
        Vocabulary(None, TRUE, None).weight()


def two_ranks(runtime, sequence_parallel, backend):
    """This rank's log-probs, entropy, logits at all positions, and gradients of its hidden states and its matrix."""
    hidden_SBH, weight_VH, tokens_BS, mask_BS = problem()
    if sequence_parallel:
        hidden_SBH = hidden_SBH.chunk(2)[runtime.rank].clone()
    hidden_SBH.requires_grad_()
    weight_VH = weight_VH.chunk(2)[runtime.rank].clone().requires_grad_()
    vocabulary = Vocabulary(weight_VH, TRUE, dist.group.WORLD, sequence_parallel, backend)
    logprobs_BS, entropy_BS = next_token_logprobs(vocabulary, hidden_SBH, tokens_BS, mask_BS, temperature=0.7)
    (logprobs_BS.sum() + 2 * entropy_BS.sum()).backward()
    rows_K, positions_K = torch.arange(B).repeat_interleave(S), torch.arange(S).repeat(B)
    logits_KV = logits_at(vocabulary, hidden_SBH, rows_K, positions_K)
    tensors = (logprobs_BS, entropy_BS, logits_KV, hidden_SBH.grad, weight_VH.grad)
    return [tensor.detach().numpy() for tensor in tensors]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_two_ranks_are_one(backend, sequence_parallel, ranks):
    """Results are the same bits on both ranks; under sequence parallelism a rank has the gradient of its positions."""
    first, second = ranks.run(2, two_ranks, sequence_parallel, backend)
    for ours, theirs in zip(first[:3], second[:3], strict=True):
        assert ours.tobytes() == theirs.tobytes()
    hidden_SBH, weight_VH, tokens_BS, mask_BS = problem()
    hidden_SBH.requires_grad_()
    weight_VH.requires_grad_()
    logprobs_BS, entropy_BS = by_hand(hidden_SBH, weight_VH, tokens_BS, mask_BS, 0.7)
    (logprobs_BS.sum() + 2 * entropy_BS.sum()).backward()
    logits_BSV = (hidden_SBH @ weight_VH[:TRUE].t()).transpose(0, 1)
    whole = [logprobs_BS, entropy_BS, logits_BSV.reshape(B * S, TRUE)]
    parts = [torch.from_numpy(part) for part in first]
    others = [torch.from_numpy(part) for part in second]
    torch.testing.assert_close(parts[:3], [tensor.detach() for tensor in whole], rtol=1e-12, atol=1e-12)
    hidden = torch.cat([parts[3], others[3]]) if sequence_parallel else parts[3]
    torch.testing.assert_close(hidden, hidden_SBH.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([parts[4], others[4]]), weight_VH.grad, rtol=1e-12, atol=1e-12)
