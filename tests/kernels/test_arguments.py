"""What the log-prob functions refuse, in words. Labels out of range: test_token_logprobs.py.

Not covered: the device assertion that stands for the check of labels on a GPU.
"""

import pytest
import torch

from megarlhf.kernels import linear_token_logprobs, token_logprobs
from tests.refuses import refuses

LOGITS = torch.zeros(3, 16)
LABELS = torch.tensor([1, 2, 3])


WEIGHT = torch.zeros(20, 16)


@pytest.mark.parametrize(
    "labels_T, names",
    [
        (LABELS[:2], ("torch.int64 [2]", "3 tokens", "int64 [3]")),
        (LABELS.int(), ("torch.int32 [3]", "int64 [3]")),
        (LABELS[:, None], ("[3, 1]", "3 tokens")),
        (torch.zeros(3), ("torch.float32 [3]", "int64 [3]")),
    ],
)
def test_labels(labels_T, names):
    for call in (lambda: token_logprobs(LOGITS, labels_T), lambda: linear_token_logprobs(LOGITS, WEIGHT, labels_T)):
        with refuses("labels", *names):
            call()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature(temperature):
    with refuses(f"temperature = {temperature}", "above 0"):
        token_logprobs(LOGITS, LABELS, temperature=temperature)


@pytest.mark.parametrize("logits", [torch.zeros(3, 16, dtype=torch.int64), torch.zeros(3, 1, 16)])
def test_logits(logits):
    with refuses("logits", "two dimensions", "tokens first"):
        token_logprobs(logits, LABELS)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(
    "mask", [torch.ones(3, 1, dtype=torch.bool), torch.ones(1, dtype=torch.bool), torch.ones(3, dtype=torch.int64)]
)
def test_response_mask(mask, backend):
    with refuses("response_mask", "3 tokens", "bool [3]"):
        linear_token_logprobs(LOGITS, WEIGHT, LABELS, response_mask=mask, backend=backend)


def test_a_response_mask_on_another_device():
    mask_T = torch.ones(3, dtype=torch.bool, device="meta")
    with refuses("response_mask", "meta", "cpu", "move it"):
        linear_token_logprobs(LOGITS, WEIGHT, LABELS, response_mask=mask_T)


@pytest.mark.parametrize("true_vocab", [0, 17])
def test_true_vocab(true_vocab):
    with refuses(f"true_vocab = {true_vocab}", "[1, 16]"):
        token_logprobs(LOGITS, torch.zeros(3, dtype=torch.int64), true_vocab=true_vocab)


def test_triton_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with refuses("log-prob kernels", "GPU", "CPU", "auto or chunked", "kernels.logprobs"):
        token_logprobs(LOGITS, LABELS, backend="triton")


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_hidden_states_of_tokens_that_do_not_count_may_be_anything(backend):
    """NaN in rows outside the mask reaches neither gradient."""
    hidden_TH = torch.randn(5, 8)
    mask_T = torch.tensor([True, False, True, False, True])
    hidden_TH[~mask_T] = torch.nan
    hidden_TH.requires_grad_()
    weight_VH = torch.randn(40, 8, requires_grad=True)
    outputs = linear_token_logprobs(hidden_TH, weight_VH, torch.arange(5), response_mask=mask_T, backend=backend)
    (outputs[0] + outputs[1]).sum().backward()
    assert outputs[0][~mask_T].tolist() == outputs[1][~mask_T].tolist() == [0, 0]
    assert torch.count_nonzero(hidden_TH.grad[~mask_T]) == 0
    assert torch.count_nonzero(hidden_TH.grad[mask_T]) == 3 * 8
    assert weight_VH.grad.isfinite().all()
    assert torch.count_nonzero(weight_VH.grad) == 40 * 8
