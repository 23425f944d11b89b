"""`token_logprobs` of every backend against torch's log_softmax in fp64: values, both gradients, and odd inputs.

Not covered: gradients of gradients, rows whose logits are all -inf (there is no distribution). Several ranks:
test_sharded.py. Memory: test_memory.py.
"""

import pytest
import torch

from megarlhf.kernels import backends, token_logprobs
from tests.kernels.cases import (
    BACKENDS,
    IGNORE,
    OUTPUTS,
    assert_near_truth,
    assert_same_bits,
    device_of,
    far_apart,
    made,
    run,
    run_backend,
    truth,
)
from tests.refuses import refuses

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("vocab, true_vocab", [(517, None), (1100, None), (517, 500), (1100, 1025)])
def test_values_and_gradients_against_fp64(backend, vocab, true_vocab, temperature):
    inputs = made(29, vocab, true_vocab=true_vocab)
    assert (inputs[1] == IGNORE).any()
    assert_near_truth(backend, *inputs, temperature=temperature, true_vocab=true_vocab)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_half_precision_is_no_worse_than_the_specification(backend, dtype, temperature):
    logits_TV, *targets = made(29, 1100, true_vocab=1025)
    assert_near_truth(backend, logits_TV.to(dtype), *targets, temperature=temperature, true_vocab=1025)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_peaked_logits(backend, temperature):
    """The likeliest token has nearly all of the probability, or shares it with one other."""
    inputs = made(29, 1100, scale=30.0)
    peak_T = (inputs[0] / temperature).softmax(-1).amax(-1)
    assert (peak_T > 0.99).sum() >= 10
    assert_near_truth(backend, *inputs, temperature=temperature)


@pytest.mark.parametrize("offset", [-1e4, -120.0, 1e4])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rows_far_from_zero(backend, offset, temperature):
    """e^-120 underflows and e^10000 overflows in fp32: only differences may be exponentiated."""
    logits_TV, *targets = made(13, 517, seed=1)
    assert_near_truth(backend, logits_TV + offset, *targets, temperature=temperature)


def test_unlikely_labels_keep_their_digits(backend):
    """A label 120 nats below the likeliest: e^-120 is 0 in fp32, its log-prob is not -inf."""
    logits_TV = torch.zeros(3, 517)
    logits_TV[:, 5] = torch.tensor([120.0, 60.0, 30.0])
    results = run_backend(backend, logits_TV, torch.tensor([9, 9, 9]), torch.ones(2, 3))
    expected_T = torch.log_softmax(logits_TV.double(), -1)[:, 9]
    torch.testing.assert_close(results["logprob"].double(), expected_T, rtol=2e-7, atol=0)


def test_padding_columns_are_neither_read_nor_given_a_gradient(backend):
    """Columns from `true_vocab` on may hold anything, NaN too."""
    logits_TV, *targets = made(11, 517, true_vocab=500)
    spoilt_TV = logits_TV.clone()
    spoilt_TV[:, 500:] = torch.tensor([float("nan"), 1e30, float("inf")] * 5 + [float("nan")] * 2)
    clean = run_backend(backend, logits_TV, *targets, true_vocab=500)
    assert_same_bits(clean, run_backend(backend, spoilt_TV, *targets, true_vocab=500))
    gradient_TV = clean["gradient 0 by both"]
    assert torch.count_nonzero(gradient_TV[:, 500:]) == 0
    assert torch.count_nonzero(gradient_TV[:, :500]) > 0


@pytest.mark.parametrize("masked", [slice(100, 300), slice(0, 400)])
def test_masked_logits_give_finite_entropy_and_gradients(backend, masked):
    """Real -inf logits, also as a row's first: probability 0 adds 0 to the entropy, and 0 x inf is not NaN."""
    logits_TV, labels_T, weights_2T = made(11, 517)
    kept_V = torch.ones(517, dtype=torch.bool)
    kept_V[masked] = False
    places_N = kept_V.nonzero()[:, 0]
    shrunk_T = torch.where(labels_T == IGNORE, IGNORE, labels_T % len(places_N))
    labels_T = torch.where(labels_T == IGNORE, IGNORE, places_N[shrunk_T.clamp(min=0)])
    logits_TV[:, ~kept_V] = -torch.inf
    results = run_backend(backend, logits_TV, labels_T, weights_2T, temperature=0.7)
    expected = run(truth, logits_TV[:, kept_V].double(), shrunk_T, weights_2T, temperature=0.7)
    for name, ours in results.items():
        assert ours.isfinite().all(), name
        if ours.ndim == 2:
            assert torch.count_nonzero(ours[:, ~kept_V]) == 0, name
            ours = ours[:, kept_V]
        torch.testing.assert_close(ours.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e36, -torch.inf])
