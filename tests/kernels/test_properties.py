"""Log-prob kernels on inputs that hypothesis makes up: shapes, dtypes, masks, temperatures, padding.

Not covered: logits of -inf (test_token_logprobs.py has them), vocabularies over ranks.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import IGNORE, INTERPRETING, OURS, assert_near_truth, largest, made, made_linear

pytestmark = pytest.mark.parametrize("backend", OURS)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
NUM_TOKENS = st.integers(0, 9 if INTERPRETING else 40)
sometimes = settings(max_examples=15 if INTERPRETING else 150, deadline=None, derandomize=True)


@st.composite
def problems(draw):
    """(tokens, columns, columns that are not padding, temperature, which tokens are ignored, dtype, seed)."""
    vocab = draw(st.integers(1, 1300))
    num_tokens = draw(NUM_TOKENS)
    ignored = draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    true_vocab = draw(st.integers(1, vocab))
    return num_tokens, vocab, true_vocab, draw(st.floats(0.1, 2.0)), ignored, draw(DTYPES), draw(st.integers(0, 99))


def few_roundings(logits_TV, weights_2T, temperature, true_vocab, size=1.0):
    """Of the largest number on the way to a gradient. The smallest problems are a few numbers, which may cancel, and in
    which torch may happen to be exact."""
    z_TV = logits_TV[:, :true_vocab].float() / temperature
    spread = largest(z_TV - z_TV.mean()) * 2
    upstream = largest(weights_2T) * max(1 / temperature, 1)
    return (2**-22 + 2**-24 * largest(z_TV)) * (1 + spread) * upstream * size


@sometimes
@given(problems(), st.sampled_from([0.0, -120.0, 1000.0]), st.sampled_from([0.1, 3.0, 30.0]))
def test_logits(backend, problem, offset, scale):
    num_tokens, vocab, true_vocab, temperature, ignored, dtype, seed = problem
    logits_TV, labels_T, weights_2T = made(num_tokens, vocab, seed, scale=scale, true_vocab=true_vocab)
    labels_T[torch.tensor(ignored, dtype=torch.bool)] = IGNORE
    logits_TV = (logits_TV + offset).to(dtype)
    options = {"temperature": temperature, "true_vocab": true_vocab}
    least = few_roundings(logits_TV, weights_2T, temperature, true_vocab)
    assert_near_truth(backend, logits_TV, labels_T, weights_2T, least=least, **options)


@sometimes
@given(problems(), st.integers(1, 40), st.sampled_from([0, 30000, 2**28]))
def test_linear(backend, problem, num_hidden, save_bytes):
    num_tokens, vocab, true_vocab, temperature, masked, dtype, seed = problem
    inputs, labels_T, weights_2T = made_linear(num_tokens, num_hidden, vocab, seed, true_vocab=true_vocab)
    inputs = tuple(tensor.to(dtype) for tensor in inputs)
    size = max(largest(tensor.float()) for tensor in inputs)
    logits_TV = inputs[0].float() @ inputs[1].float().t()
    options = {"temperature": temperature, "true_vocab": true_vocab, "save_bytes": save_bytes}
    options["response_mask"] = ~torch.tensor(masked, dtype=torch.bool)
    least = few_roundings(logits_TV, weights_2T, temperature, true_vocab, size)
    assert_near_truth(backend, inputs, labels_T, weights_2T, least=least, **options)
