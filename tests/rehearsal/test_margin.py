"""What a rehearsal cannot see: sums by hand, what scales with what, and that each number can be set and has a source.

Not covered: whether the numbers are right, which takes a GPU (`make test-gpu` compares whole phases there).
"""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from megarlhf.rehearsal.cost_model.margin import (
    Facts,
    MarginConfig,
    engine_items,
    facts_of,
    margin,
    token_bucket,
    total_bytes,
)
from megarlhf.rehearsal.fake_device.ledger import PhaseMemory
from megarlhf.rehearsal.timeline.messages import Reached

MIB = 2**20
LLAMA_3_70B = Facts(
    memberships=40, groups=4, near_peers=0, far_groups=1, passing_bytes=20 * 2**30, tokens=8192, heads=8, kv_heads=1,
    head_dim=128, hidden=8192, layer_norm=False, layers="te",
)  # fmt: skip


def by_name(facts, cfg=None):
    return {item.name: item for item in margin(cfg or MarginConfig(), facts)}


def changed(**changes):
    return Facts(**{**LLAMA_3_70B.__dict__, **changes})


def test_a_rank_of_70b_by_hand():
    """tp 8 in a node, stages between nodes, 40 groups of which 4 make collectives.

    NCCL: a group 24 x 2 x 12 = 576 MiB, the stages' 512, 36 unused ones 4 each. Attention: 8192 tokens x (3 x 8 heads x
    128 + 8) x 4 B = 101 MB. Norms: 132 x 8192 x 4 B.
    """
    items = {name: item.nbytes for name, item in by_name(LLAMA_3_70B).items()}
    assert items == {
        "CUDA context": 600 * MIB, "NCCL: collectives": 4 * 576 * MIB, "NCCL: sends and receives in a node": 0,
        "NCCL: sends and receives between nodes": 512 * MIB, "NCCL: communicators without a message": 36 * 4 * MIB,
        "cuBLAS workspaces": 64 * MIB, "attention's backward": 8192 * (3 * 8 * 128 + 8) * 4,
        "norms' backward": 132 * 8192 * 4, "temporaries inside other kernels": 128 * MIB, "fragmentation": 2 * 2**30,
    }  # fmt: skip
    items = margin(MarginConfig(), LLAMA_3_70B)
    assert total_bytes(items) == sum(item.nbytes for item in items)
    assert total_bytes(items, before_tensors=True) == (600 + 4 * 576 + 512 + 144) * MIB


def test_each_item_says_how_it_scales_and_where_it_is_from():
    for item in [*margin(MarginConfig(), LLAMA_3_70B), *engine_items(MarginConfig(), 8)]:
        assert item.source
        assert item.scaling
    assert by_name(LLAMA_3_70B)["NCCL: collectives"].scaling == "4 groups x 24 channels x 2 algorithms x 12 MiB"


@pytest.mark.parametrize(
    "key, change, item, nbytes",
    [
        ({"context_mib": 100}, {}, "CUDA context", 100 * MIB),
        ({"nccl": {"channels": 8}}, {}, "NCCL: collectives", 4 * 8 * 2 * 12 * MIB),
        ({"nccl": {"algorithms": 1}}, {"groups": 2}, "NCCL: collectives", 2 * 24 * 12 * MIB),
        ({"nccl": {"connection_mib": 8.5}}, {"groups": 1}, "NCCL: collectives", 24 * 2 * 17 * MIB // 2),
        ({"nccl": {"peer_channels": 2}}, {"near_peers": 3}, "NCCL: sends and receives in a node", 3 * 2 * 12 * MIB),
        ({"nccl": {"network_mib": 16}}, {"far_groups": 2}, "NCCL: sends and receives between nodes", 32 * MIB),
        ({"nccl": {"unused_mib": 1}}, {"memberships": 5}, "NCCL: communicators without a message", MIB),
        ({"cublas_mib": 8, "streams": 3}, {}, "cuBLAS workspaces", 24 * MIB),
        ({"multiprocessors": 148}, {"layer_norm": True}, "norms' backward", 148 * 8192 * 4 * 2),
        ({"kernels_mib": 0}, {}, "temporaries inside other kernels", 0),
        ({"fragmentation": 0.25}, {}, "fragmentation", 5 * 2**30),
    ],
)
def test_every_number_can_be_set(key, change, item, nbytes):
    assert by_name(changed(**change), MarginConfig.model_validate(key))[item].nbytes == nbytes
    assert by_name(changed(**change))[item].nbytes != nbytes or not nbytes


def test_unknown_and_impossible_numbers_are_refused():
    for tree in ({"contextmib": 1}, {"nccl": {"buffers": 1}}, {"context_mib": -1}, {"fragmentation": 1.5}):
        with pytest.raises(ValidationError):
            MarginConfig.model_validate(tree)


def test_attention_without_shared_heads_and_without_transformer_engine():
    """One gradient of queries in fp32 where each head has its own keys; torch's kernel works on the tokens as they are,
    and expands keys and values in 16 bits."""
    own = by_name(changed(kv_heads=8))["attention's backward"].nbytes
    assert own == 8192 * (8 * 128 + 8) * 4
    torch = by_name(changed(layers="local", tokens=5000))
    assert torch["attention's backward"].nbytes == 5000 * (8 * 128 * (4 + 2 + 2) + 8 * 4)
    assert "norms' backward" not in torch


def test_buckets_of_tokens():
    found = {tokens: token_bucket(tokens) for tokens in (1, 1024, 1025, 5000, 8192, 32768, 32769, 70000)}
    assert found == {1: 1024, 1024: 1024, 1025: 2048, 5000: 8192, 8192: 8192, 32768: 32768, 32769: 65536, 70000: 98304}


def test_what_vllm_takes_from_its_own_share():
    """Graphs; under tensor parallelism two communicators and the buffers of its own all-reduce."""
    cfg = MarginConfig()
    assert [item.nbytes for item in engine_items(cfg, 8)] == [1024 * MIB, (2 * 576 + 24) * MIB]
    assert [item.nbytes for item in engine_items(cfg, 1)] == [1024 * MIB]
    assert engine_items(cfg, 0) == []


def test_facts_of_a_rank():
    """What stays at the peak does not fragment."""
    kinds = {"parameters": 5, "engine's cache": 50, "activations": 7, "logits and kernels": 1}
    peak = PhaseMemory(
        step=1, phase="train/actor", start=0, peak=63, end=0, host_peak=0, by_kind=kinds, largest=[], curve=[]
    )
    arch = SimpleNamespace(num_heads=64, num_kv_heads=4, head_dim=128, hidden_size=8192, norm="rms")
    facts = facts_of(Reached(3, 1, 1), 9, peak, arch, tp=8, tokens=100, layers="te")
    assert (facts.groups, facts.near_peers, facts.far_groups, facts.memberships) == (3, 1, 1, 9)
    assert (facts.passing_bytes, facts.heads, facts.kv_heads, facts.tokens) == (8, 8, 1, 100)
