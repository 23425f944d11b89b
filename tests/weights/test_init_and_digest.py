"""Random weights and digests that know nothing of layouts."""

import math

import pytest
import torch

from megarlhf.architectures.placements import hf_placements, logical_tensors
from megarlhf.placement import Box, Placement, contiguous_strides
from megarlhf.weights.checks import digest as digest_module
from megarlhf.weights.checks.digest import compare, digest_boxes, replica_counts, replica_digests
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport import random_init
from megarlhf.weights.transport.random_init import fill_random
from tests.refuses import refuses
from tests.weights.cases import copy_in_memory, empty, megatron_ranks, tiny, vllm_ranks

BF16 = torch.bfloat16


def filled(arch, ranks, dtype=torch.float32, head="lm", seed=11, **options):
    live = empty(ranks, dtype)
    for part in ranks:
        fill_random(part, live[part.rank], seed=seed, std=0.02, arch=arch, head=head, **options)
    return live


def digest(ranks, live, dtype=BF16):
    """Of the model, each element once, with all ranks in this process."""
    total = {}
    for part in ranks:
        for name, value in replica_digests(part.rank, ranks, live[part.rank], dtype=dtype)[0].items():
            total[name] = (total.get(name, 0) + value) % 2**64
    return total


@pytest.mark.parametrize("block", [1 << 20, 1000])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_random_weights_are_the_same_at_every_layout(head, block, monkeypatch):
    monkeypatch.setattr(random_init, "_BLOCK_ELEMENTS", block)
    arch = tiny(attention_bias=True)
    hf = hf_placements(arch, head)
    whole = filled(arch, [hf], head=head)
    for tp, stages in ((1, [[0, 1, 2]]), (2, [[0], [1, 2]])):
        ranks = megatron_ranks(arch, tp, stages, head=head)
        live = filled(arch, ranks, head=head)
        expected = empty(ranks, torch.float32, 0.0)
        copy_in_memory(make_plan([hf], ranks), whole, expected)
        for part in ranks:
            assert all(torch.equal(live[part.rank][n], v) for n, v in expected[part.rank].items())


def test_random_weights_have_the_stated_distributions():
    arch = tiny(hidden_size=512, intermediate_size=1024, attention_bias=True)
    part = hf_placements(arch, "scalar")
    live = filled(arch, [part], head="scalar")[0]
    layer = "model.layers.1."
    for name, std in (
        ("model.embed_tokens.weight", 0.02), (layer + "self_attn.q_proj.weight", 0.02),
        (layer + "mlp.up_proj.weight", 0.02), (layer + "self_attn.o_proj.weight", 0.02 / math.sqrt(6)),
        (layer + "mlp.down_proj.weight", 0.02 / math.sqrt(6)),
    ):  # fmt: skip
        assert live[name].std().item() == pytest.approx(std, rel=0.02), name
        assert abs(live[name].mean().item()) < 0.02 * std * 3
    assert live["score.weight"].std().item() == pytest.approx(1 / math.sqrt(513), rel=0.15)
    assert bool((live[layer + "input_layernorm.weight"] == 1).all())
    assert not live[layer + "self_attn.k_proj.bias"].any()
    assert not torch.equal(live[layer + "mlp.up_proj.weight"], live[layer + "mlp.gate_proj.weight"])
    other = filled(arch, [part], head="scalar", seed=12)[0]
    assert not torch.equal(other["model.embed_tokens.weight"], live["model.embed_tokens.weight"])


def test_only_the_head_is_drawn_anew():
    arch = tiny()
    (part,) = megatron_ranks(arch, 1, [range(3)], head="scalar")
    live = empty([part], torch.float32)[0]
    fill_random(part, live, seed=1, std=0.02, arch=arch, head="scalar", only=frozenset({"score.weight"}))
    assert not bool((live.pop("output_layer.weight") == -1).any())
    assert all(bool((value == -1).all()) for value in live.values())


def test_digests_do_not_know_the_layout():
    """fp32 masters on any Megatron layout and bf16 engines agree on the bits that were sent."""
    arch = tiny(tie_word_embeddings=True)
    expected = digest([hf_placements(arch)], filled(arch, [hf_placements(arch)]))
    assert expected.keys() == logical_tensors(arch).keys()
    assert len(set(expected.values())) > len(expected) - 7  # the norms differ in nothing
    layouts = [megatron_ranks(arch, 2, [[0], [1, 2]]), megatron_ranks(arch, 1, [[0, 1], [2]], 2)]
    layouts += [vllm_ranks(arch, 2), vllm_ranks(arch, 4)]
    for ranks in layouts:
        assert digest(ranks, filled(arch, ranks)) == expected
        assert digest(ranks, filled(arch, ranks, BF16)) == expected
    fp32 = digest([hf_placements(arch)], filled(arch, [hf_placements(arch)]), torch.float32)
    assert compare(fp32, expected) == sorted(expected)