def test_whole_blocks_of_masked_logits(backend, lowest):
    """A mask by a number so low that differences of maxima, times a sum, leave fp32: blocks before and after."""
    logits_TV, labels_T, weights_2T = made(3, 9000, true_vocab=300)
    labels_T = torch.where(labels_T == IGNORE, IGNORE, labels_T + 8300)
    masked_V = torch.ones(9000, dtype=torch.bool)
    masked_V[8200:8700] = False
    logits_TV[:, masked_V] = lowest
    results = run_backend(backend, logits_TV, labels_T, weights_2T)
    shrunk_T = torch.where(labels_T == IGNORE, IGNORE, labels_T - 8200)
    expected = run(truth, logits_TV[:, ~masked_V].double(), shrunk_T, weights_2T)
    assert (expected["entropy"] > 1).any()
    for name, ours in results.items():
        ours = ours[:, ~masked_V] if ours.ndim == 2 else ours
        torch.testing.assert_close(ours.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_label_of_probability_zero_is_minus_infinity_and_the_rest_stays_finite(backend):
    logits_TV = torch.zeros(1, 8)
    logits_TV[0, 3:] = -torch.inf
    results = run_backend(backend, logits_TV, torch.tensor([5]), torch.tensor([[1.0], [0.0]]))
    assert results["logprob"].tolist() == [-float("inf")]
    torch.testing.assert_close(results["entropy"], torch.tensor([3.0]).log())
    assert results["gradient 0 by entropy"].isfinite().all()


@pytest.mark.parametrize("ignore_index", [IGNORE, 0, 63])
def test_ignored_rows_are_zero_without_gradient(backend, ignore_index):
    """Also where the label that says so is a token of the vocabulary, and where their logits are NaN."""
    logits_TV, _, weights_2T = made(5, 64)
    labels_T = torch.tensor([ignore_index, 3, ignore_index, 62, ignore_index])
    ignored_T = labels_T == ignore_index
    assert_near_truth(backend, logits_TV, labels_T, weights_2T, ignore_index=ignore_index)
    logits_TV[ignored_T] = torch.nan
    results = run_backend(backend, logits_TV, labels_T, weights_2T, ignore_index=ignore_index)
    for name in OUTPUTS:
        assert results[name][ignored_T].tolist() == [0, 0, 0]
        assert results[name][~ignored_T].isfinite().all()
        assert torch.count_nonzero(results[name]) == 2
    gradient_TV = results["gradient 0 by both"]
    assert torch.count_nonzero(gradient_TV[~ignored_T]) == 2 * 64
    assert torch.count_nonzero(gradient_TV[ignored_T]) == 0


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_none_and_one_token(backend, num_tokens):
    logits_TV = torch.arange(3.0).repeat(num_tokens, 1)
    results = run_backend(backend, logits_TV, torch.full((num_tokens,), 1), torch.ones(2, num_tokens))
    # log softmax of (0, 1, 2) at 1; its entropy.
    assert results["logprob"].tolist() == pytest.approx([-1.4076059644443804] * num_tokens)
    assert results["entropy"].tolist() == pytest.approx([0.8323955] * num_tokens)
    assert {results[name].shape for name in results if name not in OUTPUTS} == {(num_tokens, 3)}
    # p = (0.0900, 0.2447, 0.6652) by hand.
    expected = [[-0.09003057, 1 - 0.24472848, -0.66524094]] * num_tokens
    torch.testing.assert_close(results["gradient 0 by logprob"], torch.tensor(expected).reshape(num_tokens, 3))


def test_gradcheck_through_both_outputs(backend):
    """Triton computes in fp32, and says so."""
    generator = torch.Generator().manual_seed(3)
    logits_TV = torch.randn(5, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    labels_T = torch.tensor([0, 8, IGNORE, 3, 5])

    def both(logits_TV):
        return token_logprobs(logits_TV, labels_T, temperature=0.7, true_vocab=9, backend=backend)

    if backend == "triton":
        with refuses("triton", "fp32", "fp64"):
            both(logits_TV)
        return
    assert [output.dtype for output in both(logits_TV)] == [torch.float64] * 2
    assert torch.autograd.gradcheck(both, (logits_TV,), eps=1e-6, atol=1e-8)


def test_entropy_that_nobody_asked_for_is_zero_and_has_no_gradient(backend):
    logits_TV, labels_T, weights_2T = made(6, 300)
    device = device_of(backend)
    leaf_TV = logits_TV.to(device).requires_grad_()
    logprobs_T, entropy_T = token_logprobs(leaf_TV, labels_T.to(device), return_entropy=False, backend=backend)
    assert entropy_T.tolist() == [0] * 6
    assert not entropy_T.requires_grad
    with_entropy = run_backend(backend, logits_TV, labels_T, weights_2T)
    assert torch.equal(logprobs_T.cpu(), with_entropy["logprob"])
    (logprobs_T * weights_2T[0].to(device) + entropy_T).sum().backward()
    torch.testing.assert_close(leaf_TV.grad.cpu(), with_entropy["gradient 0 by logprob"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("index", [0, 1])
def test_one_result_alone_and_summed(backend, index):
    """The gradient of a plain sum arrives as one number spread over all tokens; the other result's as None."""
    logits_TV, labels_T, _ = made(6, 300)
    device = device_of(backend)
    leaf_TV = logits_TV.to(device).requires_grad_()
    token_logprobs(leaf_TV, labels_T.to(device), temperature=0.7, backend=backend)[index].sum().backward()
    expected = run(truth, logits_TV.double(), labels_T, torch.ones(2, 6), temperature=0.7)
    want_TV = expected[f"gradient 0 by {OUTPUTS[index]}"]
    torch.testing.assert_close(leaf_TV.grad.cpu().double(), want_TV, rtol=1e-5, atol=1e-7)


def test_backward_twice_gives_the_same_bits(backend):
    logits_TV, labels_T, _ = made(6, 300)
    device = device_of(backend)
    leaf_TV = logits_TV.to(device).requires_grad_()
    logprobs_T, entropy_T = token_logprobs(leaf_TV, labels_T.to(device), backend=backend)
    total = (logprobs_T + 0.5 * entropy_T).sum()
    first, second = (torch.autograd.grad(total, leaf_TV, retain_graph=True)[0] for _ in range(2))
    assert torch.count_nonzero(first) > 0
    assert torch.equal(first, second)
    assert torch.equal(leaf_TV.cpu(), logits_TV)


LAYOUTS = {
    "columns of a wider tensor": lambda logits_TV: torch.cat([logits_TV, logits_TV + 1], 1)[:, : logits_TV.size(1)],
    "every second row": lambda logits_TV: logits_TV.repeat_interleave(2, 0)[::2],
    "transposed": lambda logits_TV: logits_TV.t().contiguous().t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_logits_labels_and_upstream(backend, layout):
    logits_TV, labels_T, weights_2T = made(9, 300)
    strided_TV = LAYOUTS[layout](logits_TV)
    assert torch.equal(strided_TV, logits_TV)
    assert not strided_TV.is_contiguous()
    labels_2T, weights_T2 = torch.stack([labels_T, labels_T + 1], 1), weights_2T.t().contiguous()
    assert_near_truth(backend, strided_TV, labels_2T[:, 0], weights_T2.t())


@pytest.mark.parametrize("label, true_vocab", [(16, None), (12, 12), (-1, None), (-99, 12)])
def test_a_label_outside_the_vocabulary_is_refused(backend, label, true_vocab):
    """On a CPU. What Triton's kernel asserts by itself: interpreted_tiles.py."""
    labels_T = torch.tensor([3, IGNORE, label])
    with refuses(f"label {label} at token 2", f"[0, {true_vocab or 16})", "ignore_index"):
        token_logprobs(torch.zeros(3, 16), labels_T, true_vocab=true_vocab, backend=backend)


def test_the_choice_of_a_backend(backend, caplog):
    """`auto` takes chunked torch on a CPU; the choice is logged once; an unknown name lists those that are known."""
    backends.log_once.cache_clear()
    logits_TV, labels_T = torch.zeros(3, 16), torch.zeros(3, dtype=torch.int64)
    with caplog.at_level("INFO", "megarlhf.kernels.backends"):
        for _ in range(3):
            token_logprobs(logits_TV, labels_T)
            token_logprobs(logits_TV.to(device_of(backend)), labels_T.to(device_of(backend)), backend=backend)
    assert [record.getMessage() for record in caplog.records] == [
        "log-prob kernels on cpu: chunked (the fastest here)",
        f"log-prob kernels on {device_of(backend)}: {backend} (asked for)",
    ]
    with refuses("'fused'", "auto, triton, chunked or reference"):
        token_logprobs(logits_TV, labels_T, backend="fused")


def test_offsets_past_two_to_the_31(backend, monkeypatch, tmp_path):
    """Rows as far apart as those of 40000 x 128256 logits, in a file of 10 GB whose holes take no space."""
    if device_of(backend) == "cuda":
        pytest.skip("a GPU's memory has no holes")
    small_TV, labels_T, weights_2T = made(17, 130)
    small_TV = small_TV.bfloat16()
    logits_TV = far_apart(small_TV, tmp_path / "logits", monkeypatch)
    results = run_backend(backend, logits_TV, labels_T, weights_2T)
    assert_same_bits(results, run_backend(backend, small_TV, labels_T, weights_2T))
