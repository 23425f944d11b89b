"""The table of TransformerEngine's layers against what the stand-ins keep, and both against hand calculations.

Not covered: TransformerEngine itself, which needs a GPU; padded rows of the local layers; experts under a real routing.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
import torch

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.rehearsal.fake_device.ledger import GPU_BLOCK
from megarlhf.rehearsal.transformer_engine.replace import replace_layers
from tests.command import ROOT, python
from tests.rehearsal.layer_cases import CASES, MODELS, TOKENS
from tests.rehearsal.saved_tensors import EXAMPLES, LOCAL, TE, example, rows, saved_tensors, traits_of

PAGE = ROOT / "docs" / "rehearsal-gpu.md"
TABLES = {"te": TE, "local": LOCAL}


@pytest.fixture(scope="module")
def seen():
    done = python("-m", "tests.rehearsal.layer_cases")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def architectures(tmp_path_factory):
    found = {}
    for name, config in MODELS.items():
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = architecture_from_hf(folder)
    return found


def in_blocks(nbytes):
    return -(-nbytes // GPU_BLOCK) * GPU_BLOCK


def by_table(case, arch, expert_rows=()):
    """Bytes that the ledger shows for one layer."""
    tensors = saved_tensors(
        TABLES[case.layers], arch, TOKENS, tp=case.tp, sequence_parallel=case.sequence_parallel, expert_rows=expert_rows
    )
    return sum(in_blocks(nbytes) for _, nbytes in tensors)


def of_last_layer(record):
    return record["live"][-1] - record["live"][-2]


DENSE = [
    name
    for name, case in CASES.items()
    if case.trains and not case.padded and not case.tree and case.cp == 1 and "moe" not in case.model
]


@pytest.mark.parametrize("name", DENSE)
def test_a_layer_keeps_what_the_table_says(seen, architectures, name):
    """To the byte: SwiGLU with and without norms of queries and keys, GELU, ReLU; RMSNorm and LayerNorm; turned and
    interleaved; on one rank, cut, and cut with sequence parallelism."""
    case = CASES[name]
    assert len(seen[name]["live"]) == 3
    assert of_last_layer(seen[name]) == by_table(case, architectures[case.model])


def test_rows_with_trees_keep_no_more(seen, architectures):
    """Query, key, value, output and statistics, without the state of the generator: beside TransformerEngine the same;
    of our layers values in a piece in place of the product that they are a part of. Where nothing is turned the product
    is kept, of which all three are parts."""
    for name in ("llama-3-70b tree te", "gpt2-xl tree te"):
        assert of_last_layer(seen[name]) == by_table(CASES[name], architectures[CASES[name].model]) - GPU_BLOCK
    local = by_table(CASES["llama-3-70b tree local"], architectures["llama-3-70b"])
    values = 2 * TOKENS * 128
    assert of_last_layer(seen["llama-3-70b tree local"]) == local - GPU_BLOCK - 10 * values + values


def test_the_cases_cover_the_table(architectures):
    """Every entry of both tables belongs to a layer that is rehearsed."""
    for layers, table in TABLES.items():
        traits = [traits_of(architectures[case.model]) for case in CASES.values() if case.layers == layers]
        assert [entry for entry in table if not any(entry.only <= each for each in traits)] == []


def test_llama_3_70b_by_hand(seen, architectures):
    """tp 8: 10,240 of 81,920 columns of qkv, 8 query heads, one group, an MLP of 28672 / 8 = 3584.

    With sequence parallelism a rank has an eighth of the rows of the norms, 8192 / 8 = 1024 elements a token:
      norms      2 x (2 x 1024 x 2 B + 4 B / 8)                    = 8,193
      attention  q, k, v (1024 + 2 x 128) x 2 B, out 2,048, 8 x 4  = 4,640
      MLP        (2 + 1) x 3584 x 2 B                              = 21,504
    34,337 B; a gate that is not one step would keep 2 x 3584 x 2 B = 14,336 more. Without sequence parallelism the
    norms keep 2 x (2 x 8192 x 2 B + 4 B) = 65,544 and all 91,688: 7.3 MB a token over 80 layers.
    """
    arch = architectures["llama-3-70b"]

    def per_token(sequence_parallel):
        tensors = [*saved_tensors(TE, arch, 8192, tp=8, sequence_parallel=sequence_parallel)]
        return sum(nbytes for entry, nbytes in tensors if entry.tensor != "rng_state") / 8192

    assert per_token(True) == 8193 + 4640 + 21504 == 34337
    assert per_token(False) == 65544 + 4640 + 21504 == 91688
    # The state of the generator: 16 bytes in a block.
    assert of_last_layer(seen["llama-3-70b tp8 sp te"]) - GPU_BLOCK == 34337 * TOKENS


def test_padded_rows_keep_the_rotary_embedding_too(seen, architectures):
    """Megatron-Core's own code, in both specs: cosines and sines of the row's 2048 positions, for queries and for keys,
    in bf16. And where the rows begin, three int32."""
    case = CASES["llama-3-70b padded te"]
    rotary = 2 * 2 * (TOKENS // 2) * 128 * 2
    expected = by_table(case, architectures[case.model]) + rotary + GPU_BLOCK
    assert of_last_layer(seen["llama-3-70b padded te"]) == expected


def test_half_of_the_tokens_under_context_parallelism(seen, architectures):
    """cp 2, T' = T / 2 of the tokens. A layer with TransformerEngine's ring keeps what it keeps for so many; keys and
    values are those that came last. Beside them: a state of the generator for each step, and where sequences and their
    halves begin.

    Ours keeps gathered keys and values, of T (1 + 1 / 4) tokens, and neither its own keys nor the product that both
    came from.
    """
    arch, how = architectures["llama-3-70b"], {"tp": 8, "sequence_parallel": True}
    ring, ours = seen["llama-3-70b tp8 sp cp2 te"], seen["llama-3-70b tp8 sp cp2 gathered"]
    by_half = {
        name: sum(in_blocks(nbytes) for _, nbytes in saved_tensors(table, arch, TOKENS // 2, **how))
        for name, table in TABLES.items()
    }
    assert of_last_layer(ring) == by_half["te"] + 3 * GPU_BLOCK
    product, key = (
        entry for entry in LOCAL if entry.tensor.startswith(("the product", "key")) and "D" in entry.dims[2:]
    )
    sizes = {"T": TOKENS // 2, "G": 1, "(N + 2 G)": 10, "D": 128}
    gathered = 2 * (TOKENS + TOKENS // 4) * 128 * 2
    assert of_last_layer(ours) == by_half["local"] - product.nbytes(sizes) - key.nbytes(sizes) + gathered
    for record in (ring, ours):
        whole = seen["llama-3-70b tp8 sp te"]["flops"]
        assert {work: 2 * record["flops"][work] for work in ("matmul", "attention")} == {
            work: whole[work] for work in ("matmul", "attention")
        }


def test_messages_of_context_parallelism(seen):
    """Three layers, keys and values of a token 2 x 128 x 2 B. The ring of two sends a rank's once in the forward, and
    in the backward once and then their gradients; ours gathers all, and sums the gradients of all over the ranks.
    Beside them those of the weights' gradients."""
    both, layers = 2 * 128 * 2, 3
    wire = {name: seen[name]["wire"] for name in seen if "cp2" in name}
    found = {
        name: {line[2]: (line[-2], line[-1]) for line in lines if line[1] == "train/actor" and line[3] == "cp"}
        for name, lines in wire.items()
    }
    for name in ("llama-3-70b tp8 sp cp2 te", "llama-3-70b padded cp2 te"):
        assert found[name]["send"] == found[name]["receive"] == (3 * layers, 3 * layers * both * TOKENS // 2)
    ours = found["llama-3-70b tp8 sp cp2 gathered"]
    assert ours["all_gather"] == (layers, layers * both * TOKENS)
    gradients = found["llama-3-70b tp8 sp cp2 te"]["reduce_scatter"]
    assert ours["reduce_scatter"][0] - gradients[0] == layers
    assert ours["reduce_scatter"][1] - gradients[1] == layers * both * TOKENS


def test_what_is_not_trained_keeps_nothing(seen):
    assert of_last_layer(seen["llama-3-70b frozen te"]) == 0


@pytest.mark.parametrize("layers", ["te", "local"])
def test_experts_keep_what_the_table_says(seen, architectures, layers):
    """From before the experts to after them: what they keep, and their output. The stated routing sends each token to 8
    of 16 experts, and as many to each."""
    case = CASES[f"qwen3-moe tp2 sp {layers}"]
    record, arch = seen[f"qwen3-moe tp2 sp {layers}"], architectures["qwen3-moe"]
    rows = [TOKENS // 2] * arch.num_experts
    kept = by_table(case, arch, rows) - by_table(case, arch)
    assert kept == 8 * TOKENS * 384 * 2 * {"te": 3, "local": 4}[layers]
    before, after = record["experts"][-2:]
    assert len(record["experts"]) == 6
    assert after - before == kept + sum(rows) * arch.hidden_size * 2


@pytest.mark.parametrize(
    "name", [name.removesuffix(" te") for name in CASES if name.removesuffix("te") + "local" in CASES]
)
def test_messages_products_and_parameters_are_those_of_the_local_layers(seen, name):
    """Count and bytes of each message by phase, operation and group; operations of products and attention."""
    te, local = seen[f"{name} te"], seen[f"{name} local"]
    assert te["wire"] == local["wire"]
    assert bool([line for line in te["wire"] if line[3] == "tp"]) == (CASES[f"{name} te"].tp > 1)
    assert list(te["parameters"].items()) == list(local["parameters"].items())
    assert {work: te["flops"][work] for work in ("matmul", "attention")} == {
        work: local["flops"][work] for work in ("matmul", "attention")
    }
    assert te["flops"]["matmul"] > 0 < te["flops"]["attention"]


def test_the_optimizer_makes_no_temporaries_with_transformer_engine(seen):
    """Three layers of 70B at tp 8 and a vocabulary of 1024: two moments of 4 bytes a parameter; torch's AdamW takes 4
    bytes more for a while."""
    te, local = seen["llama-3-70b tp8 sp te"], seen["llama-3-70b tp8 sp local"]
    layer = 1280 * 8192 + 1024 * 8192 + 3 * 3584 * 8192 + 2 * 8192
    parameters = 3 * layer + 2 * 1024 * 8192 // 8 + 8192
    for record, temporaries in ((te, 0), (local, 4 * parameters)):
        phase = next(phase for phase in record["phases"] if phase["phase"] == "optimizer/actor")
        kinds = phase["by_kind"]
        assert kinds["main parameters"] == pytest.approx(4 * parameters, rel=1e-5)
        # At its peak torch's has made no moments yet for the group of the norms.
        assert kinds["optimizer state"] == pytest.approx(8 * parameters, rel=1e-3)
        assert kinds.get("optimizer's temporaries", 0) == pytest.approx(temporaries, rel=1e-3)


def test_one_number_is_read_for_the_norm(seen):
    """Of all gradients; without TransformerEngine one of each parameter."""
    read = {layers: seen[f"llama-3-70b tp8 sp {layers}"]["numbers_read"] for layers in ("te", "local")}
    parameters = len(seen["llama-3-70b tp8 sp te"]["parameters"])
    assert read["local"] - read["te"] == parameters - 1
    assert 0 < read["te"] < parameters


def test_weight_gradients_go_into_the_buffers(seen):
    """What stays after the first backward: cuBLAS's workspace, and a tensor for each shape of weights, which autograd
    is handed and nobody reads. No gradient of a layer's weight is made beside the buffer."""
    record = seen["llama-3-70b tp8 sp te"]
    build, train, *_ = record["phases"]
    shapes = 2 * (1280 * 8192 + 1024 * 8192 + 7168 * 8192 + 3584 * 8192)
    workspace = 32 * 2**20 + 1024
    assert train["end"] - build["end"] == pytest.approx(shapes + workspace, abs=20_000)
    assert train["by_kind"]["kernels' work space"] == workspace


SAYS = {
    "transformer/mlp.py:169": "per_token_scale",
    "fusions/fused_bias_swiglu.py:166": "save_for_backward(input_for_backward)",
    "fusions/fused_bias_swiglu.py:196": "save_for_backward(input_for_backward, weights)",
    "transformer/mlp.py:230": "self.activation_func(intermediate_parallel)",
    "tensor_parallel/layers.py:465": "save_for_backward(input, weight)",
    "torch/nn/attention/varlen.py:498": "save_for_backward(query, key, value",
}
"""What stands at the places of installed packages that the tables name."""


def test_the_installed_sources_say_what_is_quoted():
    """Of TransformerEngine there is nothing to look at here."""
    quoted = {
        entry.source for entry in (*TE, *LOCAL) if not entry.source.startswith(("pytorch/", "common/", "models/"))
    }
    assert quoted == set(SAYS)
    for source, words in SAYS.items():
        file, line = source.split(":")
        package = Path(torch.__file__).parents[1] if file.startswith("torch/") else Path(megatron.core.__path__[0])
        assert words in (package / file).read_text().splitlines()[int(line) - 1]


def test_storages_are_laid_to_the_line_that_made_them(seen):
    """Not to the file that stands between the program and torch in every call; in the backward, to the stand-in."""
    places = seen["llama-3-70b tp8 sp te"]["places"]
    assert "megarlhf/parallel/megatron_cpu.py" not in places
    assert {"megatron/core/transformer/attention.py", "megarlhf/rehearsal/transformer_engine/layers.py"} <= set(places)


def test_the_page_has_the_tables(architectures):
    page = PAGE.read_text().splitlines()
    expected = [*rows(TE), *rows(LOCAL), *(example(name, architectures[name], *how) for name, *how in EXAMPLES)]
    assert [row for row in expected if row not in page] == []


def test_stand_ins_take_the_place_of_local_layers_only():
    with pytest.raises(AssertionError, match="modules"):
        replace_layers(SimpleNamespace(spec="te"), None)
