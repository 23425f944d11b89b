"""Scores of sequences by hand."""

import torch

from megarlhf.parallel.micro_batch import MicroBatchLayout, TokenSpans
from megarlhf.trainers.experience.sequence_scores import sequence_scores
from tests.tables import ragged


def test_last_tokens_and_means_over_responses_by_hand():
    """Two packed sequences of 3 and 4 tokens; responses of 2 and 1. No sequence: no score."""
    scores_BS1 = torch.tensor([1.0, 2.0, 4.0, 10.0, 20.0, 30.0, 50.0]).view(1, 7, 1).requires_grad_()
    layout = MicroBatchLayout((0, 1), (3, 4), (0, 3), 1, 7, packed=True)
    assert sequence_scores(scores_BS1, layout, None).tolist() == [4.0, 50.0]
    responses = TokenSpans.single(torch.tensor([1, 3]), torch.tensor([2, 1]))
    means_K = sequence_scores(scores_BS1, layout, responses)
    assert means_K.tolist() == [3.0, 50.0]
    means_K.sum().backward()
    assert scores_BS1.grad.flatten().tolist() == [0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0]
    empty = MicroBatchLayout((), (), (), 1, 0, packed=True)
    assert sequence_scores(scores_BS1[:, :0], empty, responses).tolist() == []


def test_a_mean_leaves_out_what_was_observed():
    """Prompt of 2, sampled 2, observed 3, sampled 1; then prompt of 1 and one sampled token. (1 + 2 + 9) / 3 = 4; the
    last three tokens would give 6."""
    scores_BS1 = torch.tensor([7.0, 7.0, 1.0, 2.0, 5.0, 4.0, 5.0, 9.0, 8.0, 3.0]).view(1, 10, 1)
    layout = MicroBatchLayout((0, 1), (8, 2), (0, 8), 1, 10, packed=True)
    sampled = TokenSpans(torch.tensor([2, 7, 1]), ragged([2, 1], [1], dtype=torch.int64))
    assert sequence_scores(scores_BS1, layout, sampled).tolist() == [4.0, 3.0]
    first_only = MicroBatchLayout((1,), (2,), (0,), 1, 2, packed=True)
    assert sequence_scores(scores_BS1[:, 8:], first_only, sampled).tolist() == [3.0]


def test_a_mean_over_one_stretch_keeps_its_bits():
    """The order of the sum is from the end of a response to its start, with zeros behind it."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(1, 40, (9,), generator=generator)
    lengths = counts + torch.randint(1, 9, (9,), generator=generator)
    starts = lengths.cumsum(0) - lengths
    scores_X = torch.randn(int(lengths.sum()), generator=generator)
    layout = MicroBatchLayout(
        tuple(range(9)), tuple(lengths.tolist()), tuple(starts.tolist()), 1, len(scores_X), packed=True
    )
    means_K = sequence_scores(scores_X.view(1, -1, 1), layout, TokenSpans.single(lengths - counts, counts))
    rows = scores_X.split(lengths.tolist())
    reversed_K = [row[len(row) - count :].flip(0) for row, count in zip(rows, counts, strict=True)]
    expected_K = torch.nn.utils.rnn.pad_sequence(reversed_K, batch_first=True).sum(1) / counts.float()
    assert torch.equal(means_K, expected_K)
