"""Log-probs over a vocabulary on several gloo ranks: the single process's values, the same bits on every rank, and how
many collectives there are and when they start.

Not covered: NCCL. How much of the collective the products hide.
"""

import pytest
import torch
import torch.distributed as dist

from megarlhf.kernels import linear_token_logprobs, token_logprobs
from tests.kernels.cases import IGNORE, INTERPRETING, OUTPUTS, UPSTREAM, Recorded, made, made_linear, run_backend

CASES = [
    # vocabulary, true vocabulary, temperature, offset; the last: at tp 4 rank 3 holds padding only. Offset None: the
    # first half is masked by the lowest number, at tp 4 all that ranks 0 and 1 hold.
    (516, 513, 1.0, 0.0),
    (1024, 1000, 1.0, None),
    (1100, 1100, 0.7, 1e4),
    (1024, 700, 2.0, -120.0),
]
NUM_TOKENS, NUM_HIDDEN = 24, 16
LINEAR_CASES = [
    # vocabulary, true vocabulary, sequence parallel, masked
    (516, 513, False, False),
    (1024, 700, False, True),
    (1100, 1100, True, False),
    (1024, 700, True, True),
]
if INTERPRETING:  # which takes its time; Triton's part in this is one kernel, and no collective
    WORLDS, CASES, LINEAR_CASES = [("triton", 2)], CASES[-1:], LINEAR_CASES[-1:]
else:
    WORLDS = [("reference", 2), ("chunked", 2), ("chunked", 4)]

over_worlds = pytest.mark.parametrize("backend, tp", WORLDS)


