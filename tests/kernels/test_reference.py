"""`token_logprobs` against torch's log_softmax in fp64: values, both gradients, and over a sharded vocabulary.

Not covered: GPUs, bf16 logits, gradients of gradients, rows whose logits are all -inf (there is no distribution).
"""

import pytest
import torch
import torch.distributed as dist

from megarlhf.kernels import token_logprobs
from tests.gloo import run_ranks

IGNORE = -100
FACTOR = 4.0
"""Largest error against fp64 truth that is allowed, in units of torch's own fp32 log_softmax's largest error."""


def truth(logits_TV, labels_T, *, temperature=1.0, true_vocab=None):
    """(log-probs, entropy) by log_softmax in the dtype given; ignored rows 0."""
    z_TV = logits_TV[:, :true_vocab] / temperature
    log_TV = torch.log_softmax(z_TV, -1)
    kept_T = labels_T != IGNORE
    found_T = log_TV.gather(1, labels_T.clamp(min=0)[:, None])[:, 0]
    terms_TV = torch.where(log_TV.isfinite(), log_TV.exp() * log_TV.clamp(min=-1e30), 0.0)
    return torch.where(kept_T, found_T, 0.0), torch.where(kept_T, -terms_TV.sum(-1), 0.0)


def made(num_tokens, vocab, seed=0, *, scale=3.0, true_vocab=None):
    """fp32 logits, labels with one ignored row, and an upstream gradient for each output."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = scale * torch.randn(num_tokens, vocab, generator=generator)
    labels_T = torch.randint(0, true_vocab or vocab, (num_tokens,), generator=generator)
    labels_T[num_tokens // 2 :: 7] = IGNORE
    return logits_TV, labels_T, torch.randn(2, num_tokens, generator=generator)


def run(function, logits_TV, labels_T, weights_2T, **options):
    """Both outputs, and the logits' gradient of each output alone and of both together."""
    leaf_TV = logits_TV.clone().requires_grad_()
    outputs = function(leaf_TV, labels_T, **options)
    weights_2T = weights_2T.to(logits_TV.dtype)
    grads = []
    for one, other in ((1, 0), (0, 1), (1, 1)):
        total = (one * weights_2T[0] * outputs[0] + other * weights_2T[1] * outputs[1]).sum()
        grads.append(torch.autograd.grad(total, leaf_TV, retain_graph=True)[0])
    return [output.detach() for output in outputs] + grads


NAMES = ("logprob", "entropy", "gradient by logprob", "gradient by entropy", "gradient by both")


def assert_near_truth(logits_TV, labels_T, weights_2T, **options):
    """No worse than FACTOR times torch in fp32, whose least error is taken as a few roundings of the values."""
    expected = run(truth, logits_TV.double(), labels_T, weights_2T, **options)
    theirs = run(truth, logits_TV, labels_T, weights_2T, **options)
    ours = run(token_logprobs, logits_TV, labels_T, weights_2T, **options)
    for name, want, their, our in zip(NAMES, expected, theirs, ours, strict=True):
        assert our.dtype == torch.float32
        error, allowed = float((our - want).abs().max()), float((their - want).abs().max())
        rounding = 4e-7 * max(float(want.abs().max()), 1e-3)
        assert error <= FACTOR * max(allowed, rounding), f"{name}: error {error:.3g}, torch's {allowed:.3g}"


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("vocab, true_vocab", [(517, None), (1100, None), (517, 500), (1100, 1025)])
def test_values_and_gradients_against_fp64(vocab, true_vocab, temperature):
    logits_TV, labels_T, weights_2T = made(29, vocab, true_vocab=true_vocab)
    assert (labels_T == IGNORE).any()
    assert_near_truth(logits_TV, labels_T, weights_2T, temperature=temperature, true_vocab=true_vocab)


@pytest.mark.parametrize("offset", [-1e4, -120.0, 1e4])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rows_far_from_zero(offset, temperature):
    """e^-120 underflows and e^10000 overflows in fp32: only differences may be exponentiated."""
    logits_TV, labels_T, weights_2T = made(13, 517, seed=1)
    assert_near_truth(logits_TV + offset, labels_T, weights_2T, temperature=temperature)


