"""The pretraining mix: texts in pieces, their order over a run, and the columns of their micro-batches.

Not covered: gradients and a whole run (tests/distributed/test_ptx.py).
"""

from types import SimpleNamespace

import pytest
import torch

from megarlhf.data.samples.texts import Text, pieces
from megarlhf.parallel.batching import Batching
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.packing.partition import ForwardCost
from megarlhf.trainers.rl.pretraining_mix import PretrainingMix


class Letters:
    """A tokenizer of one letter a token; bos is 1, eos 2."""

    eos_id = 2

    def __init__(self, bos_id=1):
        self.bos_id = bos_id

    def encode(self, text):
        return [ord(letter) - 87 for letter in text if letter != " "]


def test_a_text_ends_with_eos_and_is_cut_into_pieces_that_begin_with_bos():
    assert pieces("abc", Letters(), 8) == [[1, 10, 11, 12, 2]]
    assert pieces("abcdef", Letters(), 4) == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 2]]
    assert pieces("abc", Letters(bos_id=None), 3) == [[10, 11, 12]], "from eos alone nothing is learnt"
    assert pieces(" ", Letters(), 4) == []
    assert pieces("abc", Letters(), 8, end=False) == [[1, 10, 11, 12]], "where perplexity is measured"


def test_every_text_comes_once_before_any_comes_again_and_goes_on_after_a_resume():
    mix = PretrainingMix([Text([1, n]) for n in range(6)], 2, seed=3)
    first = [mix._order.indices(update) for update in range(3)]
    assert sorted(n for batch in first for n in batch) == list(range(6))
    again = PretrainingMix(mix.texts, 2, seed=3)
    again.load_state_dict(mix.state_dict())
    assert again._order.indices(3) == mix._order.indices(3)


def test_texts_stand_behind_the_samples_with_equal_weights():
    """Two texts of 2 and 4 tokens: 1 and 3 are predicted, each with a weight of a quarter."""
    mix = PretrainingMix([Text([1, 5]), Text([1, 6, 7, 2])], 2, seed=0)
    mesh = SimpleNamespace(
        layout=SimpleNamespace(dp=1, tp=1, cp=1),
        own=lambda by_dp: by_dp[0],
        runtime=SimpleNamespace(device="cpu"),
    )
    micro = SimpleNamespace(max_tokens_per_micro_batch=8)
    role = SimpleNamespace(mesh=mesh, batching=lambda train: Batching(mesh, ForwardCost(1, 0), micro))
    samples = MicroBatch(torch.tensor([[1, 4, 4]]), {"response_mask": torch.tensor([[True, True, False]])})
    batches, tokens = mix.add_texts(role, micro, 0, [samples])
    assert tokens == 6
    assert batches[0].columns["ptx_weights"].tolist() == [[0.0, 0.0, 0.0]]
    assert batches[0].columns["response_mask"] is samples.columns["response_mask"]
    (texts,) = batches[1:]
    assert not texts.columns["response_mask"].any()
    ends = texts.tokens_BS[0].tolist()
    weights = texts.columns["ptx_weights"][0].tolist()
    assert sum(weights) == pytest.approx(1.0)
    assert weights == [0.0 if token in (0, 1) else 0.25 for token in ends]