def test_blocks_do_not_change_a_digest(monkeypatch):
    arch = tiny()
    ranks = vllm_ranks(arch, 2)
    live = filled(arch, ranks)
    expected = digest(ranks, live)
    monkeypatch.setattr(digest_module, "block_elements", lambda device: 37)
    assert digest(ranks, live) == expected


def _swap_two(live):
    flat = live[0]["model.layers.0.mlp.down_proj.weight"].view(-1)
    flat[[3, 77]] = flat[[77, 3]]


def _stale_row(live):
    live[1]["lm_head.weight"][4] = 0.0


def _swap_gate_and_up(live):
    fused = live[1]["model.layers.2.mlp.gate_up_proj.weight"]
    fused.copy_(torch.cat([fused[48:], fused[:48]]))


def _one_bit(live):
    live[0]["model.layers.1.self_attn.o_proj.weight"].view(torch.int16)[9, 7] ^= 1


@pytest.mark.parametrize("damage, names", [
    (_swap_two, ["model.layers.0.mlp.down_proj.weight"]), (_stale_row, ["lm_head.weight"]),
    (_swap_gate_and_up, [f"model.layers.2.mlp.{n}_proj.weight" for n in ("gate", "up")]),
    (_one_bit, ["model.layers.1.self_attn.o_proj.weight"]),
])  # fmt: skip
def test_damage_shows_in_the_damaged_tensors_only(damage, names):
    """Not covered: a replica that nobody owns; the certificate sees it."""
    arch = tiny()
    ranks = vllm_ranks(arch, 2)
    live = filled(arch, ranks, BF16)
    before = digest(ranks, live)
    damage(live)
    assert compare(before, digest(ranks, live)) == names


def test_a_digest_by_hand():
    """In Python's integers, as `digest.py` and SplitMix64 say: a box of 2 x 3 that begins at (1, 4)."""
    size, golden = 2**64, 0x9E3779B97F4A7C15

    def mix(z):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ z >> shift) * factor % size
        return z ^ z >> 31

    def key(dim, index):
        return mix((mix((index * golden + dim + 1) % size) + golden) % size) | 1

    values = torch.tensor([[1.0, -2.0, 0.0], [3.5, 1e-3, -1.0]])
    bits = values.view(torch.int32).tolist()
    expected = sum((bits[i][j] + golden) ** 2 * key(0, 1 + i) * key(1, 4 + j) for i in range(2) for j in range(3))
    placement = Placement("t", Box((1, 4), (3, 7)), "s", 0, (3, 1))
    assert digest_boxes([placement], {"s": values}, torch.float32) == {"t": expected % size}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)])
def test_every_exchange_of_two_elements_and_every_bit_shows(dtype, shape):
    """Numbers that differ in sign alone among them."""
    values = torch.empty(shape, dtype=dtype)
    flat = values.view(-1)
    flat[::2] = torch.arange(1, flat.numel() // 2 + 1)
    flat[1::2] = -flat[::2]
    part = Placement("t", Box.whole(shape), "s", 0, contiguous_strides(shape))

    def digest_now():
        return digest_boxes([part], {"s": values}, dtype)["t"]

    before = digest_now()
    for a in range(flat.numel()):
        for b in range(a):
            flat[[a, b]] = flat[[b, a]]
            assert digest_now() != before, (a, b)
            flat[[a, b]] = flat[[b, a]]
    words = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    for bit in range(dtype.itemsize * 8 - 1):
        words[-1] ^= 1 << bit
        assert digest_now() != before, bit
        words[-1] ^= 1 << bit
    words[-1] = ~words[-1]
    assert digest_now() != before, "every bit at once"
    words[-1] = ~words[-1]
    assert digest_now() == before


def test_how_often_ranks_hold_the_model():
    """Norms, embeddings and KV heads on several ranks of an engine; a part that is held more often is refused."""
    arch = tiny()
    for tp, engines in ((1, 3), (2, 2), (4, 1)):
        ranks = vllm_ranks(arch, tp, engines)
        times = replica_counts(ranks)
        assert times.keys() == logical_tensors(arch).keys()
        assert times["model.norm.weight"] == tp * engines
        assert times["model.layers.0.self_attn.k_proj.weight"] == engines * max(1, tp // 2)
        assert times["model.layers.0.mlp.down_proj.weight"] == engines
    with refuses("ranks hold", "equally often"):
        replica_counts(vllm_ranks(arch, 2, 2)[:3])


def test_compare_names_what_one_side_lacks():
    assert compare({"a": 1, "b": 2}, {"a": 1, "c": 2}) == ["b", "c"]
