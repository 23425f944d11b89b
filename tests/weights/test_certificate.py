"""The certificate over a gloo group of four: what is proven, five faults in memory, each named with rank and box, and a
rank that fails on the way. Trainer TP2 x PP2, tied; two engines of two ranks. Not covered: NCCL; a table that is wrong
on both sides (the comparison with vLLM's loader sees it)."""

import pytest
import torch
import torch.distributed as dist

from megarlhf.weights.checks import certificate as module
from megarlhf.weights.checks.certificate import CertificateError, certify, nonzero_padding
from megarlhf.weights.checks.digest import whole_digest
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.random_init import fill_random
from megarlhf.weights.transport.reshard import Resharder
from megarlhf.weights.transport.storages import zero_padding
from tests.ranks import RankPool
from tests.refuses import missing_names, refuses
from tests.weights.cases import empty, megatron_ranks, tiny, vllm_ranks

CPU = torch.device("cpu")
LAYER = "model.layers.1."


def stale_rank(dst, old):
    for name, value in dst.items():
        value.copy_(old[name])


def gate_and_up_swapped(dst, old):
    fused = dst[LAYER + "mlp.gate_up_proj.weight"]
    fused.copy_(torch.cat(fused.chunk(2)[::-1]))


def q_and_k_exchanged(dst, old):
    qkv, head = dst[LAYER + "self_attn.qkv_proj.weight"], 16
    first_k = qkv.shape[0] // 2  # 2 query heads, 1 key head, 1 value head on each rank
    kept = qkv[:head].clone()
    qkv[:head] = qkv[first_k : first_k + head]
    qkv[first_k : first_k + head] = kept


def vocabulary_off_by_one(dst, old):
    dst["model.embed_tokens.weight"].copy_(dst["model.embed_tokens.weight"].roll(1, 0))


FAULTS = {
    stale_rank: ("tensors differ", "on rank 3"),
    gate_and_up_swapped: (
        f"{LAYER}mlp.gate_proj.weight[48:96, 0:64] on rank 3",
        f"{LAYER}mlp.up_proj.weight[48:96, 0:64] on rank 3",
    ),
    q_and_k_exchanged: (f"{LAYER}self_attn.k_proj.weight", f"{LAYER}self_attn.q_proj.weight", "on rank 3"),
    vocabulary_off_by_one: ("1 tensors differ", "model.embed_tokens.weight[64", "on rank 3"),
}


def _prove(rank, stages):
    """The digest of the model, after every fault was found."""
    arch = tiny(tie_word_embeddings=True)
    sources, ranks = megatron_ranks(arch, 2, stages), vllm_ranks(arch, 2, 2)
    src, dst = empty([sources[rank]], torch.float32)[rank], empty([ranks[rank]], torch.bfloat16, 0.0)[rank]
    old = {name: value.clone() for name, value in dst.items()}
    fill_random(sources[rank], src, seed=5, std=0.1, arch=arch)
    plan = make_plan(sources, ranks, only_rank=rank)
    Resharder(plan, rank=rank, dtype=torch.bfloat16, device=CPU).run(src, dst)
    options = {"rank": rank, "dtype": torch.bfloat16, "version": 7}

    def proof():
        return certify(plan, sources, ranks, src, dst, **options)

    certificate = proof()
    assert certificate.version == 7
    assert certificate.seconds > 0
    right = {name: value.clone() for name, value in dst.items()}
    for plant, names in FAULTS.items():
        if rank == 3:
            plant(dst, old)
            assert any(not torch.equal(dst[name], right[name]) for name in dst), "the fault was planted"
        with refuses("weight version 7", *names, error=CertificateError) as error:
            proof()
        assert "on rank 2" not in str(error.value)
        for name, value in right.items():
            dst[name].copy_(value)
    # Replicas that err in opposite directions: the sum of their bits is right.
    down = dst[LAYER + "mlp.down_proj.weight"].view(torch.int16)
    if rank in (0, 2):
        down[0, :5] += 1 if rank == 0 else -1
    with refuses("1 tensors", f"{LAYER}mlp.down_proj.weight", "on rank 0", "on rank 2", error=CertificateError):
        proof()
    if rank in (0, 2):
        down[0, :5] -= 1 if rank == 0 else -1
    proof()
    # The last stage's copy of a tied embedding, not updated: found after the transfer, and when the transfer has
    # carried it into the engines.
    if rank == 2:
        src["output_layer.weight"].zero_()
    for _ in range(2):
        with refuses("1 tensors", "model.embed_tokens.weight", "on rank 2", "rank 0", error=CertificateError) as error:
            proof()
        assert "own ranks disagree" in str(error.value)
        Resharder(plan, rank=rank, dtype=torch.bfloat16, device=CPU).run(src, dst)
    return certificate.digest


