"""`torch_dist` checkpoints written by us and read by us, and what is found in damaged ones. What Megatron-Core makes of
them, and we of its own, is in tests/distributed/test_dist_checkpointing.py. Not covered: shards over 4 GiB, metadata of
torch before 2.13 (its module names are allowed, no file was at hand)."""

import pickle
import time
from pathlib import Path

import pytest
import torch

from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.placement import Box, Placement, contiguous_strides
from megarlhf.weights.checkpoint.checksums import check_checksums
from megarlhf.weights.checkpoint.formats.megatron.tracker import find_checkpoint, write_tracker
from megarlhf.weights.checkpoint.formats.torch_dist.keys import StorageName, cut, is_gated, key_form
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import read_extents, read_tensors
from megarlhf.weights.checkpoint.formats.torch_dist.read import read_torch_dist
from megarlhf.weights.checkpoint.formats.torch_dist.saved import read_saved
from megarlhf.weights.checkpoint.formats.torch_dist.write import preallocate_torch_dist
from tests.refuses import refuses
from tests.weights.cases import LLAMA_70B, random_logical, tiny
from tests.weights.families import architecture
from tests.weights.torch_dist import VOCAB, assert_same, read, tiny_checkpoint, write

LAYOUTS = {
    "tp1": MegatronLayout(padded_vocab=100),
    "tp2": MegatronLayout(tp=2, padded_vocab=VOCAB),
    "tp2 pp2 vpp2": MegatronLayout(tp=2, pp=2, vpp=2, padded_vocab=VOCAB),
    "uneven pp3": MegatronLayout(pp=3, layers_per_stage=(1, 2, 1), padded_vocab=128),
    "tp4, 2 kv groups": MegatronLayout(tp=4, padded_vocab=VOCAB),
}
EXPERT_LAYOUTS = {
    "ep2 tp2": MegatronLayout(ep=2, tp=2, padded_vocab=VOCAB),
    "ep4 pp2": MegatronLayout(ep=4, pp=2, padded_vocab=VOCAB, experts="grouped"),
}


@pytest.fixture
def written(tmp_path):
    return tiny_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("family", ["llama_biases", "qwen3_tied", "gpt2", "opt", "mixtral", "qwen3_moe"])
def test_what_was_written_is_read_at_every_layout(tmp_path, family):
    """Shards of different ranks do not overlap, padding aside they are filled, and the bits come back. Not covered: the
    other forms of keys, which Megatron alone writes (tests/distributed/test_dist_checkpointing.py)."""
    arch = architecture(family)
    logical = random_logical(arch)
    layouts = LAYOUTS | (EXPERT_LAYOUTS if arch.num_experts else {})
    for number, (name, layout) in enumerate(layouts.items()):
        if layout.padded_vocab < arch.vocab_size:
            continue
        directory = write(tmp_path / f"{number}", arch, layout, logical)
        checkpoint = read_torch_dist(directory, arch)
        assert checkpoint.layout.padded_vocab == layout.padded_vocab, name
        padded = {key for key in checkpoint.parts[0].padding() if "word_embeddings" not in key}
        assert not {key for key in padded if not key.startswith("output_layer")}, name
        assert_same(read(directory, arch), logical)


def test_scalar_head_and_release(tmp_path):
    arch = tiny(tie_word_embeddings=True)
    logical = random_logical(arch, "scalar")
    directory = write(tmp_path / "run", arch, MegatronLayout(tp=2, pp=3, padded_vocab=VOCAB), logical, head="scalar")
    assert read_torch_dist(directory, arch).head == "scalar"
    assert_same(read(directory, arch), logical)
    assert find_checkpoint(tmp_path / "run") == (directory, 12) == find_checkpoint(directory)
    write_tracker(tmp_path / "run", "release")
    with refuses("release", "does not exist"):
        find_checkpoint(tmp_path / "run")
    directory.rename(tmp_path / "run" / "release")
    assert find_checkpoint(tmp_path / "run") == (tmp_path / "run" / "release", "release")
    write_tracker(tmp_path / "run", "seven")  # type: ignore[arg-type]
    with refuses("'seven'", "iteration"):
        find_checkpoint(tmp_path / "run")
    assert find_checkpoint(tmp_path) == (None, None)


