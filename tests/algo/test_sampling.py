"""Which tokens may be drawn, by hand. Not covered: vLLM's own filters (tests/distributed/test_sampling_options.py)."""

import pytest
import torch

from megarlhf.algo.sampling import filtered_logits

LOGITS_BV = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.65}, [1, 3]),
        ({"top_p": 0.75}, [1, 2, 3]),
        ({"top_p": 0.01}, [1]),
        ({"min_p": 0.6}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.55}, [1]),
        ({"min_p": 0.4, "top_p": 0.9}, [1, 2, 3]),
    ],
)
def test_what_is_kept(options, kept):
    """Probabilities .1, .4, .2, .3. Of the two likeliest the first has 4/7 of what is left, which is above .55."""
    found_BV = filtered_logits(LOGITS_BV, **options)
    assert found_BV.isfinite().nonzero()[:, 1].tolist() == kept
    assert torch.equal(found_BV[0, kept], LOGITS_BV[0, kept])


def test_rows_are_filtered_by_themselves_and_ties_are_kept_together():
    logits_BV = torch.tensor([[1.0, 1.0, 1.0, 0.0], [3.0, 0.0, 0.0, 2.0]])
    assert filtered_logits(logits_BV, top_k=2).isfinite().tolist() == [[True] * 3 + [False], [True, False, False, True]]
    assert filtered_logits(logits_BV, top_p=0.5).isfinite().sum(-1).tolist() == [2, 1]