def test_unlikely_labels_keep_their_digits():
    """A label 120 nats below the likeliest: e^-120 is 0 in fp32, its log-prob is not -inf."""
    logits_TV = torch.zeros(3, 517)
    logits_TV[:, 5] = torch.tensor([120.0, 60.0, 30.0])
    found_T, _ = token_logprobs(logits_TV, torch.tensor([9, 9, 9]))
    expected_T = torch.log_softmax(logits_TV.double(), -1)[:, 9]
    torch.testing.assert_close(found_T.double(), expected_T, rtol=1e-7, atol=0)


def test_padding_columns_are_neither_read_nor_given_a_gradient():
    """Columns from `true_vocab` on may hold anything, NaN too."""
    logits_TV, labels_T, weights_2T = made(11, 517, true_vocab=500)
    spoilt_TV = logits_TV.clone()
    spoilt_TV[:, 500:] = torch.tensor([float("nan"), 1e30, float("inf")] * 5 + [float("nan")] * 2)
    clean = run(token_logprobs, logits_TV, labels_T, weights_2T, true_vocab=500)
    spoilt = run(token_logprobs, spoilt_TV, labels_T, weights_2T, true_vocab=500)
    for name, ours, other in zip(NAMES, clean, spoilt, strict=True):
        assert torch.equal(ours, other), name
    assert torch.count_nonzero(clean[-1][:, 500:]) == 0
    assert torch.count_nonzero(clean[-1][:, :500]) > 0


def test_masked_logits_give_finite_entropy_and_gradients():
    """Real -inf logits: probability 0 contributes 0 to the entropy, and 0 x inf is not NaN."""
    logits_TV, labels_T, weights_2T = made(11, 517)
    logits_TV[:, 100:300] = -torch.inf
    labels_T[labels_T > 0] %= 100
    found = run(token_logprobs, logits_TV, labels_T, weights_2T, temperature=0.7)
    kept_TV = torch.cat([logits_TV[:, :100], logits_TV[:, 300:]], 1)
    expected = run(truth, kept_TV.double(), labels_T, weights_2T, temperature=0.7)
    for name, ours, want in zip(NAMES, found, expected, strict=True):
        assert ours.isfinite().all(), name
        if ours.ndim == 2:
            assert torch.count_nonzero(ours[:, 100:300]) == 0, name
            ours = torch.cat([ours[:, :100], ours[:, 300:]], 1)
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


def test_a_label_of_probability_zero_is_minus_infinity_and_the_rest_stays_finite():
    logits_TV = torch.zeros(1, 8)
    logits_TV[0, 3:] = -torch.inf
    logprobs_T, entropy_T = token_logprobs(logits_TV, torch.tensor([5]))
    assert logprobs_T.tolist() == [-float("inf")]
    torch.testing.assert_close(entropy_T, torch.tensor([3.0]).log())


def test_ignored_rows_are_zero_without_gradient():
    logits_TV, _, weights_2T = made(5, 64)
    labels_T = torch.tensor([IGNORE, 3, IGNORE, 63, IGNORE])
    logprobs_T, entropy_T, *grads = run(token_logprobs, logits_TV, labels_T, weights_2T)
    ignored_T = labels_T == IGNORE
    assert logprobs_T[ignored_T].tolist() == entropy_T[ignored_T].tolist() == [0, 0, 0]
    assert (logprobs_T[~ignored_T] < 0).all()
    assert (entropy_T[~ignored_T] > 0).all()
    for grad_TV in grads:
        assert torch.count_nonzero(grad_TV[ignored_T]) == 0
        assert torch.count_nonzero(grad_TV[~ignored_T]) == 2 * 64


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_none_and_one_token(num_tokens):
    logits_TV = torch.arange(3.0).repeat(num_tokens, 1)
    labels_T = torch.full((num_tokens,), 1)
    logprobs_T, entropy_T, *grads = run(token_logprobs, logits_TV, labels_T, torch.ones(2, num_tokens))
    # log softmax of (0, 1, 2) at 1; its entropy.
    assert logprobs_T.tolist() == pytest.approx([-1.4076059644443804] * num_tokens)
    assert entropy_T.tolist() == pytest.approx([0.8323955] * num_tokens)
    assert [grad_TV.shape for grad_TV in grads] == [(num_tokens, 3)] * 3


