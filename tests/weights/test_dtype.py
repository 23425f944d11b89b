"""`model.dtype: auto`. Not covered: that training in the dtype is good."""

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.commands.convert import main as convert
from megarlhf.config import ModelConfig
from megarlhf.models import weights
from megarlhf.weights.checkpoint.dtype import resolve_dtype
from tests.ranks import RankPool
from tests.refuses import missing_names, refuses
from tests.weights.models import write_model


def resolved(path, head="lm", **model):
    dtype = resolve_dtype("actor", ModelConfig(path=path, **model), head)
    return dtype.name, dtype.why


def say(path, **changes):
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def cast(path, *names, to):
    tensors = load_file(path / "model.safetensors")
    assert set(names) <= tensors.keys()
    save_file({name: t.to(to) if name in names else t for name, t in tensors.items()}, path / "model.safetensors")


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
def test_the_stored_tensors_decide_and_not_config_json(tmp_path, dtype, name):
    path = write_model("llama", tmp_path / "m", dtype=dtype)
    say(path, dtype="float16")
    assert resolved(path) == (name, "as stored")
    assert resolved(path, dtype="fp32") == ("fp32", "as configured")


@pytest.mark.parametrize("form", ["torch_dist", "mp_rank"])
def test_a_megatron_checkpoint_decides_too(tmp_path, form):
    source = write_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    arguments = ["--hf", str(source), "--out", str(tmp_path / "megatron"), "--format", form, "--tp", "2"]
    assert convert(["hf-to-megatron", *arguments]) == 0
    say(source, dtype="float32")
    assert resolved(tmp_path / "megatron", hf=source) == ("bf16", "as stored")


def test_fp16_is_refused_unless_a_dtype_is_given(tmp_path):
    path = write_model("llama", tmp_path / "m", dtype=torch.float16)
    with refuses("actor.model.dtype = auto", str(path), "float16", "bytes"):
        resolved(path)
    assert resolved(path, dtype="bf16") == ("bf16", "as configured")


def test_tensors_of_several_dtypes_are_refused_with_what_each_takes(tmp_path):
    path = write_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    cast(path, "model.norm.weight", to=torch.float32)
    with refuses("actor.model.dtype", "bfloat16", "float32", "bytes"):
        resolved(path)


def test_a_head_that_the_role_does_not_use_has_no_say(tmp_path):
    """A critic from a language model leaves its head where it is."""
    path = write_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    cast(path, "lm_head.weight", to=torch.float32)
    assert resolved(path, head="scalar") == ("bf16", "as stored")
    with refuses("bfloat16", "float32"):
        resolved(path)


@pytest.mark.parametrize("dtypes, expected", [
    ({"dtype": "bfloat16"}, ("bf16", "as config.json says")),
    ({"torch_dtype": "float32", "dtype": None}, ("fp32", "as config.json says")),
    ({"dtype": None}, ("fp32", "by default")),
])  # fmt: skip
def test_without_weights_config_json_decides(tmp_path, dtypes, expected):
    path = write_model("llama", tmp_path / "m", dtype=torch.float16)
    say(path, **dtypes)
    assert resolved(path, random_init=True) == expected
    (path / "model.safetensors").unlink()
    assert resolved(path) == expected


def test_random_weights_of_a_model_in_fp16_are_refused(tmp_path):
    path = write_model("llama", tmp_path / "m")
    say(path, dtype="float16")
    with refuses("auto", "config.json", "float16"):
        resolved(path, random_init=True)


def _on_ranks(runtime, good, bad):
    """Rank 1 is not asked: it sees another file system."""
    real = weights.resolve_dtype

    def resolve(role, model, head):
        assert runtime.rank == 0, "another rank read the checkpoint"
        return real(role, model, head)

    with mock.patch.object(weights, "resolve_dtype", resolve):
        dtype = weights.parameter_dtype("actor", ModelConfig(path=good), "lm")
        try:
            weights.parameter_dtype("actor", ModelConfig(path=bad), "lm")
        except ValueError as error:
            return dtype, str(error)
    return dtype, ""


def test_all_ranks_take_what_rank_0_finds(tmp_path, ranks: RankPool):
    good = write_model("llama", tmp_path / "good", dtype=torch.bfloat16)
    bad = write_model("llama", tmp_path / "bad", dtype=torch.float16)
    for dtype, error in ranks.run(2, _on_ranks, good, bad):
        assert dtype == torch.bfloat16
        assert not missing_names(error, str(bad), "float16")
