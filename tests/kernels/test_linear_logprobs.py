"""`linear_token_logprobs` of every backend against fp64, and what it does not compute, keep or give.

Not covered: weights of -inf (their gradient is 0 x inf also in exact arithmetic). Several ranks: test_sharded.py.
Memory: test_memory.py.
"""

import pytest
import torch

from megarlhf.kernels import linear_token_logprobs
from tests.kernels.cases import (
    BACKENDS,
    IGNORE,
    INTERPRETING,
    OURS,
    OUTPUTS,
    Recorded,
    assert_near_truth,
    assert_same_bits,
    device_of,
    made_linear,
    run_backend,
)
from tests.refuses import refuses

NUM_TOKENS = 9 if INTERPRETING else 600
"""600 are two blocks of rows, and 1100 columns two slices of the vocabulary."""
FEW = 9 if INTERPRETING else 21

everywhere = pytest.mark.parametrize("backend", BACKENDS)
ours = pytest.mark.parametrize("backend", OURS)


@everywhere
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("vocab, true_vocab", [(517, None), (1100, 1025), (1100, 1000)])
def test_values_and_gradients_against_fp64(backend, vocab, true_vocab, temperature):
    inputs = made_linear(NUM_TOKENS, 24, vocab, true_vocab=true_vocab)
    assert_near_truth(backend, *inputs, temperature=temperature, true_vocab=true_vocab)


@everywhere
@pytest.mark.parametrize("save_bytes", [0, 2**28])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_the_specification(backend, dtype, save_bytes):
    (hidden_TH, weight_VH), *targets = made_linear(FEW, 32, 1100, true_vocab=1025)
    inputs = (hidden_TH.to(dtype), weight_VH.to(dtype))
    options = {} if backend == "reference" else {"save_bytes": save_bytes}
    assert_near_truth(backend, inputs, *targets, temperature=0.7, true_vocab=1025, **options)


@everywhere
@pytest.mark.parametrize("offset", [-120.0, 1e4])
def test_logits_far_from_zero(backend, offset):
    """A constant in the hidden states times a weight's column: every logit moves by `offset`."""
    (hidden_TH, weight_VH), *targets = made_linear(21, 24, 517)
    hidden_TH[:, 0], weight_VH[:, 0] = 1.0, offset
    assert_near_truth(backend, (hidden_TH, weight_VH), *targets)


@everywhere
def test_padding_rows_of_the_weight_are_not_read(backend):
    (hidden_TH, weight_VH), *targets = made_linear(FEW, 24, 1100, true_vocab=1030)
    clean = run_backend(backend, (hidden_TH, weight_VH), *targets, true_vocab=1030)
    assert torch.count_nonzero(clean["gradient 1 by both"][:1030]) == 1030 * 24
    assert torch.count_nonzero(clean["gradient 1 by both"][1030:]) == 0
    if backend == "reference":
        return
    weight_VH[1030:] = torch.nan
    assert_same_bits(clean, run_backend(backend, (hidden_TH, weight_VH), *targets, true_vocab=1030))


@ours
@pytest.mark.parametrize("share, less", [(0.0, 0), (0.5, 0), (0.5, 1), (1.0, 0)])
def test_a_byte_budget_changes_no_value_and_no_second_backward(backend, share, less):
    """`run` goes backward three times through one graph; the first uses up what was kept."""
    (hidden_TH, weight_VH), labels_T, weights_2T = made_linear(12, 24, 2100, true_vocab=2048)
    num_counting = int((labels_T != IGNORE).sum())
    budget = int(share * num_counting * 2048 * 4) - less
    assert_near_truth(backend, (hidden_TH, weight_VH), labels_T, weights_2T, true_vocab=2048, save_bytes=budget)


def test_the_byte_budget_saves_products():
    """With nothing kept every slice's logits are made again, with half of the bytes some, with all none."""
    (hidden_TH, weight_VH), _, _ = made_linear(5, 24, 16384)
    labels_T = torch.arange(5)
    counts = []
    for share in (0.0, 0.5, 1.0):
        leaves = [hidden_TH.clone().requires_grad_(), weight_VH.clone().requires_grad_()]
        budget = int(share * 5 * 16384 * 4)
        logprobs_T, _ = linear_token_logprobs(*leaves, labels_T, save_bytes=budget, backend="chunked")
        with Recorded() as recorded:
            logprobs_T.sum().backward()
        counts.append(sum(shape[0] == 5 and inner == 24 for shape, inner in recorded.products_and_inner()))
    assert counts[0] > counts[1] > counts[2] == 0


