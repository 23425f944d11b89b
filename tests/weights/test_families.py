"""Every family's table, against what transformers writes, Megatron-Core builds and plain torch makes. Not covered here:
names under the transformer-engine spec against the library itself, which needs a GPU; they are compared with the specs
in Megatron-Core's source as written out in `megatron_reference.py`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarlhf.architectures.families import FAMILIES
from megarlhf.architectures.hf_config import architecture_from_hf, hf_class, hf_config
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import (
    canonical_names,
    hf_placements,
    logical_tensors,
    megatron_placements,
    tensor_inits,
)
from megarlhf.placement import Box
from megarlhf.weights.plan.copy_plan import make_plan
from tests.apart import apart
from tests.refuses import refuses
from tests.weights.cases import copy_in_memory, empty, random_logical
from tests.weights.families import CONFIGS, architecture, config
from tests.weights.megatron_reference import EMBEDDINGS, LLAMA_NORMS, NORMS, megatron_layer
from tests.weights.megatron_shapes import shapes_of

MOE = ("mixtral", "qwen3_moe")


def test_every_family_has_a_case():
    assert {architecture(name).model_type for name in CONFIGS} == FAMILIES.keys()


# --- Hugging Face ---------------------------------------------------------------------------------


def header(path: Path) -> dict[str, tuple[int, ...]]:
    raw = path.read_bytes()
    entries = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return {name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logical_tensors_are_what_transformers_writes(name, head, tmp_path):
    """Names and shapes on disk, which differ from those in memory for experts and tied heads."""
    import transformers

    arch = architecture(name)
    model = getattr(transformers, hf_class(arch.model_type, head))(config(name, num_labels=1))
    model.save_pretrained(tmp_path)
    assert logical_tensors(arch, head) == header(tmp_path / "model.safetensors")
    assert architecture_from_hf(tmp_path) == arch


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_written_config_says_the_same(name, head, tmp_path):
    from transformers import AutoConfig

    arch = architecture(name)
    written = hf_config(arch, head)
    assert architecture_from_hf(written) == arch
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__ == CONFIGS[name][0]
    assert architecture_from_hf(theirs.to_dict()) == arch
    assert theirs.architectures == [hf_class(arch.model_type, head)]
    assert theirs.num_labels == (1 if head == "scalar" else 2)
    theirs.save_pretrained(tmp_path / "again")
    assert architecture_from_hf(tmp_path / "again") == arch


def test_an_architecture_that_a_config_cannot_state_is_refused():
    with refuses("'qwen2'", "qkv_bias = False", "mlp_bias = True"):
        hf_config(replace(architecture("qwen2"), qkv_bias=False, mlp_bias=True))
    with pytest.raises(ValueError, match=r"qkv_bias = True|output_bias = False"):
        hf_config(replace(architecture("llama"), qkv_bias=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_names_of_trunks_and_of_old_files(name):
    arch = architecture(name)
    prefix = FAMILIES[arch.model_type].table.hf_prefix
    logical = logical_tensors(arch)
    assert canonical_names(logical, arch) == {n: n for n in logical}
    short = [n.removeprefix(prefix) for n in logical]
    assert short != list(logical)
    assert canonical_names(short, arch) == dict(zip(logical, short, strict=True))
    buffer = {"gpt2": "h.3.attn.bias", "opt": "x.rotary_emb.inv_freq"}.get(arch.model_type, "a.rotary_emb.inv_freq")
    assert canonical_names([*short, buffer, "surprise"], arch).keys() == {*logical, "surprise"}
    with refuses(short[0], next(iter(logical))):
        canonical_names([*logical, short[0]], arch)


def test_gpt2_buffers_and_biases_are_told_apart():
    names = [f"h.0.attn.{n}" for n in ("bias", "masked_bias", "c_attn.bias", "c_proj.bias")]
    assert canonical_names(names, architecture("gpt2")) == {
        "transformer.h.0.attn.c_attn.bias": "h.0.attn.c_attn.bias",
        "transformer.h.0.attn.c_proj.bias": "h.0.attn.c_proj.bias",
    }


# --- Megatron -------------------------------------------------------------------------------------


def test_names_and_shapes_are_those_of_megatron_core():
    """Its own GPTModel with its own local spec: every rank, TP above the KV groups, uneven PP, VPP, EP, both storages
    of experts. qwen3_biases is left out: Megatron-Core has no bias on the output projection alone."""
    layouts = [
        {"padded_vocab": 100}, {"tp": 2, "pp": 3, "layers_per_stage": [1, 2, 1], "padded_vocab": 256},
        {"tp": 4, "pp": 2, "vpp": 2, "padded_vocab": 512},
    ]  # fmt: skip
    cases = [(name, layout) for name in CONFIGS if name != "qwen3_biases" for layout in layouts]
    cases += [(name, {"ep": 2, "tp": 2, "pp": 2, "padded_vocab": 256}) for name in MOE]
    cases += [(name, {"ep": ep, "tp": 2, "experts": "grouped", "padded_vocab": 128}) for name in MOE for ep in (1, 4)]
    answers = apart(shapes_of, cases)
    for (name, layout), theirs in zip(cases, answers, strict=True):
        parts = megatron_layout(layout).parts(architecture(name))
        assert len(parts) == len(theirs)
        for part, expected in zip(parts, theirs, strict=True):
            assert dict(part.storages) == expected, (name, layout, part.rank)


def megatron_layout(settings: dict) -> MegatronLayout:
    stages = settings.get("layers_per_stage")
    return MegatronLayout(**{**settings, "layers_per_stage": tuple(stages) if stages else None})


LAYOUTS = [
    {"padded_vocab": 100}, {"tp": 2, "padded_vocab": 256, "spec": "te"},
    {"tp": 4, "pp": 3, "layers_per_stage": [1, 2, 1], "padded_vocab": 104},
    {"tp": 2, "pp": 2, "vpp": 2, "padded_vocab": 128, "spec": "te"},
    {"tp": 4, "pp": 2, "vpp": 2, "padded_vocab": 512},
]  # fmt: skip
MOE_LAYOUTS = [
    {"ep": 2, "tp": 2, "pp": 2, "padded_vocab": 256},
    {"ep": 4, "pp": 3, "layers_per_stage": [2, 1, 1], "padded_vocab": 100, "experts": "grouped", "spec": "te"},
    {"ep": 2, "tp": 4, "padded_vocab": 104, "experts": "grouped"},
    {"ep": 1, "tp": 2, "pp": 2, "vpp": 2, "padded_vocab": 104, "experts": "grouped"},
]
ROUND_TRIPS = [(name, layout, "lm") for name in CONFIGS for layout in LAYOUTS]
ROUND_TRIPS += [(name, layout, "lm") for name in MOE for layout in MOE_LAYOUTS]
ROUND_TRIPS += [(name, LAYOUTS[2], "scalar") for name in CONFIGS]


@pytest.mark.parametrize(("name", "settings", "head"), ROUND_TRIPS)
def test_to_megatron_and_back(name, settings, head):
    """Every storage of every rank equals the one made by hand, its padding untouched; back again nothing has changed.
    Each element of the model is a number of its own, so a misplaced one shows."""
    arch = architecture(name)
    logical = random_logical(arch, head)
    layout = megatron_layout(settings)
    parts = layout.parts(arch, head)
    hf = hf_placements(arch, head, rank=99)
    live = empty(parts)
    copy_in_memory(make_plan([hf], parts), {99: logical}, live)
    for at, part in zip(layout.ranks(), parts, strict=True):
        expected = by_hand(arch, logical, layout, at, head)
        assert live[part.rank].keys() == expected.keys()
        for storage, value in expected.items():
            assert torch.equal(live[part.rank][storage], value), (storage, part.rank)
        untouched = {n: int((value == -1).sum()) for n, value in live[part.rank].items() if bool((value == -1).any())}
        gaps = {n: sum(b - a for a, b in boxes) for n, boxes in part.padding().items()}
        assert untouched == gaps
    back = empty([hf])
    copy_in_memory(make_plan(parts, [hf]), live, back)
    assert all(torch.equal(back[99][n], value) for n, value in logical.items())


def by_hand(arch, logical, layout, at, head):
    """All storages of one rank; -1 stands in the padding."""

    def vocab(name):
        padded = torch.full((layout.padded_vocab, arch.hidden_size), -1.0, dtype=torch.float64)
        padded[: arch.vocab_size] = logical[name]
        return padded.chunk(layout.tp)[at.tp]

    words, *positions = EMBEDDINGS.get(arch.model_type, ("model.embed_tokens.weight",))
    final_norm = NORMS.get(arch.model_type, LLAMA_NORMS)[2]
    out = {}
    for chunk, layers in enumerate(layout.chunk_layers(arch.num_layers)[at.pp]):
        prefix = f"model{chunk}." if layout.vpp > 1 else ""
        first = at.pp == 0 and chunk == 0
        if first:
            out[prefix + "embedding.word_embeddings.weight"] = vocab(words)
            for name in positions:
                out[prefix + "embedding.position_embeddings.weight"] = logical[name]
        for local, layer in enumerate(layers):
            of_layout = {"tp": layout.tp, "ep": layout.ep, "spec": layout.spec, "experts": layout.experts}
            layer_storages = megatron_layer(arch, logical, layer, tp_rank=at.tp, ep_rank=at.ep, **of_layout)
            out |= {f"{prefix}decoder.layers.{local}.{n}": value for n, value in layer_storages.items()}
        if at.pp == layout.pp - 1 and chunk == layout.vpp - 1:
            for kind in ("weight", "bias") if arch.norm == "layer" else ("weight",):
                out[f"{prefix}decoder.final_layernorm.{kind}"] = logical[f"{final_norm}.{kind}"]
            if head == "scalar":
                out[prefix + "output_layer.weight"] = logical["score.weight"]
            elif not (arch.tied_embeddings and first):
                out[prefix + "output_layer.weight"] = vocab(words if arch.tied_embeddings else "lm_head.weight")
    return out


def test_gpt2_rows_and_columns_written_out():
    """c_attn [in 64, q 64 | k 64 | v 64] at TP2: rank 1 holds heads 2 and 3, each [q, k, v] of 16 rows, transposed."""
    arch = architecture("gpt2")
    part = MegatronLayout(tp=2, padded_vocab=256).parts(arch)[1]
    storage = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert part.storages[storage] == (96, 64)
    boxes = [(p.box, p.offset // 64, p.strides) for p in part.placements if p.storage == storage]
    columns = [32, 64 + 32, 128 + 32, 48, 64 + 48, 128 + 48]
    expected = [(Box((0, c), (64, c + 16)), 16 * n, (1, 64)) for n, c in enumerate(columns)]
    assert boxes == expected
    (fc2,) = [p for p in part.placements if p.storage == "decoder.layers.1.mlp.linear_fc2.weight"]
    assert (fc2.tensor, fc2.box) == ("transformer.h.1.mlp.c_proj.weight", Box((128, 0), (256, 64)))
    assert (fc2.offset, fc2.strides) == (0, (1, 128))


def test_qkv_rows_above_the_kv_groups_written_out():
    """4 heads, 2 groups, 16 channels: group 0 is [q0 q1 k0 v0]. TP4 gives rank 0 q0 and q1, rank 1 k0 and v0."""
    parts = MegatronLayout(tp=4, padded_vocab=512).parts(architecture("llama"))
    storage = "decoder.layers.0.self_attention.linear_qkv.weight"
    boxes = [
        [(p.tensor.split(".")[-2][0], p.box.start[0], p.box.stop[0]) for p in part.placements if p.storage == storage]
        for part in parts
    ]
    assert boxes == [[("q", 0, 32)], [("k", 0, 16), ("v", 0, 16)], [("q", 32, 64)], [("k", 16, 32), ("v", 16, 32)]]


def test_qkv_shares_may_cut_inside_a_head():
    """6 heads, 2 groups, 6 channels: a group is 18 rows of q, 6 of k, 6 of v; TP6 gives each rank 10 of them."""
    arch = architecture("llama", hidden_size=60, num_attention_heads=6, head_dim=6)
    storage = "decoder.layers.0.self_attention.linear_qkv.weight"
    boxes = [
        [
            (p.tensor.split(".")[-2][0], p.box.start[0], p.box.stop[0], p.offset // 60)
            for p in part.placements
            if p.storage == storage
        ]
        for part in MegatronLayout(tp=6, padded_vocab=768).parts(arch)[3:]
    ]
    assert boxes == [[("q", 18, 28, 0)], [("q", 28, 36, 0), ("k", 6, 8, 8)], [("k", 8, 12, 0), ("v", 6, 12, 4)]]


def test_grouped_experts_written_out():
    """weight1 of EP rank 1 of 2, declared [64, 2 x 192], read as [expert, hidden, gate | up]: w1 of expert 3 begins at
    64 x 192, its row r is column r of that block, w3 stands 96 columns to the right."""
    part = MegatronLayout(ep=2, padded_vocab=128, experts="grouped").parts(architecture("mixtral"))[1]
    storage = "decoder.layers.0.mlp.experts.weight1"
    assert part.storages[storage] == (64, 384)
    boxes = {p.tensor.split("moe.experts.")[1]: (p.offset, p.strides) for p in part.placements if p.storage == storage}
    assert boxes == {
        "2.w1.weight": (0, (1, 192)), "2.w3.weight": (96, (1, 192)), "3.w1.weight": (64 * 192, (1, 192)),
        "3.w3.weight": (64 * 192 + 96, (1, 192)),
    }  # fmt: skip


HEADS = {"hidden_size": 60, "num_attention_heads": 6, "head_dim": 4}


@pytest.mark.parametrize("name, changes, settings, names", [
    ("llama", {}, {"ep": 2}, "ep = 2|llama|ep at 1"), ("mixtral", {}, {"ep": 3}, "ep = 3|4 experts"),
    ("qwen3_moe", {}, {"tp": 16}, "tp = 16|heads"), ("gpt2", {}, {"tp": 3}, "tp = 3|4 KV heads"),
    ("llama", HEADS, {"tp": 6}, "40 rows|QKV|tp = 6"), ("llama", HEADS, {"tp": 3}, "tp = 3|2 KV heads|6 heads"),
])  # fmt: skip
def test_impossible_layouts(name, changes, settings, names):
    with refuses(*names.split("|")):
        MegatronLayout(**{"padded_vocab": 960, **settings}).parts(architecture(name, **changes))


def test_ranks_outside_their_group():
    arch = architecture("mixtral")
    common = {"layers": [0], "first_stage": False, "last_stage": False, "padded_vocab": 128, "rank": 0}
    with refuses("ep_rank = 2", "ep = 2"):
        megatron_placements(arch, tp=1, tp_rank=0, ep=2, ep_rank=2, **common)


@pytest.mark.parametrize("name", CONFIGS)
def test_inits(name):
    """Norms one, biases zero, what writes into the residual stream scaled down, twice a layer (per expert)."""
    arch = architecture(name)
    inits = tensor_inits(arch)
    biases = {n for n in inits if n.endswith(".bias")}
    norms = {n for n, shape in logical_tensors(arch).items() if len(shape) == 1} - biases
    assert {n for n, init in inits.items() if init == "zeros"} == biases
    assert {n for n, init in inits.items() if init == "ones"} == norms
    residual = [n for n, init in inits.items() if init == "residual"]
    assert len(residual) == arch.num_layers * (1 + max(1, arch.num_experts))
    experts = [n for n in inits if ".experts." in n and ".layers.2." in n and n in residual]
    assert [int(n.split(".experts.")[1].split(".")[0]) for n in experts] == list(range(arch.num_experts))


# --- docs/new-architecture.md ---------------------------------------------------------------------


def test_the_example_in_the_docs_is_the_code():
    root = Path(__file__).parents[2]
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", (root / "docs/new-architecture.md").read_text(), re.DOTALL)
    assert [name.rsplit("/", 1)[1] for name, _ in blocks] == ["mixtral.py", "__init__.py"]
    files = [(root / name).read_text() for name, _ in blocks]
    assert blocks[0][1] == files[0]
    assert blocks[1][1] in files[1]
