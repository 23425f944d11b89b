"""The gradient of samples that several versions of the weights drew, by all responses of three tokens.

A policy is a table of logits: one row for each prefix. The first token of a response was drawn by an older version than
the two others. Not covered: truncation, which biases on purpose.
"""

import itertools

import pytest
import torch

from megarlhf.algo.policy import Bounds, policy_loss
from megarlhf.algo.rollout_correction import rollout_correction
from megarlhf.algo.segments import Segments

VOCABULARY, LENGTH = 3, 3
RESPONSES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
PREFIXES = {
    prefix: n
    for n, prefix in enumerate(p for k in range(LENGTH) for p in itertools.product(range(VOCABULARY), repeat=k))
}
REWARDS = torch.tensor([((7 * n) % 11) / 5 - 1 for n in range(len(RESPONSES))], dtype=torch.float64)


def tables(staleness):
    """Logits of the present policy, and of the versions that drew the first token and the others: each step of the
    learner has moved the logits by the same amount."""
    generator = torch.Generator().manual_seed(0)
    now, move = (torch.randn(len(PREFIXES), VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    older = [now - 0.1 * age * move for age in (staleness, staleness / 2)]
    return now, [older[0], older[1], older[1]]


def logprobs(table, response):
    """Log-prob of each token of a response."""
    rows = table.log_softmax(-1)
    return torch.stack([rows[PREFIXES[response[:t]], response[t]] for t in range(LENGTH)])


def drawn_logprobs(versions, response):
    return torch.stack([logprobs(table, response)[t] for t, table in enumerate(versions)])


def gradient_by_our_loss(now, versions, level):
    """Expected gradient of our loss with our correction: each response counts with its probability of being drawn."""
    table = now.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for response, reward in zip(RESPONSES, REWARDS, strict=True):
        new_T, rollout_T = logprobs(table, response), drawn_logprobs(versions, response)
        one = Segments.of(torch.tensor([LENGTH]))
        weights_T = rollout_correction(
            new_T.detach(), rollout_T, one, kind="truncate", level=level, low=0.0, high=float("inf")
        ).weights_T
        loss = policy_loss(
            new_T,
            new_T.detach(),
            reward.expand(LENGTH),
            weights_T,
            one,
            surrogate="clip",
            ratio="token",
            bounds=Bounds(),
        ).loss
        total = total + rollout_T.sum().exp() * loss
    return -torch.autograd.grad(total, table)[0]


def on_policy_gradient(now):
    """Gradient of the expected reward of the present policy."""
    table = now.clone().requires_grad_()
    value = sum(
        logprobs(table, response).sum().exp() * reward for response, reward in zip(RESPONSES, REWARDS, strict=True)
    )
    return torch.autograd.grad(value, table)[0]


def gradient_on_drawn_prefixes(now, versions):
    """Sum over prefixes p as the older versions draw them: P(p) x gradient of sum_a pi(a | p) Q(p, a), where Q is the
    mean reward if the older versions go on."""
    table = now.clone().requires_grad_()
    value = torch.zeros((), dtype=torch.float64)
    drawn = {response: drawn_logprobs(versions, response) for response in RESPONSES}
    for prefix, row in PREFIXES.items():
        t = len(prefix)
        for token in range(VOCABULARY):
            whole = [r for r in RESPONSES if r[: t + 1] == (*prefix, token)]
            q = sum(drawn[r][t + 1 :].sum().exp() * REWARDS[RESPONSES.index(r)] for r in whole)
            reached = drawn[whole[0]][:t].sum().exp()
            value = value + reached * table.log_softmax(-1)[row, token].exp() * q
    return torch.autograd.grad(value, table)[0]


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_of_the_response_the_correction_is_exact_and_of_the_token_up_to_its_prefix(staleness):
    """At level `sequence` the expected gradient is that of the present policy. At level `token` it is the gradient with
    prefixes and continuations of the versions that drew. docs/slices.md has the distances that this prints."""
    now, versions = tables(staleness)
    exact = on_policy_gradient(now)
    torch.testing.assert_close(gradient_by_our_loss(now, versions, "sequence"), exact, rtol=0, atol=1e-12)
    by_token = gradient_by_our_loss(now, versions, "token")
    torch.testing.assert_close(by_token, gradient_on_drawn_prefixes(now, versions), rtol=0, atol=1e-12)
    fresh = gradient_by_our_loss(now, [now] * 3, "token")
    torch.testing.assert_close(fresh, exact, rtol=0, atol=1e-12)
    plain = without_correction(now, versions)
    distances = [float((gradient - exact).norm() / exact.norm()) for gradient in (by_token, plain)]
    print(f"staleness {staleness}: {distances[0]:.3f} of the gradient at level token, {distances[1]:.3f} without")
    assert 0.0 < distances[0] < distances[1]


def without_correction(now, versions):
    """Expected gradient of the plain loss on the drawn responses."""
    table = now.clone().requires_grad_()
    total = sum(
        drawn_logprobs(versions, response).sum().exp() * reward * logprobs(table, response).sum()
        for response, reward in zip(RESPONSES, REWARDS, strict=True)
    )
    return torch.autograd.grad(total, table)[0]
