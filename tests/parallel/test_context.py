"""What ranks of a context-parallel group give each other, and what stands where in their micro-batches.

Not covered: a model (tests/distributed/test_context_parallel.py).
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from megarlhf.layout import column_multiple
from megarlhf.parallel.context import context_share, gather_sequence
from megarlhf.parallel.micro_batch import MicroBatchLayout
from megarlhf.parallel.vocab import Vocabulary, logits_at, next_token_logprobs
from tests.models.test_context_attention import group
from tests.parallel.test_batching import CPU, batching
from tests.refuses import refuses

LENGTHS = (12, 24, 12)
TOKENS = sum(LENGTHS)


@pytest.mark.parametrize("tp, cp, expected", [(3, 1, 3), (1, 2, 4), (2, 2, 4), (3, 2, 12), (4, 3, 12)])
def test_columns_divide_into_chunks_and_each_rank_s_over_tp(tp, cp, expected):
    assert column_multiple(tp, cp) == expected
    assert expected % (2 * cp) == (expected // cp) % tp == 0 or cp == 1


def test_packed_sequences_are_padded_each_to_a_multiple_of_twice_cp():
    """Lengths 5, 2 and 3 take 8, 4 and 4 columns at cp 2; at tp 4 a row is filled up to a multiple of eight."""
    groups, lengths = [(0,), (1,), (2,)], torch.tensor([5, 2, 3])
    assert batching(tokens=16, cp=2).layouts(groups, lengths) == [
        MicroBatchLayout((0, 1, 2), (5, 2, 3), (0, 8, 12), rows=1, columns=16, packed=True)
    ]
    first, second = batching(tokens=12, tp=4, cp=2).layouts(groups, lengths)
    assert (first.columns, second.columns, first.lengths, second.lengths) == (8, 8, (5,), (2, 3))
    assert first.packed_row(CPU, group(2, 0)).lengths == (8,)
    wide = MicroBatchLayout((0,), (5,), (0,), rows=1, columns=40, packed=True)
    assert wide.packed_row(CPU, group(2, 0)).lengths == (8, 32), "filling is cut alike"
    (padded,) = batching(samples=3, cp=4).layouts(groups, lengths)
    assert (padded.columns, padded.starts) == (8, (0, 8, 16))


def test_a_sequence_as_long_as_the_budget_fits():
    """Whatever its padding: 7 tokens of 7 take 8 columns."""
    (layout,) = batching(tokens=7, cp=2).layouts([(0,)], torch.tensor([7]))
    assert (layout.lengths, layout.columns) == ((7,), 8)
    with refuses("group 0", "12 tokens", "8"):
        batching(tokens=7, cp=2).layouts([(0,)], torch.tensor([9]))


def gathers(runtime, packed):
    """Of a whole of known numbers, whether each rank gets it, and its gradients of given weights."""
    lengths = LENGTHS if packed else (TOKENS,)
    share = context_share(lengths, dist.group.WORLD, CPU)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(TOKENS, 2, 3, generator=generator)
    weights = torch.randn(runtime.world_size, TOKENS, 2, 3, generator=generator)
    local = whole[share.own_S].requires_grad_()
    gathered = gather_sequence(local, dist.group.WORLD, share if packed else None)
    (summed,) = torch.autograd.grad(gathered, local, weights[runtime.rank])
    outputs = share.whole(local.movedim(0, -1))
    (own,) = torch.autograd.grad(outputs, local, weights[0].movedim(0, -1))
    torch.testing.assert_close(gathered, whole, rtol=0, atol=0)
    torch.testing.assert_close(outputs, whole.movedim(0, -1), rtol=0, atol=0)
    torch.testing.assert_close(summed, weights.sum(0)[share.own_S])
    torch.testing.assert_close(own, weights[0][share.own_S], rtol=0, atol=0)
    return share.own_S.tolist()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("cp", [2, 3])
def test_the_whole_is_put_together_in_order(ranks, cp, packed):
    """Forward on every rank; the gradient of a gathered sequence is the sum over ranks, of gathered outputs a slice."""
    owned = ranks.run(cp, gathers, packed)
    assert sorted(itertools.chain.from_iterable(owned)) == list(range(TOKENS))


def log_probs_and_logits(runtime, sequence_parallel):
    """Of hidden states that are cut over four ranks, (tp, cp) = (2, 2), against those of the whole."""
    tp_group = [dist.new_group([0, 1]), dist.new_group([2, 3])][runtime.rank // 2]
    cp_group = [dist.new_group([0, 2]), dist.new_group([1, 3])][runtime.rank % 2]
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, 1, 8, generator=generator)
    weight = torch.randn(16, 8, generator=generator)
    tokens = torch.randint(0, 13, (1, TOKENS), generator=generator)
    mask = torch.rand(1, TOKENS, generator=generator) < 0.7
    mask[:, 0] = False
    rows, positions = torch.zeros(5, dtype=torch.int64), torch.tensor([0, 11, 12, 30, TOKENS - 1])
    expected = next_token_logprobs(Vocabulary(weight, 13, None), hidden, tokens, mask)
    logits = logits_at(Vocabulary(weight, 13, None), hidden, rows, positions)
    share = context_share(LENGTHS, cp_group, CPU)
    local = hidden[share.own_S]
    if sequence_parallel:
        local = local.chunk(2)[runtime.rank % 2]
    part = Vocabulary(weight.chunk(2)[runtime.rank % 2].contiguous(), 13, tp_group, sequence_parallel)
    actual = next_token_logprobs(part, local, tokens, mask, share=share)
    alone, nothing = next_token_logprobs(part, local, tokens, mask, share=share, return_entropy=False)
    for ours, whole in zip((*actual, alone, nothing), (*expected, expected[0], torch.zeros_like(alone)), strict=True):
        torch.testing.assert_close(ours, whole)
    torch.testing.assert_close(logits_at(part, local, rows, positions, share=share), logits)
    return int(mask.sum())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_log_probs_and_logits_are_of_whole_rows(ranks, sequence_parallel):
    assert min(ranks.run(4, log_probs_and_logits, sequence_parallel)) > 20
