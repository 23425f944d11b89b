"""Scores of sequences by hand."""

import torch

from megarlhf.parallel.micro_batch import MicroBatchLayout
from megarlhf.trainers.experience.sequence_scores import sequence_scores


def test_last_tokens_and_means_over_responses_by_hand():
    """Two packed sequences of 3 and 4 tokens; responses of 2 and 1. No sequence: no score."""
    scores_BS1 = torch.tensor([1.0, 2.0, 4.0, 10.0, 20.0, 30.0, 50.0]).view(1, 7, 1).requires_grad_()
    layout = MicroBatchLayout((0, 1), (3, 4), (0, 3), 1, 7, packed=True)
    assert sequence_scores(scores_BS1, layout, None).tolist() == [4.0, 50.0]
    means_K = sequence_scores(scores_BS1, layout, torch.tensor([2, 1]))
    assert means_K.tolist() == [3.0, 50.0]
    means_K.sum().backward()
    assert scores_BS1.grad.flatten().tolist() == [0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0]
    empty = MicroBatchLayout((), (), (), 1, 0, packed=True)
    assert sequence_scores(scores_BS1[:, :0], empty, torch.tensor([], dtype=torch.int64)).tolist() == []
