"""The reader's errors and the writer's promises."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.architectures.placements import logical_tensors
from megarlhf.weights.checkpoint.formats.huggingface.read import INDEX, HFFiles
from megarlhf.weights.checkpoint.hf_writer import open_hf_writer
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.transport.extent import MappedFiles
from tests.classifiers import write_classifier
from tests.refuses import refuses
from tests.weights.cases import TINY, random_logical, tiny

SPECS = {"a": ((3, 4), torch.bfloat16), "b": ((5,), torch.float32), "c": ((2, 2), torch.float16)}
VALUES = {name: torch.arange(torch.Size(s).numel()).view(s).to(t) - 2.5 for name, (s, t) in SPECS.items()}


def write(directory, **options):
    with open_hf_writer(directory, SPECS, TINY, **options) as writer:
        for name in ("c", "a", "b"):
            writer.write(name, VALUES[name])


@pytest.mark.parametrize(("limit", "files"), [(1 << 20, 1), (44, 2), (1, 3)])
def test_written_files_are_read_by_safetensors_and_by_us(tmp_path, limit, files):
    """Bit for bit, in one or several shards; nothing is copied to read them."""
    write(tmp_path / "m", max_shard_bytes=limit)
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) == files
    stored = {name: value for shard in shards for name, value in load_file(shard).items()}
    reader = HFFiles(tmp_path / "m")
    assert stored.keys() == reader.tensors.keys() == SPECS.keys()
    for name, value in VALUES.items():
        assert stored[name].dtype == value.dtype
        assert torch.equal(stored[name], value)
    maps = MappedFiles()
    for name, extent in reader.tensors.items():
        assert torch.equal(maps.tensor(extent), VALUES[name])
    assert (tmp_path / "m" / INDEX).exists() == (files > 1)
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == TINY


def test_other_files_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "config.json", "model.safetensors", INDEX, "x.bin"):
        (source / name).write_text(name)
    write(tmp_path / "m", copy_from=source)
    assert {p.name for p in (tmp_path / "m").iterdir()} == {
        "tokenizer.json", "generation_config.json", "config.json", "model.safetensors",
    }  # fmt: skip
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "tokenizer.json"
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == TINY


def write_and_fail(directory):
    with open_hf_writer(directory, SPECS, TINY) as writer:
        writer.write("a", VALUES["a"])
        assert all(path.name.startswith(".m.") for path in directory.parent.iterdir()), "under its temporary name"
        assert not directory.exists()
        raise OSError("no space left")


def write_only(directory, **values):
    with open_hf_writer(directory, SPECS, TINY) as writer:
        for name, value in values.items():
            writer.write(name, value)


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="no space left"):
        write_and_fail(tmp_path / "m")
    assert not list(tmp_path.iterdir())
    with refuses("2 tensors", "b, c"):
        write_only(tmp_path / "m", a=VALUES["a"])
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "m", copy_from=tmp_path / "nowhere")
    with refuses("b", "(4,)", "torch.float32", "(5,)"):
        write_only(tmp_path / "m", b=VALUES["b"][:4])
    assert not list(tmp_path.iterdir())
    write(tmp_path / "m")
    with refuses(str(tmp_path / "m"), "exists already"):
        write(tmp_path / "m")
    assert HFFiles(tmp_path / "m").tensors.keys() == SPECS.keys()


def test_damaged_directories(tmp_path):
    with refuses("model.safetensors.index.json", "model.safetensors"):
        HFFiles(tmp_path)
    directory = tmp_path / "m"
    write(directory, max_shard_bytes=1)
    shards = sorted(directory.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    for size, fault in ((len(whole) - 1, f"expected {len(whole)}"), (20, "truncated"), (3, "truncated")):
        shards[1].write_bytes(whole[:size])
        with refuses(shards[1].name, fault):
            HFFiles(directory)
    shards[1].write_bytes(shards[0].read_bytes())
    with refuses("1 tensors", "shards lack", "b"):
        HFFiles(directory)
    shards[1].unlink()
    shards[2].unlink()
    with refuses("2 of 3 shards", shards[1].name, shards[2].name):
        HFFiles(directory)


def test_the_model_and_the_files_are_compared_in_full(tmp_path):
    arch = tiny(tie_word_embeddings=True)
    stored = {name: value.to(torch.float32) for name, value in random_logical(arch).items()}
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(stored, tmp_path / "model.safetensors")
    files = HFFiles(tmp_path)
    weights = files.weights(arch, "lm", extra=("lm_head.weight",))
    assert weights.extents[0].keys() == logical_tensors(arch).keys()
    with refuses("lm_head.weight", "not part of the model"):
        files.weights(arch, "lm")
    with refuses("score.weight", "missing"):
        files.weights(arch, "scalar", extra=("lm_head.weight",))
    other = tiny(tie_word_embeddings=True, num_hidden_layers=2, vocab_size=101, attention_bias=True)
    with refuses(
        "18 tensors", "model.layers.1.self_attn.o_proj.bias is missing", "model.layers.2.mlp.up_proj.weight",
        "not part of the model", "model.embed_tokens.weight", "(100, 64)", "(101, 64)",
    ):  # fmt: skip
        files.weights(other, "lm", extra=("lm_head.weight",))


def test_older_bin_files_and_names_without_prefix(tmp_path):
    """pytorch_model.bin of a base model: no `model.` prefix, a buffer that is computed; values by extent."""
    arch = tiny(tie_word_embeddings=True)
    logical = {name: value.to(torch.float32) for name, value in random_logical(arch).items()}
    state = {name.removeprefix("model."): value for name, value in logical.items()}
    state["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    torch.save(state, tmp_path / "pytorch_model.bin")
    weights = HFFiles(tmp_path).weights(arch, "lm")
    maps = MappedFiles()
    assert len(weights.parts[0].placements) == len(logical)
    for placement in weights.parts[0].placements:
        assert torch.equal(maps.tensor(weights.extents[0][placement.storage]), logical[placement.tensor])


@pytest.mark.parametrize("old, new, names", [
    (b'"F16"', b'"F17"', "dtype 'F17'"), (b"[3,4]", b"[3,5]", "24 bytes|BF16"),
    (b"[3,4]", b"[3,x]", "safetensors header"),
    (b'"shape"', b'"shame"', "safetensors header"), (b"[24,44]", b"[23,43]", "gap|overlap"),
])  # fmt: skip
def test_headers_that_contradict_themselves(tmp_path, old, new, names):
    write(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    damaged = path.read_bytes().replace(old, new, 1)
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with refuses("model.safetensors", *names.split("|")):
        HFFiles(tmp_path / "m")


def test_an_index_that_forgets_a_tensor(tmp_path):
    write(tmp_path / "m", max_shard_bytes=1)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    shard = index["weight_map"]["b"]
    save_file({"b": VALUES["b"], "stray": VALUES["b"].clone()}, tmp_path / "m" / shard)
    with refuses("1 tensors", "not list", "stray"):
        HFFiles(tmp_path / "m")


def test_a_classifier_of_two_labels_is_no_reward_model(tmp_path):
    write_classifier(tmp_path, labels=("bad", "good"))
    with refuses("classifier", "2 labels", "score.weight"):
        open_checkpoint(tmp_path, head="scalar")
