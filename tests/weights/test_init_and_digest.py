"""Random weights and digests that know nothing of layouts."""

import math

import pytest
import torch

from megarlhf.weights import digest as digest_module
from megarlhf.weights import random_init
from megarlhf.weights.digest import combine, compare, digest_boxes, owned_placements
from megarlhf.weights.plan import make_plan
from megarlhf.weights.random_init import fill_random
from megarlhf.weights.tensor_map import hf_placements, logical_tensors
from tests.weights.cases import carry_in_memory, empty, megatron_ranks, tiny, vllm_ranks

BF16 = torch.bfloat16


def filled(arch, ranks, dtype=torch.float32, head="lm", seed=11, **options):
    live = empty(ranks, dtype)
    for part in ranks:
        fill_random(part, live[part.rank], seed=seed, std=0.02, arch=arch, head=head, **options)
    return live


def digest(ranks, live, dtype=BF16):
    """As `model_digest`, with all ranks in this process."""
    tensors = {name: shape for part in ranks for name, shape in part.tensors.items()}
    return combine(*(digest_boxes(owned_placements(p.rank, ranks), tensors, live[p.rank], dtype) for p in ranks))


@pytest.mark.parametrize("block", [1 << 20, 1000])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_random_weights_are_the_same_at_every_layout(head, block, monkeypatch):
    """Also when a tensor is drawn in many blocks; padding is zero."""
    monkeypatch.setattr(random_init, "_BLOCK_ELEMENTS", block)
    arch = tiny(attention_bias=True)
    hf = hf_placements(arch, head)
    whole = filled(arch, [hf], head=head)
    for tp, stages in ((1, [[0, 1, 2]]), (2, [[0], [1, 2]])):
        ranks = megatron_ranks(arch, tp, stages, head=head)
        live = filled(arch, ranks, head=head)
        expected = empty(ranks, torch.float32, 0.0)
        carry_in_memory(make_plan([hf], ranks), whole, expected)
        for part in ranks:
            assert all(torch.equal(live[part.rank][n], v) for n, v in expected[part.rank].items())


def test_random_weights_have_the_stated_distributions():
    arch = tiny(hidden_size=512, intermediate_size=1024, attention_bias=True)
    part = hf_placements(arch, "scalar")
    live = filled(arch, [part], head="scalar")[0]
    layer = "model.layers.1."
    for name, std in (
        ("model.embed_tokens.weight", 0.02),
        (layer + "self_attn.q_proj.weight", 0.02),
        (layer + "mlp.up_proj.weight", 0.02),
        (layer + "self_attn.o_proj.weight", 0.02 / math.sqrt(6)),
        (layer + "mlp.down_proj.weight", 0.02 / math.sqrt(6)),
    ):
        assert live[name].std().item() == pytest.approx(std, rel=0.02), name
        assert abs(live[name].mean().item()) < 0.02 * std * 3
    assert live["score.weight"].std().item() == pytest.approx(1 / math.sqrt(513), rel=0.15)
    assert bool((live[layer + "input_layernorm.weight"] == 1).all())
    assert not live[layer + "self_attn.k_proj.bias"].any()
    assert not torch.equal(live[layer + "mlp.up_proj.weight"], live[layer + "mlp.gate_proj.weight"])
    other = filled(arch, [part], head="scalar", seed=12, score="zeros")[0]
    assert not other["score.weight"].any()
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


def test_chunks_do_not_change_a_digest(monkeypatch):
    arch = tiny()
    ranks = vllm_ranks(arch, 2)
    live = filled(arch, ranks)
    expected = digest(ranks, live)
    monkeypatch.setattr(digest_module, "_CHUNK_ELEMENTS_CPU", 37)
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


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (_swap_two, ["model.layers.0.mlp.down_proj.weight"]),
        (_stale_row, ["lm_head.weight"]),
        (_swap_gate_and_up, [f"model.layers.2.mlp.{n}_proj.weight" for n in ("gate", "up")]),
        (_one_bit, ["model.layers.1.self_attn.o_proj.weight"]),
    ],
)
def test_damage_shows_in_the_damaged_tensors_only(damage, names):
    """Not covered: a replica that nobody owns; `transfer_digests` sees it (test_carry)."""
    arch = tiny()
    ranks = vllm_ranks(arch, 2)
    live = filled(arch, ranks, BF16)
    before = digest(ranks, live)
    damage(live)
    assert compare(before, digest(ranks, live)) == names


def test_owners_cover_the_model_once():
    """With replicated norms and KV heads, and a tied embedding on two stages."""
    arch = tiny(tie_word_embeddings=True)
    for ranks in (vllm_ranks(arch, 4), megatron_ranks(arch, 2, [[0], [1, 2]], 2)):
        owned = [p for part in ranks for p in owned_placements(part.rank, ranks)]
        for name, shape in logical_tensors(arch).items():
            count = torch.zeros(shape)
            for p in owned:
                if p.tensor == name:
                    count[tuple(slice(a, b) for a, b in zip(p.box.start, p.box.stop, strict=True))] += 1
            assert bool((count == 1).all()), name


def test_compare_names_what_one_side_lacks():
    assert compare({"a": 1, "b": 2}, {"a": 1, "c": 2}) == ["b", "c"]
