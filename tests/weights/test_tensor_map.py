"""The Llama table: row orders written out, names and shapes, and values against transformers and vLLM."""

import ast
from pathlib import Path

import pytest
import torch

from megarlhf.architectures.placements import (
    hf_placements,
    logical_tensors,
    megatron_placements,
    padded_vocab_size,
    vllm_placements,
)
from megarlhf.placement import Box, Placement, merge_ranks
from megarlhf.weights.plan.copy_plan import make_plan
from tests.refuses import refuses
from tests.weights.cases import copy_in_memory, empty, megatron_ranks, random_logical, tiny, vllm_ranks

L0 = "model.layers.0.self_attn."
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def row_sources(part, storage, hidden):
    """(tensor, logical row) of every row of a storage, None for padding; columns must be whole."""
    rows = [None] * part.storages[storage][0]
    for p in part.placements:
        if p.storage == storage:
            assert p.offset % hidden == 0
            for i in range(p.box.shape[0]):
                rows[p.offset // hidden + i] = (p.tensor.split(".")[-2], p.box.start[0] + i)
    return rows


def test_qkv_rows_by_hand():
    """4 heads and 2 KV heads of 2 channels. Megatron: [q0 q1 k0 v0 | q2 q3 k1 v1]; vLLM: [q | k | v]."""
    arch = tiny(head_dim=2)

    def rows(name, *heads):
        return [(f"{name}_proj", 2 * head + c) for head in heads for c in (0, 1)]

    def group(first, second, head):
        return rows("q", first, second) + rows("k", head) + rows("v", head)

    tp1, tp2 = megatron_ranks(arch, 1, [range(3)]), megatron_ranks(arch, 2, [range(3)])
    assert row_sources(tp1[0], QKV, 64) == group(0, 1, 0) + group(2, 3, 1)
    assert [row_sources(part, QKV, 64) for part in tp2] == [group(0, 1, 0), group(2, 3, 1)]
    name = L0 + "qkv_proj.weight"
    assert row_sources(vllm_ranks(arch, 1)[0], name, 64) == rows("q", 0, 1, 2, 3) + rows("k", 0, 1) + rows("v", 0, 1)
    assert row_sources(vllm_ranks(arch, 2)[1], name, 64) == group(2, 3, 1)
    four = vllm_ranks(arch, 4)  # a KV head on two ranks
    expected = [rows("q", head) + rows("k", head // 2) + rows("v", head // 2) for head in range(4)]
    assert [row_sources(part, name, 64) for part in four] == expected


def test_gate_up_and_vocabulary_rows():
    """fc1 on rank 1 of 2 is [gate rows 48..96; up rows 48..96]; vocabulary 100 pads to 256 and to 128."""
    arch = tiny()
    part = megatron_ranks(arch, 2, [range(3)])[1]
    expected = [("gate_proj", i) for i in range(48, 96)] + [("up_proj", i) for i in range(48, 96)]
    assert row_sources(part, "decoder.layers.1.mlp.linear_fc1.weight", 64) == expected
    assert part.storages["embedding.word_embeddings.weight"] == (128, 64)
    assert row_sources(part, "embedding.word_embeddings.weight", 64) == [None] * 128
    engine = vllm_ranks(arch, 2)[1]
    expected = [("embed_tokens", i) for i in range(64, 100)] + [None] * 28
    assert row_sources(engine, "model.embed_tokens.weight", 64) == expected
    gap = [(36 * 64, 64 * 64)]
    assert engine.padding() == {"model.embed_tokens.weight": gap, "lm_head.weight": gap}


def test_row_parallel_columns():
    """linear_proj on rank 1 of 2 holds columns 32..64, as one view of a [64, 32] storage."""
    part = megatron_ranks(tiny(), 2, [range(3)])[1]
    (placed,) = [p for p in part.placements if p.storage == "decoder.layers.2.self_attention.linear_proj.weight"]
    box = Box((0, 32), (64, 64))
    assert placed == Placement("model.layers.2.self_attn.o_proj.weight", box, placed.storage, 0, (32, 1))


@pytest.mark.parametrize("vocab, tp, expected", [
    (128256, 8, 129024), (50257, 8, 51200), (100, 1, 128), (256, 2, 256),
])  # fmt: skip
def test_padded_vocab(vocab, tp, expected):
    """Llama 3 at TP8: 16128 rows a rank."""
    assert padded_vocab_size(vocab, tp) == expected


def test_megatron_names_and_shapes():
    arch = tiny(attention_bias=True, mlp_bias=True)
    args = {"tp": 2, "tp_rank": 0, "layers": [2], "last_stage": True, "padded_vocab": 256, "rank": 5}
    part = megatron_placements(arch, first_stage=False, **args)
    layer = "decoder.layers.0."
    assert part.rank == 5
    assert part.storages == {
        layer + "input_layernorm.weight": (64,), layer + "self_attention.linear_qkv.weight": (64, 64),
        layer + "self_attention.linear_qkv.bias": (64,), layer + "self_attention.linear_proj.weight": (64, 32),
        layer + "self_attention.linear_proj.bias": (64,),
        layer + "pre_mlp_layernorm.weight": (64,), layer + "mlp.linear_fc1.weight": (96, 64),
        layer + "mlp.linear_fc1.bias": (96,), layer + "mlp.linear_fc2.weight": (64, 48),
        layer + "mlp.linear_fc2.bias": (64,), "decoder.final_layernorm.weight": (64,), "output_layer.weight": (128, 64),
    }  # fmt: skip
    assert {name.split(".")[2] for name in part.tensors if "layers" in name} == {"2"}
    te = megatron_placements(arch, first_stage=False, spec="te", **args)
    assert te.storages.keys() - part.storages.keys() == {
        layer + "self_attention.linear_qkv.layer_norm_weight",
        layer + "mlp.linear_fc1.layer_norm_weight",
    }
    assert len(te.storages) == len(part.storages)


def test_tied_and_scalar_heads():
    tied = tiny(tie_word_embeddings=True)
    assert "lm_head.weight" not in logical_tensors(tied)
    assert "output_layer.weight" not in megatron_ranks(tied, 1, [range(3)])[0].storages
    last = megatron_ranks(tied, 1, [[0], [1, 2]])[1]
    assert [p.tensor for p in last.placements if p.storage == "output_layer.weight"] == ["model.embed_tokens.weight"]
    assert "lm_head.weight" not in vllm_ranks(tied, 1)[0].storages
    for arch in (tied, tiny()):
        critic = megatron_ranks(arch, 2, [range(3)], head="scalar")[1]
        assert critic.storages["output_layer.weight"] == (1, 64)
        assert logical_tensors(arch, "scalar")["score.weight"] == (1, 64)
        assert "lm_head.weight" not in logical_tensors(arch, "scalar")


def test_hf_table_is_what_transformers_has():
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    from tests.weights.cases import transformers_config

    for changes in ({}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}):
        model = LlamaForCausalLM(transformers_config(**changes))
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert logical_tensors(tiny(**changes)) == shapes
        scored = LlamaForSequenceClassification(transformers_config(num_labels=1, **changes))
        shapes = {name: tuple(p.shape) for name, p in scored.named_parameters()}
        assert logical_tensors(tiny(**changes), "scalar") == shapes


def test_vllm_constants_are_those_of_the_installed_vllm():
    """Read from the source, since importing vLLM costs seconds. Its loader is compared elsewhere."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    layers = Path(spec.origin).parent / "model_executor"
    tree = ast.parse((layers / "layers" / "vocab_parallel_embedding.py").read_text())
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert constants["DEFAULT_VOCAB_PADDING_SIZE"] == 64


@pytest.mark.parametrize("stages", [[[0, 1, 2]], [[0], [1, 2]], [[0, 1], [], [2]]])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_vllm_gets_the_model_from_megatron(tp, stages, tied):
    """Values of every vLLM storage at tp 1, 2, 4, computed here by concatenation of the logical tensors."""
    arch = tiny(tie_word_embeddings=tied, attention_bias=True)
    logical = random_logical(arch)
    megatron = megatron_ranks(arch, tp, stages)
    trained = empty(megatron)
    hf = hf_placements(arch, rank=99)
    copy_in_memory(make_plan([hf], megatron), {99: logical}, trained)
    for engine_tp in (1, 2, 4):
        ranks = vllm_ranks(arch, engine_tp)
        live = empty(ranks, fill=0.0)
        copy_in_memory(make_plan(megatron, ranks), trained, live)
        for rank in range(engine_tp):
            for name, value in vllm_by_hand(arch, logical, engine_tp, rank).items():
                assert torch.equal(live[rank].pop(name), value), name
            assert not live[rank]


def vllm_by_hand(arch, logical, tp, rank):
    def heads(name, count, per_rank, first):
        d = arch.head_dim
        assert logical[name].shape[0] == count * d
        return logical[name][first * d : (first + per_rank) * d]

    def columns(name):
        return logical[name].chunk(tp, dim=1)[rank]

    def vocab(name):
        padded = torch.zeros(128, 64, dtype=torch.float64)
        padded[:100] = logical[name]
        return padded.chunk(tp)[rank]

    kv_per_rank, first_kv = max(1, 2 // tp), rank * 2 // tp
    out = {
        "model.embed_tokens.weight": vocab("model.embed_tokens.weight"),
        "model.norm.weight": logical["model.norm.weight"],
    }
    if not arch.tied_embeddings:
        out["lm_head.weight"] = vocab("lm_head.weight")
    for layer in range(3):
        p = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            q = heads(f"{p}self_attn.q_proj.{kind}", 4, 4 // tp, rank * 4 // tp)
            kv = [heads(f"{p}self_attn.{n}_proj.{kind}", 2, kv_per_rank, first_kv) for n in "kv"]
            out[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat([q, *kv])
        gate, up = (logical[f"{p}mlp.{n}_proj.weight"].chunk(tp)[rank] for n in ("gate", "up"))
        out[p + "mlp.gate_up_proj.weight"] = torch.cat([gate, up])
        out[p + "mlp.down_proj.weight"] = columns(p + "mlp.down_proj.weight")
        out[p + "self_attn.o_proj.weight"] = columns(p + "self_attn.o_proj.weight")
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.bias"):
            out[p + name] = logical[p + name]
    return out


def test_virtual_stages_of_one_rank_merge():
    arch = tiny()
    args = {"tp": 1, "tp_rank": 0, "padded_vocab": 128, "rank": 0}
    chunks = [
        megatron_placements(arch, layers=[0], first_stage=True, last_stage=False, **args),
        megatron_placements(arch, layers=[2], first_stage=False, last_stage=True, **args),
    ]
    with refuses("two parts"):
        merge_ranks(chunks)
    merged = merge_ranks([chunk.prefixed(f"chunk{i}.") for i, chunk in enumerate(chunks)])
    assert merged.tensors.keys() == {n for n in logical_tensors(arch) if "layers.1." not in n}
    assert "chunk1.decoder.layers.0.mlp.linear_fc2.weight" in merged.storages


@pytest.mark.parametrize("call, names", [
    (lambda a: megatron_ranks(a, 8, [range(3)]), "tp = 8|2 KV heads|4 heads"),
    (lambda a: megatron_ranks(a, 2, [[0, 3]]), "layers = [0, 3]|0..2"),
    (lambda a: megatron_ranks(a, 2, [[0, 0]]), "layers = [0, 0]|distinct"),
    (lambda a: megatron_ranks(a, 1, [range(3)], padded_vocab=64), "100 rows|64"),
    (lambda a: vllm_placements(a, tp=2, tp_rank=2, rank=0), "tp_rank = 2|0..1"),
    (lambda a: vllm_placements(a, tp=3, tp_rank=0, rank=0), "divide|tp = 3"),
])  # fmt: skip
def test_impossible_layouts(call, names):
    with refuses(*names.split("|")):
        call(tiny())