def _body(runtime):
    rank = runtime.rank
    digests = {_prove(rank, stages) for stages in ([[0], [1, 2]], [[0, 1], [2]])}
    assert len(digests) == 1, "the digest depends on the layout"
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, digests)
    assert everywhere == [digests] * 4


def test_what_is_proven_and_five_faults(ranks: RankPool):
    ranks.run(4, _body)


def _failing(runtime):
    """Errors, as each local step fails on rank 1 alone: all ranks have them, and the next certificate is whole."""
    rank = runtime.rank
    arch = tiny()
    sources, ranks = megatron_ranks(arch, 2, [[0], [1, 2]]), vllm_ranks(arch, 2, 2)
    src, dst = empty([sources[rank]], torch.bfloat16)[rank], empty([ranks[rank]], torch.bfloat16, 0.0)[rank]
    fill_random(sources[rank], src, seed=5, std=0.1, arch=arch)
    plan = make_plan(sources, ranks, only_rank=rank)
    Resharder(plan, rank=rank, dtype=torch.bfloat16, device=CPU).run(src, dst)

    def refusal(src, dst):
        with pytest.raises(CertificateError) as error:
            certify(plan, sources, ranks, src, dst, rank=rank, dtype=torch.bfloat16, version=3)
        return str(error.value)

    def lost(storages, name):
        assert rank != 1 or name in storages
        return {key: value for key, value in storages.items() if rank != 1 or key != name}

    messages = [
        refusal(lost(src, "decoder.layers.0.mlp.linear_fc2.weight"), dst),
        refusal(src, lost(dst, "model.norm.weight")),
        refusal({}, {}) if rank == 1 else refusal(src, dst),
    ]
    # The second pass, by box, runs only after a difference.
    if rank == 3:
        dst["model.norm.weight"][2] += 1
    kept = module._digests_by_box
    if rank == 1:
        module._digests_by_box = lambda *arguments, **options: torch.empty(1 << 60)
    messages.append(refusal(src, dst))
    module._digests_by_box = kept
    messages.append(refusal(src, dst))
    return messages


def test_a_rank_that_fails_stops_all_with_its_reason(ranks: RankPool):
    """A source or a destination that is missing, nothing at all, and no memory for the digests by box."""
    first, *others = ranks.run(4, _failing)
    assert others == [first] * 3
    expected = (
        "rank 1: KeyError: 'decoder.layers.0.mlp.linear_fc2.weight'", "rank 1: KeyError: 'model.norm.weight'",
        "rank 1: StopIteration", "rank 1: RuntimeError", "model.norm.weight[0:64] on rank 3",
    )  # fmt: skip
    for text, name in zip(first, expected, strict=True):
        assert not missing_names(text, "weight version 3", name)


def test_padding_that_somebody_wrote_to_is_counted():
    """Of the padded vocabulary, on the rank that has it; what a transfer writes is not looked at."""
    arch = tiny()
    (part,) = vllm_ranks(arch, 1, 1)
    live = empty([part], torch.bfloat16, 1.0)[0]
    zero_padding(part, live)
    assert nonzero_padding(part, live) == []
    ((start, stop),) = part.padding()["lm_head.weight"]
    live["lm_head.weight"].view(-1)[start] = 0.5
    live["lm_head.weight"].view(-1)[stop - 1] = torch.nan
    live["model.embed_tokens.weight"].view(-1)[stop - 1] = torch.inf
    embeddings, head = nonzero_padding(part, live)
    assert not missing_names(embeddings, "model.embed_tokens.weight", f"1 of {stop - start} elements")
    assert not missing_names(head, "lm_head.weight", f"2 of {stop - start} elements")


def test_whole_digest_depends_on_names():
    assert whole_digest({"a": 1, "b": 2}) == whole_digest({"b": 2, "a": 1}) != whole_digest({"a": 2, "b": 1})
