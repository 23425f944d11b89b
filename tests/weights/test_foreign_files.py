"""Hugging Face directories as other programs leave them: experts in one tensor, wrappers' names, shards without their
index, quantised values, adapters. Not covered: models whose weights are not in the directory at all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarlhf.architectures.hf_config import hf_class, hf_config
from megarlhf.architectures.placements import logical_tensors
from megarlhf.commands.convert import main
from megarlhf.weights.checkpoint.formats.huggingface.read import INDEX, HFFiles, is_huggingface
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.transport.extent import MappedFiles
from tests.refuses import refuses
from tests.weights.cases import random_logical, tiny
from tests.weights.families import architecture, config

ARCH = tiny()
WEIGHTS = {name: value.to(torch.float32) for name, value in random_logical(ARCH).items()}
BUFFER = "model.layers.1.self_attn.rotary_emb.inv_freq"


def write(directory: Path, **files: dict) -> Path:
    """A directory with config.json and these files: `{"model.safetensors": tensors}`, or .bin."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(ARCH)))
    for name, tensors in files.items():
        if name.endswith(".bin"):
            torch.save(tensors, directory / name)
        else:
            save_file(tensors, directory / name)
    return directory


def halves() -> list[dict]:
    names = list(WEIGHTS)
    return [{name: WEIGHTS[name] for name in half} for half in (names[::2], names[1::2])]


def values(directory: Path) -> dict[str, torch.Tensor]:
    weights, maps = open_checkpoint(directory).weights, MappedFiles()
    return {p.tensor: maps.view(p, weights.extents[0]) for p in weights.parts[0].placements}


def require_equal(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    read = values(directory)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], value) for name, value in expected.items())


@pytest.mark.parametrize("shard_bytes", ["1GB", "20KB"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_as_transformers_holds_them(name, shard_bytes, tmp_path):
    """`save_original_format=False`: every bit as in the published form of the same model, and converted the same."""
    import transformers

    arch = architecture(name)
    model = getattr(transformers, hf_class(arch.model_type, "lm"))(config(name))
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "fused", save_original_format=False, max_shard_size=shard_bytes)
    assert (tmp_path / "fused" / INDEX).exists() == (shard_bytes == "20KB")
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in HFFiles(tmp_path / "fused").tensors)
    published = values(tmp_path / "published")
    assert published.keys() == logical_tensors(arch).keys()
    require_equal(tmp_path / "fused", published)
    if shard_bytes == "1GB":
        out = tmp_path / "megatron"
        assert main(["hf-to-megatron", "--hf", str(tmp_path / "fused"), "--out", str(out), "--tp", "2"]) == 0
        require_equal_models = main(["verify", str(tmp_path / "published"), str(out)])
        assert require_equal_models == 0