def as_arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def moved(logits_TV, offset):
    if offset is not None:
        return logits_TV + offset
    logits_TV = logits_TV.clone()
    logits_TV[:, : logits_TV.size(1) // 2] = torch.finfo(torch.float32).min
    return logits_TV


def logits_on_a_rank(rank, tp, backend):
    """This rank's columns of every case: outputs, gradients and the collectives of a forward and a backward."""
    results = []
    for vocab, true_vocab, temperature, offset in CASES:
        logits_TV, labels_T, weights_2T = made(17, vocab, true_vocab=true_vocab)
        shard_TV = moved(logits_TV, offset).chunk(tp, 1)[rank]
        options = {"temperature": temperature, "true_vocab": true_vocab, "group": dist.group.WORLD}
        results.append(as_arrays(run_backend(backend, shard_TV, labels_T, weights_2T, **options)))
    with Recorded() as forward:
        logprobs_T, entropy_T = token_logprobs(shard_TV.requires_grad_(), labels_T, backend=backend, **options)
    with Recorded() as backward:
        (logprobs_T + entropy_T).sum().backward()
    assert shard_TV.grad is not None
    return results, forward.events, backward.events


@pytest.fixture(scope="module")
def in_a_world(ranks):
    """What the ranks say of logits, of the linear kernel and of its collectives; asked once for all tests."""
    answers = {}

    def ask(backend, tp):
        if (backend, tp) not in answers:
            answers[backend, tp] = list(zip(*ranks.run(tp, on_a_rank, tp, backend), strict=True))
        return answers[backend, tp]

    return ask


def on_a_rank(runtime, tp, backend):
    rank, events = runtime.rank, {}
    if backend == "chunked":
        events = {
            (sequence_parallel, save_bytes): events_on_a_rank(rank, tp, backend, sequence_parallel, save_bytes)
            for sequence_parallel in (False, True)
            for save_bytes in (0, 2**28)
        }
    return logits_on_a_rank(rank, tp, backend), linear_on_a_rank(rank, tp, backend), events


def assert_same_bits_everywhere(parts, names):
    for name in names:
        assert all(torch.equal(part[name], parts[0][name]) for part in parts), name


@over_worlds
def test_sharded_logits(backend, tp, in_a_world):
    """One all-gather forward, of four numbers a token; nothing backward."""
    ranks, _, _ = in_a_world(backend, tp)
    assert any(true_vocab <= vocab // 4 * 3 for vocab, true_vocab, _, _ in CASES), "no rank holds padding only"
    for _, forward, backward in ranks:
        (gathered,) = forward
        assert "allgather" in gathered[0]
        if backend != "reference":
            assert gathered[1] == (tp * 17, 4)
        assert backward == []
    for case, (vocab, true_vocab, temperature, offset) in enumerate(CASES):
        logits_TV, labels_T, weights_2T = made(17, vocab, true_vocab=true_vocab)
        width = vocab // tp
        owners_T = labels_T[labels_T != IGNORE] // width
        assert len(owners_T.unique()) >= 2, "every label is on one rank"
        single = run_backend(
            backend, moved(logits_TV, offset), labels_T, weights_2T, temperature=temperature, true_vocab=true_vocab
        )
        parts = [{name: torch.from_numpy(array) for name, array in results[case].items()} for results, _, _ in ranks]
        assert_same_bits_everywhere(parts, OUTPUTS)
        for name, want in single.items():
            ours = parts[0][name] if name in OUTPUTS else torch.cat([part[name] for part in parts], 1)
            torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-6)


def linear_case(vocab, true_vocab, masked):
    inputs, labels_T, weights_2T = made_linear(NUM_TOKENS, NUM_HIDDEN, vocab, true_vocab=true_vocab)
    mask_T = torch.arange(NUM_TOKENS) % 5 != 1
    return inputs, labels_T, weights_2T, {"response_mask": mask_T} if masked else {}


def linear_on_a_rank(rank, tp, backend):
    results = []
    for vocab, true_vocab, sequence_parallel, masked in LINEAR_CASES:
        (hidden_TH, weight_VH), labels_T, weights_2T, options = linear_case(vocab, true_vocab, masked)
        hidden_TH = hidden_TH.chunk(tp)[rank] if sequence_parallel else hidden_TH
        options |= {"true_vocab": true_vocab, "group": dist.group.WORLD, "sequence_parallel": sequence_parallel}
        inputs = (hidden_TH, weight_VH.chunk(tp)[rank])
        results.append(as_arrays(run_backend(backend, inputs, labels_T, weights_2T, temperature=0.7, **options)))
    return results


@over_worlds
def test_sharded_linear(backend, tp, in_a_world):
    """With hidden states that all ranks have, and under sequence parallelism; with and without a mask."""
    _, ranks, _ = in_a_world(backend, tp)
    for case, (vocab, true_vocab, sequence_parallel, masked) in enumerate(LINEAR_CASES):
        inputs, labels_T, weights_2T, options = linear_case(vocab, true_vocab, masked)
        single = run_backend(backend, inputs, labels_T, weights_2T, temperature=0.7, true_vocab=true_vocab, **options)
        parts = [{name: torch.from_numpy(array) for name, array in results[case].items()} for results in ranks]
        of_hidden = [f"gradient 0 by {upstream}" for upstream in UPSTREAM]
        assert_same_bits_everywhere(parts, OUTPUTS if sequence_parallel else (*OUTPUTS, *of_hidden))
        for name, want in single.items():
            split = name.startswith("gradient 1") or (sequence_parallel and name in of_hidden)
            ours = torch.cat([part[name] for part in parts]) if split else parts[0][name]
            torch.testing.assert_close(ours, want, rtol=1e-5, atol=2e-6)


def events_on_a_rank(rank, tp, backend, sequence_parallel, save_bytes):
    """What a forward and a backward do, in order. The weight has a main_grad; every token counts."""
    (hidden_TH, weight_VH), _, _ = made_linear(NUM_TOKENS, NUM_HIDDEN, tp * 4000)
    labels_T = torch.arange(NUM_TOKENS) * 37
    hidden_TH = (hidden_TH.chunk(tp)[rank] if sequence_parallel else hidden_TH).requires_grad_()
    weight_VH = weight_VH.chunk(tp)[rank].detach().requires_grad_()
    weight_VH.main_grad = torch.zeros_like(weight_VH)
    with Recorded() as forward:
        logprobs_T, _ = linear_token_logprobs(
            hidden_TH, weight_VH, labels_T, group=dist.group.WORLD, sequence_parallel=sequence_parallel,
            save_bytes=save_bytes, return_entropy=False, backend=backend,
        )  # fmt: skip
    with Recorded() as backward:
        logprobs_T.sum().backward()
    assert hidden_TH.grad is not None
    assert torch.count_nonzero(weight_VH.main_grad) > 0
    return backward.events, forward.collectives(), backward.collectives()


@pytest.mark.skipif(INTERPRETING, reason="the same for all tiles")
@pytest.mark.parametrize("save_bytes", [0, 2**28])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_collectives_of_the_linear_kernel(tp, sequence_parallel, save_bytes, in_a_world):
    """Backward: one of sums, when the hidden states' gradient is done, before the last products for the weight.
    Hidden states of other ranks are asked for again only where there was no memory to keep them."""
    _, _, ranks = in_a_world("chunked", tp)
    for events in ranks:
        backward, in_forward, in_backward = events[sequence_parallel, save_bytes]
        gathers = ["_allgather_base_"] if sequence_parallel else []
        assert in_forward == [*gathers, "_allgather_base_"]
        summed = "_reduce_scatter_base_" if sequence_parallel else "allreduce_"
        assert in_backward == ([summed] if save_bytes else [*gathers, summed])
        start = [name for name, _, _ in backward].index(summed)
        of_weight = [place for place, (_, _, inner) in enumerate(backward) if inner == NUM_TOKENS]
        of_hidden = [
            place
            for place, (name, shape, _) in enumerate(backward)
            if name == "product" and shape == (NUM_TOKENS, NUM_HIDDEN)
        ]
        assert of_hidden
        assert max(of_hidden) < start < max(of_weight)
        if save_bytes:
            assert start < min(of_weight), "with everything kept all of the weight's products can wait"