@everywhere
def test_tokens_outside_the_mask(backend):
    """They give 0 and get no gradient; those inside are as if there were no others."""
    inputs, labels_T, weights_2T = made_linear(21, 24, 517)
    mask_T = torch.arange(21) % 3 == 1
    labels_T[::3] = -7777  # outside the vocabulary, but also outside the mask
    assert_near_truth(backend, inputs, labels_T.masked_fill(~mask_T, 5), weights_2T, response_mask=mask_T)
    results = run_backend(backend, inputs, labels_T, weights_2T, response_mask=mask_T)
    for name in OUTPUTS:
        assert torch.count_nonzero(results[name][~mask_T]) == 0
        assert torch.count_nonzero(results[name]) == (mask_T & (labels_T != IGNORE)).sum()
    of_hidden_TH = results["gradient 0 by both"]
    assert torch.count_nonzero(of_hidden_TH[~mask_T]) == 0
    assert (of_hidden_TH != 0).any(1).sum() == (mask_T & (labels_T != IGNORE)).sum()


@ours
def test_tokens_outside_the_mask_cost_nothing(backend):
    """They are in no product, forward or backward, and NaN in their hidden states goes nowhere."""
    (hidden_TH, weight_VH), _, _ = made_linear(40, 24, 517)
    mask_T = torch.arange(40) % 4 == 1
    hidden_TH[~mask_T] = torch.nan
    device = device_of(backend)
    leaves = [hidden_TH.to(device).requires_grad_(), weight_VH.to(device).requires_grad_()]
    labels_T = torch.arange(40, device=device)
    with Recorded() as recorded:
        outputs = linear_token_logprobs(
            *leaves, labels_T, response_mask=mask_T.to(device), save_bytes=0, backend=backend
        )
        (outputs[0] + outputs[1]).sum().backward()
    assert len(recorded.products()) >= 4
    assert not any(40 in (*shape, inner) for shape, inner in recorded.products_and_inner())
    assert any(10 in shape for shape in recorded.products())
    assert leaves[1].grad.isfinite().all()
    assert torch.count_nonzero(leaves[0].grad[~mask_T.to(device)]) == 0


@everywhere
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_no_token_that_counts(backend, num_tokens):
    """T = 0, and masks that leave nothing: zeros, and gradients of zeros."""
    inputs, _, weights_2T = made_linear(num_tokens, 24, 517)
    labels_T = torch.full((num_tokens,), 5)
    mask_T = torch.zeros(num_tokens, dtype=torch.bool)
    for options in ({"response_mask": mask_T}, {"ignore_index": 5}):
        results = run_backend(backend, inputs, labels_T, weights_2T, **options)
        assert results["gradient 0 by both"].shape == (num_tokens, 24)
        assert results["gradient 1 by both"].shape == (517, 24)
        assert all(torch.count_nonzero(tensor) == 0 for tensor in results.values())


@everywhere
def test_one_token(backend):
    inputs, _, weights_2T = made_linear(1, 24, 517)
    assert_near_truth(backend, inputs, torch.tensor([516]), weights_2T)


@everywhere
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_costs_no_product(backend, frozen):
    (hidden_TH, weight_VH), labels_T, weights_2T = made_linear(21, 24, 517)
    expected = run_backend(backend, (hidden_TH, weight_VH), labels_T, weights_2T)
    device = device_of(backend)
    hidden_TH, weight_VH = hidden_TH.to(device), weight_VH.to(device)
    hidden_TH.requires_grad_(frozen != "hidden")
    weight_VH.requires_grad_(frozen != "weight")
    outputs = linear_token_logprobs(hidden_TH, weight_VH, labels_T.to(device), backend=backend)
    with Recorded() as recorded:
        (weights_2T[0].to(device) * outputs[0] + weights_2T[1].to(device) * outputs[1]).sum().backward()
    index, (frozen_tensor, other) = (0, (weight_VH, hidden_TH)) if frozen == "weight" else (1, (hidden_TH, weight_VH))
    assert frozen_tensor.grad is None
    torch.testing.assert_close(other.grad.cpu(), expected[f"gradient {index} by both"], rtol=1e-6, atol=1e-7)
    assert len(recorded.products()) == 1