def test_experts_of_another_number_than_config_json_says(tmp_path):
    arch = architecture("mixtral")
    tensors = {"model.layers.0.mlp.experts.down_proj": torch.zeros(arch.num_experts + 1, 4, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    with refuses("(5, 4, 4)", "4 experts", "config.json"):
        HFFiles(tmp_path).weights(arch, "lm")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod."])
def test_what_wrappers_put_before_every_name_is_left_out_and_said(prefix, file, tmp_path, caplog):
    write(tmp_path, **{file: {prefix + name: value for name, value in {**WEIGHTS, BUFFER: torch.ones(8)}.items()}})
    require_equal(tmp_path, WEIGHTS)
    assert f"begins with {prefix}" in caplog.text
    names = [prefix + name if name == BUFFER else name for name in (*WEIGHTS, BUFFER)]
    both = {**WEIGHTS, BUFFER: torch.ones(8)}.values()
    write(tmp_path, **{file: dict(zip(names, both, strict=True))})
    assert prefix + BUFFER in HFFiles(tmp_path).tensors, "not every name has it"


def test_an_adapter_is_named_as_one(tmp_path):
    """Beside its base in one file, alone in model.safetensors, and as PEFT saves it."""
    start = "base_model.model."
    lora = {f"{start}model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 2)}
    beside = write(tmp_path / "beside", **{"model.safetensors": {start + n: v for n, v in WEIGHTS.items()} | lora})
    with refuses("adapter beside its weights", "lora_A.default.weight", "merge_and_unload"):
        open_checkpoint(beside)
    with refuses("an adapter and no model", "lora_A.default.weight"):
        open_checkpoint(write(tmp_path / "alone", **{"model.safetensors": lora}))
    with refuses("adapter_model.safetensors", "no model", "lora.path", "merge_and_unload"):
        open_checkpoint(write(tmp_path / "peft", **{"adapter_model.safetensors": lora}))


def test_mistral_s_own_files_alone_are_named(tmp_path):
    with refuses("consolidated.safetensors", "Mistral's own format", "model.safetensors"):
        open_checkpoint(write(tmp_path, **{"consolidated.safetensors": {"norm.weight": torch.ones(2)}}))


@pytest.mark.parametrize("form", ["model-{}.safetensors", "pytorch_model-{}.bin"])
def test_shards_without_their_index(form, tmp_path):
    first, second = halves()
    names = [form.format(number) for number in ("00001-of-00002", "00002-of-00002")]
    require_equal(write(tmp_path, **dict(zip(names, (first, second), strict=True))), WEIGHTS)
    twice = write(tmp_path / "twice", **{names[0]: WEIGHTS, names[1]: second})
    with refuses(*names, "is in", "mixes two checkpoints"):
        open_checkpoint(twice)
    sets = write(tmp_path / "sets", **{names[0]: first, names[1]: second, form.format("00003-of-00003"): second})
    with refuses("two sets", names[0], form.format("00003-of-00003")):
        open_checkpoint(sets)
    (tmp_path / names[0]).unlink()
    with refuses("no index", "1 of 2 shards", names[0]):
        open_checkpoint(tmp_path)


def test_a_computed_buffer_that_the_index_leaves_out(tmp_path):
    """Learnt tensors that it leaves out are still refused: tests/weights/test_huggingface.py."""
    shard = "model-00001-of-00001.safetensors"
    write(tmp_path, **{shard: {**WEIGHTS, BUFFER: torch.ones(8)}})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, shard)}))
    require_equal(tmp_path, WEIGHTS)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantised_values_without_a_quantization_config(dtype, file, tmp_path):
    """By their dtype, not as damage, also where they are scaled by tensors beside them."""
    quantised = {name: value.to(dtype) if "proj" in name else value for name, value in WEIGHTS.items()}
    name = str(dtype).removeprefix("torch.")
    write(tmp_path, **{file: quantised})
    with refuses(name, "21 of the model's 30 tensors", "bf16", "quantised") as caught:
        open_checkpoint(tmp_path)
    assert "copy" not in str(caught.value)
    scales = {f"{name}_scale": torch.ones(1) for name in quantised if "proj" in name}
    write(tmp_path, **{file: quantised | scales})
    with refuses(name, "bf16"):
        open_checkpoint(tmp_path)


def test_packed_values_of_a_quantised_model(tmp_path):
    """Of other names (GPTQ, AWQ), and of a dtype that torch does not have."""
    packed = {name.replace("proj.weight", "proj.qweight"): value.to(torch.int32) for name, value in WEIGHTS.items()}
    write(tmp_path, **{"model.safetensors": packed | {n: v for n, v in WEIGHTS.items() if "proj" not in n}})
    with refuses(
        "int32",
        "and 9 more",
        "model.layers.0.self_attn.q_proj.weight is missing",
        "model.layers.0.mlp.up_proj.qweight is not part",
        "quantised",
        "bf16",
    ):
        open_checkpoint(tmp_path)
    stored = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(stored.replace(b'"I32"', b'"F4" ', 1))
    with refuses("'F4'", "bf16", "quantised") as caught:
        open_checkpoint(tmp_path)
    assert "copy" not in str(caught.value)


def test_which_directories_are_hugging_face(tmp_path):
    assert not is_huggingface(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").touch()
    assert is_huggingface(tmp_path)
