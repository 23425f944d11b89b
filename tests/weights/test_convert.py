"""Every family through a spread of layouts, formats and specs: the bits that went in come out. Models are made and
written by transformers. Not covered: hidden sizes at which a piece is one row (test_transfer has small pieces), files
above 4 GiB (sparse ones in test_torch_file)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, MegatronTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import detect_format, open_checkpoint
from megarlhf.weights.checkpoint.verify import differences, digests
from megarlhf.weights.checks.digest import whole_digest
from tests.refuses import missing_names, refuses
from tests.weights.families import CONFIGS
from tests.weights.models import write_model

MOE = {"mixtral", "qwen3_moe"}

LAYOUTS: dict[str, MegatronTarget] = {
    "tp1 torch_dist te": MegatronTarget(),
    "tp2 pp2 mp_rank local": MegatronTarget(tp=2, pp=2, format="mp_rank", spec="local"),
    "tp4 mp_rank te": MegatronTarget(tp=4, format="mp_rank", spec="te", vocab_multiple=1),
    "tp2 uneven pp3 torch_dist": MegatronTarget(tp=2, pp=3, layers_per_stage=(1, 2, 1), padded_vocab=512),
    "pp2 vpp2 mp_rank te": MegatronTarget(pp=2, vpp=2, format="mp_rank"),
    "pp2 vpp2 torch_dist local": MegatronTarget(pp=2, vpp=2, spec="local", vocab_multiple=64),
}
EXPERT_LAYOUTS: dict[str, MegatronTarget] = {
    "ep2 tp2 mp_rank local": MegatronTarget(ep=2, tp=2, format="mp_rank", spec="local"),
    "ep4 pp2 mp_rank te grouped": MegatronTarget(ep=4, pp=2, format="mp_rank", experts="grouped"),
    "ep2 mp_rank local grouped": MegatronTarget(ep=2, format="mp_rank", spec="local", experts="grouped"),
    "ep2 tp2 torch_dist": MegatronTarget(ep=2, tp=2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of each family in bf16, two safetensors shards, written once by transformers."""
    root = tmp_path_factory.mktemp("models")

    def get(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            write_model(family, directory, dtype=torch.bfloat16, max_shard_size="150KB")
            assert len(list(directory.glob("*.safetensors"))) > 1
            (directory / "tokenizer_config.json").write_text('{"model_max_length": 7}')
        return directory

    return get


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def write_hf(directory: Path, state: dict[str, torch.Tensor], config: Path) -> Path:
    directory.mkdir()
    save_file(state, directory / "model.safetensors")
    shutil.copyfile(config / "config.json", directory / "config.json")
    return directory


def assert_same_files(actual: Path, expected: Path) -> None:
    a, b = tensors_of(actual), tensors_of(expected)
    assert a.keys() == b.keys()
    for name, value in b.items():
        assert a[name].dtype == value.dtype
        assert torch.equal(a[name].view(torch.int16), value.view(torch.int16)), name


def test_nine_heads_at_tp3(tmp_path):
    """The shape of SmolLM2-135M: nine heads on three KV heads, tied, at TP3 PP2 in both formats, and back."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "tie_word_embeddings": True}
    hf = write_model("llama", tmp_path / "hf", **heads)
    for format in ("torch_dist", "mp_rank"):
        convert(open_checkpoint(hf), tmp_path / format, MegatronTarget(tp=3, pp=2, format=format))
        stored = open_checkpoint(tmp_path / format)
        assert (stored.layout.tp, stored.layout.pp, stored.layout.padded_vocab) == (3, 2, 384)
        convert(stored, tmp_path / f"{format}_back", HuggingFaceTarget())
        back, source = tensors_of(tmp_path / f"{format}_back"), tensors_of(hf)
        assert back.keys() == source.keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in source.items())
    assert digests(open_checkpoint(tmp_path / "mp_rank")) == digests(open_checkpoint(hf))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_there_and_back_at_every_layout(models, tmp_path, family):
    source = open_checkpoint(models(family))
    layouts = LAYOUTS | (EXPERT_LAYOUTS if source.arch.num_experts else {})
    for number, (name, target) in enumerate(layouts.items()):
        there, back = tmp_path / f"megatron{number}", tmp_path / f"hf{number}"
        convert(source, there, target)
        assert detect_format(there) == target.format
        stored = open_checkpoint(there)
        assert stored.layout is not None
        assert (stored.layout.tp, stored.layout.pp, stored.layout.ep) == (target.tp, target.pp, target.ep), name
        assert stored.arch == source.arch
        convert(stored, back, HuggingFaceTarget(max_shard_bytes=200_000))
        assert_same_files(back, models(family))
        assert (back / "tokenizer_config.json").read_text() == '{"model_max_length": 7}'
        expected = json.loads((models(family) / "config.json").read_text())
        assert json.loads((back / "config.json").read_text()) == expected
    assert_loads(family, back)


def assert_loads(family: str, directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.model_type == open_checkpoint(directory).arch.model_type


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_chain_of_five_layouts_ends_where_it_began(models, tmp_path, family):
    """Straight from one Megatron layout to the next, never by way of Hugging Face; the first one is met again byte
    for byte."""
    experts = {"experts": "grouped"} if family in MOE else {}
    first = MegatronTarget(tp=2, pp=2, format="mp_rank", vocab_multiple=128, **experts)
    chain = [
        first, MegatronTarget(tp=4, format="torch_dist"),
        MegatronTarget(pp=4, format="mp_rank", spec="local", ep=2 if family in MOE else 1),
        MegatronTarget(tp=1, pp=2, vpp=2, format="torch_dist", vocab_multiple=8),
        MegatronTarget(tp=2, pp=3, layers_per_stage=(2, 1, 1), format="mp_rank"),
        first,
    ]  # fmt: skip
    source = open_checkpoint(models(family))
    for number, target in enumerate(chain):
        convert(source, tmp_path / str(number), target)
        source = open_checkpoint(tmp_path / str(number))
    assert_same_tree(tmp_path / "5", tmp_path / "0")


def assert_same_tree(actual: Path, expected: Path) -> None:
    names = {path.relative_to(expected) for path in expected.rglob("*") if path.is_file()}
    assert {path.relative_to(actual) for path in actual.rglob("*") if path.is_file()} == names
    compared = 0
    for name in names:
        if name.suffix == ".pt":
            import argparse

            with torch.serialization.safe_globals([argparse.Namespace]):
                a, b = (torch.load(root / name, weights_only=True)["model"] for root in (actual, expected))
            assert a.keys() == b.keys()
            compared += len(a)
            assert all(torch.equal(a[key].view(torch.int16), value.view(torch.int16)) for key, value in b.items())
    assert compared > 20


def test_tied_models_and_scalar_heads(tmp_path):
    tied = write_model("qwen2_tied", tmp_path / "tied")
    scored = write_model("llama", tmp_path / "scored", scalar=True)
    for directory in (tied, scored):
        source = open_checkpoint(directory)
        for number, target in enumerate((LAYOUTS["tp2 pp2 mp_rank local"], LAYOUTS["tp2 uneven pp3 torch_dist"])):
            there, back = tmp_path / f"{directory.name}{number}", tmp_path / f"{directory.name}{number}.hf"
            convert(source, there, target)
            stored = open_checkpoint(there)
            assert stored.head == source.head == ("scalar" if directory == scored else "lm")
            convert(stored, back, HuggingFaceTarget())
            a, b = tensors_of(back), tensors_of(directory)
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], value) for name, value in b.items())
    assert "lm_head.weight" not in tensors_of(tied)
    assert tensors_of(scored)["score.weight"].shape == (1, 64)


def test_without_a_companion_the_arguments_say_what_the_model_is(models, tmp_path):
    """A checkpoint as a pre-training run leaves it: no config.json anywhere. transformers loads what comes out."""
    for family in ("llama", "qwen3", "mixtral"):
        for target in (LAYOUTS["tp2 pp2 mp_rank local"], LAYOUTS["tp1 torch_dist te"]):
            there, back = tmp_path / f"{family}{target.format}", tmp_path / f"{family}{target.format}.hf"
            convert(open_checkpoint(models(family)), there, target)
            shutil.rmtree(there / "hf")
            convert(open_checkpoint(there), back, HuggingFaceTarget())
            assert_same_files(back, models(family))
            assert_loads(family, back)


def test_dtypes(models, tmp_path):
    source = open_checkpoint(models("llama"))
    convert(source, tmp_path / "wide", MegatronTarget(tp=2, format="mp_rank"), dtype=torch.float32)
    wide = open_checkpoint(tmp_path / "wide")
    assert list(wide.weights.dtypes()) == [torch.float32]
    convert(wide, tmp_path / "narrow", HuggingFaceTarget(), dtype=torch.bfloat16)
    assert_same_files(tmp_path / "narrow", models("llama"))
    mixed = tensors_of(models("llama"))
    mixed["model.norm.weight"] = mixed["model.norm.weight"].float()
    mixed = open_checkpoint(write_hf(tmp_path / "mixed", mixed, models("llama")))
    with refuses("bfloat16", "float32", "--dtype"):
        convert(mixed, tmp_path / "out", MegatronTarget())
    convert(mixed, tmp_path / "out", MegatronTarget(), dtype=torch.bfloat16)
    state = {key: value.to(torch.int8) for key, value in tensors_of(models("llama")).items()}
    with refuses("int8", "quantised"):
        open_checkpoint(write_hf(tmp_path / "integers", state, models("llama")))


def test_verify_names_the_first_difference(models, tmp_path):
    source = open_checkpoint(models("llama"))
    convert(source, tmp_path / "a", LAYOUTS["tp2 pp2 mp_rank local"])
    changed = tensors_of(models("llama"))
    name = "model.layers.2.mlp.down_proj.weight"
    before = changed[name][7, 11].item()
    changed[name].view(torch.int16)[7, 11] ^= 1
    after = changed[name][7, 11].item()
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(write_hf(tmp_path / "b", changed, models("llama")))
    actual = digests(source), digests(a), digests(b)
    assert actual[0] == actual[1]
    assert whole_digest(actual[0]) == whole_digest(actual[1]) != whole_digest(actual[2])
    assert differences(source, a, actual[0], actual[1], None) == ""
    message = differences(a, b, actual[1], actual[2], None)
    assert not missing_names(message, "1 of", f"{name}[7, 11]", f"{before!r}", f"{after!r}")


@pytest.mark.parametrize("target, names", [
    (MegatronTarget(tp=3), "tp = 3"), (MegatronTarget(pp=3), "4 layers|pp = 3"), (MegatronTarget(ep=2), "ep = 2"),
    (MegatronTarget(pp=2, layers_per_stage=(1, 2)), "add up to 3"), (MegatronTarget(vpp=2), "vpp = 2|pp > 1"),
    (MegatronTarget(pp=2, vpp=2, layers_per_stage=(3, 1)), "3 layers|vpp = 2"),
    (MegatronTarget(pp=2, vpp=3), "4 layers|pp x vpp = 2 x 3 = 6"),
    (MegatronTarget(padded_vocab=50), "50 rows|100"), (MegatronTarget(tp=2, padded_vocab=101), "tp = 2|256"),
])  # fmt: skip
def test_layouts_that_do_not_fit(models, tmp_path, target, names):
    with refuses(*names.split("|")):
        convert(open_checkpoint(models("llama")), tmp_path / "out", target)
    assert not list(tmp_path.iterdir())


def test_force_replaces_checkpoints_only(models, tmp_path):
    """A run's root holds more than the checkpoint that its tracker names."""
    source = open_checkpoint(models("llama"))
    convert(source, tmp_path / "out", MegatronTarget())
    with refuses(str(tmp_path / "out"), "exists already"):
        convert(source, tmp_path / "out", MegatronTarget(tp=2))
    convert(source, tmp_path / "out", MegatronTarget(tp=2, format="mp_rank"), force=True)
    assert detect_format(tmp_path / "out") == "mp_rank"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("42")
    with refuses("--force", "checkpoints only"):
        convert(source, tmp_path / "home", MegatronTarget(), force=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "42"
    (tmp_path / "out" / "iter_0000100").mkdir()
    with refuses("--force", str(tmp_path / "out"), "iter_0000100"):
        convert(source, tmp_path / "out", MegatronTarget(tp=2), force=True)
    assert (tmp_path / "out" / "iter_0000100").is_dir()


def test_a_folder_hf_beside_a_checkpoint_is_somebody_else_s(models, tmp_path):
    """It describes an iteration named on its own, and nothing else; a wrong --reference-hf is an error."""
    convert(open_checkpoint(models("llama")), tmp_path / "run", LAYOUTS["tp2 pp2 mp_rank local"])
    assert open_checkpoint(tmp_path / "run" / "release").companion == tmp_path / "run" / "hf"
    shutil.rmtree(tmp_path / "run" / "hf")
    shutil.copytree(models("qwen3"), tmp_path / "hf")
    actual = open_checkpoint(tmp_path / "run")
    assert actual.companion is None
    assert actual.arch.model_type == "llama"
    with refuses("nowhere", "does not exist"):
        open_checkpoint(tmp_path / "run", hf=tmp_path / "nowhere")


def test_a_transposed_bin_tensor_and_one_file_beside_a_stale_index(models, tmp_path):
    """Strides of a .bin file are followed; transformers prefers the single file, and so do we."""
    state = tensors_of(models("llama"))
    name = "model.embed_tokens.weight"
    state[name] = state[name].t().contiguous().t()
    (tmp_path / "bin").mkdir()
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_text((models("llama") / "config.json").read_text())
    source = open_checkpoint(tmp_path / "bin")
    convert(source, tmp_path / "out", MegatronTarget(tp=2))
    assert digests(open_checkpoint(tmp_path / "out")) == digests(source) == digests(open_checkpoint(models("llama")))
    (tmp_path / "bin" / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "gone.bin"}}')
    assert digests(open_checkpoint(tmp_path / "bin")) == digests(source)


def test_a_tied_model_with_another_head_stored_is_not_tied(tmp_path):
    """Equal copies are fine in files and on the last stage; a different one is refused, as it would be dropped."""
    tied = write_model("qwen2_tied", tmp_path / "tied")
    state = tensors_of(tied)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    (path,) = tied.glob("*.safetensors")
    save_file(state, path)
    source = open_checkpoint(tied)
    convert(source, tmp_path / "megatron", LAYOUTS["tp2 pp2 mp_rank local"])
    stored = open_checkpoint(tmp_path / "megatron")
    (extent,) = [e for name, e in stored.weights.extents[2].items() if name.endswith("output_layer.weight")]
    with extent.path.open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"\x01\x02\x03\x04")
    with refuses("output_layer.weight", "other values", "not tied"):
        open_checkpoint(tmp_path / "megatron")
    state["lm_head.weight"][3, 4] += 1
    save_file(state, path)
    with refuses("stored head", "other values"):
        open_checkpoint(tied)


def test_files_of_two_runs_are_not_mixed(models, tmp_path):
    source = open_checkpoint(models("llama"))
    convert(source, tmp_path / "a", MegatronTarget(tp=2, format="mp_rank"))
    convert(source, tmp_path / "b", MegatronTarget(tp=2, format="mp_rank", padded_vocab=512))
    name = "release/mp_rank_01/model_optim_rng.pt"
    shutil.copyfile(tmp_path / "b" / name, tmp_path / "a" / name)
    with refuses("mp_rank_01", "padded_vocab_size = 512"):
        open_checkpoint(tmp_path / "a")