@everywhere
def test_gradcheck_through_both_outputs(backend):
    generator = torch.Generator().manual_seed(3)
    hidden_TH = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_VH = torch.randn(11, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    labels_T = torch.tensor([0, 8, IGNORE, 3, 5])

    def both(hidden_TH, weight_VH):
        return linear_token_logprobs(
            hidden_TH, weight_VH, labels_T, temperature=0.7, true_vocab=9, save_bytes=0, backend=backend
        )

    if backend == "triton":
        with refuses("triton", "fp32", "fp64"):
            both(hidden_TH, weight_VH)
        return
    assert [output.dtype for output in both(hidden_TH, weight_VH)] == [torch.float64] * 2
    assert torch.autograd.gradcheck(both, (hidden_TH, weight_VH), eps=1e-6, atol=1e-8)


@everywhere
@pytest.mark.parametrize("masked", [False, True])
def test_entropy_that_nobody_asked_for_is_zero_and_has_no_gradient(backend, masked):
    inputs, labels_T, weights_2T = made_linear(6, 24, 517)
    mask_T = torch.arange(6) != 1 if masked else torch.ones(6, dtype=torch.bool)
    expected = run_backend(backend, inputs, labels_T, weights_2T, response_mask=mask_T)
    device = device_of(backend)
    leaves = [tensor.to(device).requires_grad_() for tensor in inputs]
    options = {"return_entropy": False, "backend": backend} | ({"response_mask": mask_T.to(device)} if masked else {})
    logprobs_T, entropy_T = linear_token_logprobs(*leaves, labels_T.to(device), **options)
    assert entropy_T.tolist() == [0] * 6
    assert torch.equal(logprobs_T.cpu(), expected["logprob"])
    (logprobs_T * weights_2T[0].to(device) + entropy_T).sum().backward()
    for index, leaf in enumerate(leaves):
        torch.testing.assert_close(leaf.grad.cpu(), expected[f"gradient {index} by logprob"], rtol=1e-5, atol=1e-7)


@ours
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_main_grad_takes_the_weights_gradient(backend, dtype, main_dtype):
    """Twice into one buffer, beside what is in it; autograd gets none. fp32 under a bf16 weight, as in Megatron."""
    (hidden_TH, weight_VH), labels_T, weights_2T = made_linear(FEW, 24, 1100, true_vocab=1030)
    inputs = (hidden_TH.to(dtype), weight_VH.to(dtype))
    exact = tuple(tensor.float() for tensor in inputs)
    wanted = run_backend(backend, exact, labels_T, weights_2T, true_vocab=1030)["gradient 1 by logprob"]
    device = device_of(backend)
    hidden_TH, weight_VH = (tensor.to(device).requires_grad_() for tensor in inputs)
    weight_VH.main_grad = torch.full((1100, 24), 0.5, dtype=main_dtype, device=device)
    buffer = weight_VH.main_grad
    for _ in range(2):
        outputs = linear_token_logprobs(hidden_TH, weight_VH, labels_T.to(device), true_vocab=1030, backend=backend)
        (weights_2T[0].to(device) * outputs[0]).sum().backward()
    assert weight_VH.grad is None
    assert weight_VH.main_grad is buffer
    assert hidden_TH.grad is not None
    # On a GPU the gradient of the logits is a bf16 factor of a bf16 product.
    rounded = main_dtype == torch.bfloat16 or (dtype == torch.bfloat16 and device == "cuda")
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if rounded else {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(buffer.cpu().float(), 0.5 + 2 * wanted, **tolerance)
    assert (buffer[1030:] == 0.5).all()


@ours
def test_a_tied_embedding_gets_both_parts(backend):
    """Its own gradient arrives through autograd, and the head's in main_grad: together that of the plain graph."""
    (_, weight_VH), labels_T, weights_2T = made_linear(21, 24, 517)
    device = device_of(backend)
    tokens_T = (torch.arange(21, device=device) * 31) % 517
    weight_VH, labels_T, weights_2T = weight_VH.to(device), labels_T.to(device), weights_2T.to(device)

    def of_tied(leaf_VH):
        hidden_TH = torch.nn.functional.embedding(tokens_T, leaf_VH).tanh()
        outputs = linear_token_logprobs(hidden_TH, leaf_VH, labels_T, backend=backend)
        (weights_2T * torch.stack(outputs)).sum().backward()
        return leaf_VH.grad

    plain_VH = of_tied(weight_VH.clone().requires_grad_())
    tied_VH = weight_VH.clone().requires_grad_()
    tied_VH.main_grad = torch.zeros_like(weight_VH)
    by_autograd_VH = of_tied(tied_VH)
    unused_V = torch.ones(517, dtype=torch.bool, device=device)
    unused_V[tokens_T] = False
    assert torch.count_nonzero(by_autograd_VH[unused_V]) == 0
    assert torch.count_nonzero(by_autograd_VH[tokens_T]) > 0
    assert torch.count_nonzero(tied_VH.main_grad[unused_V]) > 0
    torch.testing.assert_close(by_autograd_VH + tied_VH.main_grad, plain_VH, rtol=1e-5, atol=1e-6)


@everywhere
def test_a_label_outside_the_vocabulary_is_refused(backend):
    """Unless the mask leaves it out."""
    inputs, _, _ = made_linear(3, 4, 16)
    labels_T = torch.tensor([3, IGNORE, 12])
    with refuses("label 12 at token 2", "[0, 12)", "ignore_index"):
        linear_token_logprobs(*inputs, labels_T, true_vocab=12, backend=backend)
    if device_of(backend) == "cpu":
        mask_T = labels_T == 3
        logprobs_T, _ = linear_token_logprobs(*inputs, labels_T, true_vocab=12, response_mask=mask_T, backend=backend)
        assert (logprobs_T != 0).tolist() == [True, False, False]