def test_gradcheck_through_both_outputs():
    generator = torch.Generator().manual_seed(3)
    logits_TV = torch.randn(5, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    labels_T = torch.tensor([0, 8, IGNORE, 3, 5])

    def both(logits_TV):
        return token_logprobs(logits_TV, labels_T, temperature=0.7, true_vocab=9)

    assert [output.dtype for output in both(logits_TV)] == [torch.float64] * 2
    assert torch.autograd.gradcheck(both, (logits_TV,), eps=1e-6, atol=1e-8)


def test_entropy_that_nobody_asked_for_is_zero():
    logits_TV, labels_T, _ = made(4, 16)
    logprobs_T, entropy_T = token_logprobs(logits_TV, labels_T, return_entropy=False)
    assert torch.equal(logprobs_T, token_logprobs(logits_TV, labels_T)[0])
    assert entropy_T.tolist() == [0] * 4


@pytest.mark.parametrize("label, true_vocab", [(16, None), (12, 12), (-1, None), (-99, 12)])
def test_a_label_outside_the_vocabulary_is_refused(label, true_vocab):
    labels_T = torch.tensor([3, IGNORE, label])
    with pytest.raises(ValueError, match=rf"label {label} at token 2 .*\[0, {true_vocab or 16}\).*ignore_index"):
        token_logprobs(torch.zeros(3, 16), labels_T, true_vocab=true_vocab)


SHARDED = [
    # vocabulary, true vocabulary, temperature, offset; the last: at tp 4 rank 3 holds padding only.
    (516, 513, 1.0, 0.0),
    (1100, 1100, 0.7, 1e4),
    (1024, 700, 2.0, -120.0),
]


def sharded(rank, tp):
    """This rank's columns of every case: outputs and gradients."""
    results = []
    for vocab, true_vocab, temperature, offset in SHARDED:
        logits_TV, labels_T, weights_2T = made(17, vocab, true_vocab=true_vocab)
        shard_TV = (logits_TV + offset).chunk(tp, 1)[rank]
        options = {"temperature": temperature, "true_vocab": true_vocab, "group": dist.group.WORLD}
        results.append([tensor.numpy() for tensor in run(token_logprobs, shard_TV, labels_T, weights_2T, **options)])
    return results


@pytest.mark.parametrize("tp", [2, 4])
def test_a_sharded_vocabulary_gives_the_single_process_result_and_the_same_bits_everywhere(tp, tmp_path):
    ranks = run_ranks(tp, tmp_path, sharded, tp)
    assert any(true_vocab <= vocab // 4 * 3 for vocab, true_vocab, _, _ in SHARDED), "no rank holds padding only"
    for case, (vocab, true_vocab, temperature, offset) in enumerate(SHARDED):
        logits_TV, labels_T, weights_2T = made(17, vocab, true_vocab=true_vocab)
        options = {"temperature": temperature, "true_vocab": true_vocab}
        single = run(token_logprobs, logits_TV + offset, labels_T, weights_2T, **options)
        parts = [[torch.from_numpy(array) for array in ranks[rank][case]] for rank in range(tp)]
        for index in (0, 1):
            assert all(torch.equal(part[index], parts[0][index]) for part in parts), NAMES[index]
            torch.testing.assert_close(parts[0][index], single[index], rtol=1e-6, atol=1e-6)
        for index in range(2, 5):
            joined_TV = torch.cat([part[index] for part in parts], 1)
            assert joined_TV.shape == single[index].shape
            torch.testing.assert_close(joined_TV, single[index], rtol=1e-6, atol=1e-6)