def test_the_metadata_is_what_torch_pickles(written):
    """Stand-ins unpickle as torch's own classes, equal to those that a torch checkpoint would hold."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorProperties

    _, _, directory = written
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    fc1 = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    assert fc1.properties == TensorProperties(dtype=torch.float32)
    assert fc1.size == torch.Size([3, 192, 64])
    assert isinstance(fc1.size, torch.Size)
    starts = [tuple(chunk.offsets) for chunk in fc1.chunks]
    # Rank 0 has the first half of gate and of up, rank 1 the second.
    assert starts[:2] == [(0, 0, 0), (0, 96, 0)]
    assert starts[6:8] == [(0, 48, 0), (0, 144, 0)]
    blob = metadata.storage_data[MetadataIndex("decoder.layers.mlp.linear_fc1.weight", torch.Size([0, 144, 0]))]
    assert blob.relative_path == "__1_0.distcp"
    assert blob.transform_descriptors is None
    state = "decoder.layers.mlp.linear_fc1._extra_state/shard_2_3"
    assert isinstance(metadata.state_dict_metadata[state], BytesStorageMetadata)
    assert MetadataIndex(state) in metadata.storage_data
    assert metadata.storage_meta.modules == []


def test_blobs_load_with_torch(written):
    """Every blob, holes filled, is a file of torch.save with the tensor that the metadata promises."""
    _, logical, directory = written
    tensors = read_tensors(directory)
    count = 0
    for tensor in tensors.values():
        for shard in tensor.shards:
            raw = shard.blob.path.read_bytes()[shard.blob.offset :][: shard.blob.length]
            piece = directory / "piece"
            piece.write_bytes(raw)
            loaded = torch.load(piece, weights_only=True)
            assert (loaded.shape, loaded.dtype) == (shard.box.shape, torch.float32)
            count += 1
            if tensor is tensors["decoder.final_layernorm.weight"]:
                assert torch.equal(loaded.double(), logical["model.norm.weight"])
    assert count == 2 * 2 + 1 + 3 * (2 * 2 + 2 * 2 + 2 + 2)  # vocabulary, last norm; qkv and proj, fc1, fc2, norms
    common = torch.load(directory / "common.pt", weights_only=False)
    assert common["args"].lr == 0.5
    assert common["iteration"] == 12
    assert common["checkpoint_version"] == 3.0
    assert read_saved(directory).args.values == {"lr": 0.5}


def test_a_shard_may_hold_several_layers_and_experts():
    """[2 layers, 2 experts, 4, 3] of a shard; a transposed placement; by hand."""
    placement = Placement("w", Box((0, 4), (3, 8)), "s", 0, (1, 3))  # w[0:3, 4:8] transposed in s [4, 3]
    num_refused = cut(placement, (4, 3), Box((1, 0), (3, 2)), storage="c", offset=12 + 100, strides=(3, 1))
    assert num_refused == Placement("w", Box((0, 5), (2, 7)), "c", 112, (1, 3))
    assert cut(placement, (4, 3), Box((0, 3), (4, 4)), storage="c", offset=0, strides=(3, 1)) is None
    row = Placement("n", Box((0, 0), (1, 4)), "s", 8, (4, 1))  # one row of [3, 4]: its stride says nothing
    piece = cut(row, (3, 4), Box((2, 1), (3, 3)), storage="c", offset=7, strides=(2, 1))
    assert piece == Placement("n", Box((0, 1), (1, 3)), "c", 7, (1, 1))


def test_names():
    name = StorageName.parse("decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight")
    assert name == StorageName("linear_fc1.weight", 7, 3)
    assert name.key("stacked") == "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert name.key("per_layer") == "decoder.layers.7.mlp.experts.experts.linear_fc1.weight"
    assert name.key("single") == "decoder.layers.7.mlp.experts.experts.3.linear_fc1.weight"
    assert [name.lead(form) for form in ("stacked", "per_layer", "single")] == [(7, 3), (3,), ()]
    norm = StorageName.parse("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    assert norm.other_norm() == StorageName("pre_mlp_layernorm.weight", 0)
    assert norm.other_norm().other_norm() == norm
    assert StorageName.parse("decoder.final_layernorm.weight").other_norm() is None
    assert contiguous_strides((2, 3)) == (3, 1)
    assert key_form(["optimizer.state.decoder.layers.1.x", "decoder.layers.mlp.linear_fc1.weight"]) == "stacked"
    assert key_form(["decoder.layers.1.mlp.linear_fc1.weight"]) == "per_layer"
    assert key_form(["decoder.layers.1.mlp.linear_fc1.weight_w"]) == "single"


def test_grouped_experts_of_transformer_engine_have_the_keys_of_the_others():
    """Their weights are numbered by the layer itself; the shards and the halves of a gate are the same."""
    arch = architecture("qwen3_moe")
    kinds = {"each": "local", "grouped": "te"}
    keys = {}
    for experts, spec in kinds.items():
        layout = MegatronLayout(ep=2, padded_vocab=128, spec=spec, experts=experts)
        for rank, part in enumerate(layout.parts(arch)):
            of_experts = [name for name in part.storages if ".mlp.experts." in name]
            assert len(of_experts) == arch.num_layers * arch.num_experts // 2 * 2
            places = {}
            for name in of_experts:
                named = StorageName.parse(name).globally(range(arch.num_layers), rank * arch.num_experts // 2)
                places[named.key("stacked"), named.lead("stacked")] = (part.storages[name], is_gated(name, True))
            keys[experts, rank] = places
    for rank in range(2):
        assert keys["each", rank] == keys["grouped", rank]
        assert any(gated for _, gated in keys["each", rank].values())


def test_norms_under_either_name(written):
    """A model without Megatron's map of norm names saves them under their own."""
    arch, logical, directory = written
    raw = (directory / ".metadata").read_bytes()
    for fused, own in (
        (b"self_attention.linear_qkv.layer_norm_weight", b"input_layernorm.weight"),
        (b"mlp.linear_fc1.layer_norm_weight", b"pre_mlp_layernorm.weight"),
    ):
        fused, own = b"decoder.layers." + fused, b"decoder.layers." + own
        assert raw.count(bytes([len(fused)]) + fused) >= 1
        # The pickle is in one frame or several, whose lengths would change: pickle it again.
        metadata = pickle.loads(raw)
        _rename(metadata, fused.decode(), own.decode())
        raw = pickle.dumps(metadata)
    (directory / ".metadata").write_bytes(raw)
    assert "decoder.layers.input_layernorm.weight" in read_tensors(directory)
    assert_same(read(directory, arch), logical)


