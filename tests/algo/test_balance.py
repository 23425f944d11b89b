"""The load-balancing loss of experts, against its equation and against transformers. Not covered: ranks and layers,
which are in tests/distributed/test_router_balance.py."""

import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megarlhf.algo.balance import count_choices, sequence_balance

E, PER_TOKEN = 6, 2
LENGTHS = (7, 1, 12)
PADDED = 12


def routed(num_tokens: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Logits that prefer some experts, and the choice of the largest."""
    logits_TE = torch.randn(num_tokens, E, generator=torch.Generator().manual_seed(seed)) + torch.arange(E) / 2
    return logits_TE, torch.zeros(num_tokens, E, dtype=torch.bool).scatter(1, logits_TE.topk(PER_TOKEN).indices, True)


def from_the_paper(logits_TE: Tensor) -> Tensor:
    """Of one sequence. Switch Transformers: N sum_i f_i P_i (4), f_i the share of tokens sent to expert i (5), P_i the
    mean of its probabilities (6); a token counts for each of its experts."""
    loss = logits_TE.new_zeros(())
    probabilities_TE = logits_TE.exp() / logits_TE.exp().sum(1, keepdim=True)
    order = logits_TE.detach().argsort(1, descending=True)[:, :PER_TOKEN].tolist()
    for expert in range(E):
        sent = sum(expert in chosen for chosen in order) / len(order)
        loss = loss + sent * probabilities_TE[:, expert].mean()
    return E * loss


def test_the_sum_over_sequences_and_its_gradient_are_the_papers_and_padding_counts_for_nothing() -> None:
    """Packed, padded, and as parts of each sequence that two ranks have: value and gradient within 1e-6 of fp64."""
    logits_TE, chosen_TE = routed(sum(LENGTHS))
    exact_TE = logits_TE.double().requires_grad_()
    expected = torch.stack([from_the_paper(each) for each in exact_TE.split(LENGTHS)]).sum()
    expected.backward()
    assert exact_TE.grad is not None
    assert exact_TE.grad.abs().max() > 1e-2
    sequence_T = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    places_T = torch.cat([torch.arange(length) + PADDED * n for n, length in enumerate(LENGTHS)])
    for places, total in ((torch.arange(sum(LENGTHS)), sum(LENGTHS)), (places_T, PADDED * len(LENGTHS))):
        grid_TE, grid_chosen_TE = routed(total, seed=5)  # padding chooses experts too
        grid_T = torch.full((total,), len(LENGTHS))
        grid_TE[places], grid_chosen_TE[places], grid_T[places] = logits_TE, chosen_TE, sequence_T
        grid_TE.requires_grad_()
        counts_KE = count_choices(grid_chosen_TE, grid_T, len(LENGTHS))
        assert counts_KE.sum(1).tolist() == [PER_TOKEN * length for length in LENGTHS]
        halves = (slice(0, total // 3), slice(total // 3, None))
        parts = [sequence_balance(grid_TE.softmax(1)[at], counts_KE, grid_T[at], PER_TOKEN) for at in halves]
        sum(parts[1:], parts[0]).backward()
        torch.testing.assert_close(sum(parts[1:], parts[0]).double(), expected, rtol=1e-6, atol=0)
        assert grid_TE.grad is not None
        torch.testing.assert_close(grid_TE.grad[places].double(), exact_TE.grad, rtol=0, atol=1e-6)
        padding_T = torch.ones(total, dtype=torch.bool).index_fill(0, places, False)
        assert not grid_TE.grad[padding_T].any()


def test_one_sequence_and_one_layer_are_transformers_figure() -> None:
    """Also with padding behind it; a sequence that is spread evenly has as many as a token has experts."""
    logits_TE, chosen_TE = routed(9)
    mask_BS = torch.tensor([[1] * 7 + [0] * 2])
    expected = load_balancing_loss_func((logits_TE,), E, PER_TOKEN, mask_BS)
    sequence_T = 1 - mask_BS[0]
    counts_KE = count_choices(chosen_TE, sequence_T, 1)
    torch.testing.assert_close(sequence_balance(logits_TE.softmax(1), counts_KE, sequence_T, PER_TOKEN), expected)
    even_TE = torch.full((E, E), 1 / E)
    spread = sequence_balance(
        even_TE, torch.full((1, E), float(PER_TOKEN)), torch.zeros(E, dtype=torch.int64), PER_TOKEN
    )
    torch.testing.assert_close(spread, torch.tensor(float(PER_TOKEN)))