def _rename(metadata, old, new):
    from torch.distributed.checkpoint.metadata import MetadataIndex

    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
    for index in [index for index in metadata.storage_data if index.fqn == old]:
        metadata.storage_data[MetadataIndex(new, index.offset)] = metadata.storage_data.pop(index)


def test_optimizer_state_is_passed_over(written):
    arch, logical, directory = written
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for key in ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "chained_0.optimizer.state.x"):
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
        for index in [i for i in metadata.storage_data if i.fqn == "decoder.final_layernorm.weight"]:
            metadata.storage_data[type(index)(key, index.offset)] = metadata.storage_data[index]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert len(read_tensors(directory)) == 9 + 2
    assert_same(read(directory, arch), logical)


def test_every_difference_is_listed(written):
    _, _, directory = written
    other = tiny(num_hidden_layers=4, attention_bias=True, tie_word_embeddings=True)
    # 9: 2 missing, 1 extra, 6 of another number of layers
    linear, fc1 = "decoder.layers.self_attention.linear", "decoder.layers.mlp.linear_fc1.weight"
    with refuses(
        "9 tensors", f"{linear}_qkv.bias is missing", f"{linear}_proj.bias is missing", "output_layer.weight",
        "not part of the model", f"{fc1} has shape (3, 192, 64)", "(4, 192, 64)",
    ):  # fmt: skip
        read_torch_dist(directory, other)
    with refuses("200 rows"):
        read_torch_dist(directory, tiny(vocab_size=200))


def test_crc_of_every_blob(tmp_path):
    """Blobs of torch.save state their CRC, ours leave out those of tensors: counted."""
    arch = tiny()
    directory = write(tmp_path / "run", arch, MegatronLayout(padded_vocab=VOCAB), random_logical(arch))
    blobs = [shard.blob for tensor in read_tensors(directory).values() for shard in tensor.shards]
    assert check_checksums(directory) == (len(blobs), len(blobs))


@pytest.mark.slow
def test_a_large_checkpoint_opens_in_seconds(tmp_path):
    """Llama-70B at TP8 x PP4 as holes: 5 s for planning it and for opening it, each, on two cores."""
    arch = tiny(**LLAMA_70B)
    start = time.perf_counter()
    preallocate_torch_dist(tmp_path, arch, MegatronLayout(tp=8, pp=4, padded_vocab=128256), "lm", torch.bfloat16, {}, 1)
    planned = time.perf_counter()
    checkpoint = read_torch_dist(tmp_path / "iter_0000001", arch)
    assert len(checkpoint.extents[0]) == 2 * 8 + 1 + 80 * (5 * 8 + 2)
    assert planned - start < 20
    assert time.perf_counter() - planned < 20


def test_few_headers_are_read_in_full(written, monkeypatch):
    """One full read per dtype, shape and length."""
    from megarlhf.weights.checkpoint.formats.torch_dist import metadata as torch_dist_metadata

    calls = []
    real = torch_dist_metadata.read_torch_file
    monkeypatch.setattr(torch_dist_metadata, "read_torch_file", lambda *a, **kw: calls.append(a) or real(*a, **kw))
    _, _, directory = written
    wanted = {
        f"{key}{shard.box.start}": (shard, tensor.dtype)
        for key, tensor in read_tensors(directory).items()
        for shard in tensor.shards
    }
    assert len(read_extents(wanted)) == len(wanted)
    assert len(calls) == len({(dtype, shard.box.shape) for shard, dtype in wanted.values()}) < len(wanted) / 4


def test_planning_needs_no_torch_distributed():
    """torch.distributed.checkpoint takes a second to import; neither direction does."""
    import subprocess
    import sys

    code = (
        "import sys; from megarlhf.weights.checkpoint.formats.torch_dist import read, write;"
        "print([m for m in ('torch.distributed.checkpoint', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]"
