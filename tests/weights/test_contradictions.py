"""A config.json beside a Megatron checkpoint that describes another model than the checkpoint's own arguments. Not
covered: arguments of real Megatron-LM runs (those here are what we write, with and without our own key)."""

import json
from dataclasses import replace

import pytest
import torch

from megarlhf.architectures.architecture import Architecture, Llama3Rope
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.weights.checkpoint.conversion import MegatronTarget, convert
from megarlhf.weights.checkpoint.formats.megatron.args import OWN_KEY, args_of, contradictions
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from tests.refuses import missing_names, refuses
from tests.weights.families import CONFIGS, architecture
from tests.weights.models import write_model

FORMATS = ["torch_dist", "mp_rank"]


def args_for(arch: Architecture, *, own: bool, **changes):
    args = args_of(arch, MegatronLayout(tp=2, padded_vocab=256), torch.bfloat16)
    if not own:
        del args[OWN_KEY]
    return {**args, **changes}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def get(family):
        if not (root / family).exists():
            write_model(family, root / family, dtype=torch.bfloat16)
        return root / family

    return get


def write(models, out, family, form, monkeypatch, drop=(), **changes):
    import megarlhf.weights.checkpoint.conversion as module

    def changed(*given):
        return {key: value for key, value in args_of(*given).items() if key not in drop} | changes

    with monkeypatch.context() as patch:
        patch.setattr(module, "args_of", changed)
        convert(open_checkpoint(models(family)), out, MegatronTarget(tp=2, format=form))
    return out


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_right_companion_passes(models, tmp_path, monkeypatch, family, form, own):
    out = write(models, tmp_path / "out", family, form, monkeypatch, drop=() if own else (OWN_KEY,))
    assert (OWN_KEY in open_checkpoint(out).args) == own
    assert open_checkpoint(out).arch == open_checkpoint(out, hf=models(family)).arch == architecture(family)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("form", FORMATS)
def test_a_wrong_companion_is_refused_with_everything_that_is_wrong(models, tmp_path, monkeypatch, form, own):
    """Of the same tensors, but for the rows of the vocabulary: nothing else would notice."""
    out = write(models, tmp_path / "out", "llama", form, monkeypatch, drop=() if own else (OWN_KEY,))
    config = json.loads((out / "hf" / "config.json").read_text())
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 90}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "max_position_embeddings": 4096}
    (out / "hf" / "config.json").write_text(json.dumps(config))
    stated = ("num_attention_heads = 4", "num_query_groups = 2", "kv_channels = 16", "vocab_size = 100")
    with refuses("5 points", str(out / "hf"), *stated, "rotary_base = 10000", "--reference-hf", "model.hf"):
        open_checkpoint(out)
    assert open_checkpoint(out, hf=models("llama")).arch == architecture("llama"), "a right one, named, wins"


@pytest.mark.parametrize("form", FORMATS)
def test_arguments_that_no_family_computes_are_not_outvoted(models, tmp_path, monkeypatch, form):
    out = write(models, tmp_path / "out", "llama", form, monkeypatch, drop=(OWN_KEY,), qk_l2_norm=True)
    with refuses("1 points", "qk_l2_norm = True"):
        open_checkpoint(out)


LLAMA3 = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("family, changes", [
    ("llama", {"num_layers": 5}), ("llama", {"hidden_size": 32}), ("llama", {"ffn_size": 95}),
    ("llama", {"norm": "layer"}), ("llama", {"norm_eps": 1.1e-5}), ("llama", {"rope_scaling": LLAMA3}),
    ("llama_biases", {"rope_scaling": LLAMA3}), ("llama", {"qkv_bias": True}), ("llama", {"mlp_bias": True}),
    ("qwen2", {"qkv_bias": False}), ("llama", {"qk_norm": True}), ("llama", {"gated_mlp": False}),
    ("llama", {"tied_embeddings": True}), ("llama", {"vocab_size": 257}), ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": None}), ("gpt2", {"max_positions": 49}), ("gpt2", {"positions": "rope"}),
    ("mixtral", {"num_experts": 8}), ("mixtral", {"experts_per_token": 1}), ("qwen3_moe", {"expert_ffn_size": 41}),
    ("mixtral", {"renormalize_experts": False}),
])  # fmt: skip
def test_each_field(family, changes, own):
    arch = architecture(family)
    (wrong,) = contradictions(replace(arch, **changes), args_for(arch, own=own))
    ((field, value),) = changes.items()
    printed = value.factor if isinstance(value, Llama3Rope) and not wrong.endswith(f"({OWN_KEY})") else value
    assert wrong.startswith(f"{field}: ")
    assert not missing_names(wrong, f"config.json says {printed!r}")


@pytest.mark.parametrize("family, changes, with_own", [
    ("mistral_whole", {"model_type": "llama"}, False), ("mixtral", {"model_type": "qwen3_moe"}, True),
    ("llama", {"max_positions": 1 << 20}, False), ("llama", {"norm_eps": 1e-5 * (1 + 1e-7)}, False),
    ("mixtral", {"ffn_size": 7}, False), ("gpt2", {"activation": "gelu_pytorch_tanh"}, False),
    ("gpt2", {"activation": "gelu"}, True), ("opt", {"position_offset": 0, "max_positions": 50}, True),
    ("qwen3_biases", {"output_bias": False}, True),
    ("llama_biases", {"rope_scaling": replace(LLAMA3, factor=4.0)}, True),
])  # fmt: skip
def test_what_is_no_contradiction(family, changes, with_own):
    """Megatron's arguments cannot say it; our own key does, where it makes another model."""
    arch = architecture(family)
    other = replace(arch, **changes)
    assert contradictions(other, args_for(arch, own=False)) == []
    lines = contradictions(other, args_for(arch, own=True))
    assert {line.split(":")[0] for line in lines} == (changes.keys() if with_own else set())


def test_megatrons_defaults_and_what_is_not_stated():
    """num_query_groups is 1 by default and means nothing without group_query_attention."""
    gpt2, llama = architecture("gpt2"), architecture("llama")
    default = args_for(gpt2, own=False, num_query_groups=1, kv_channels=None, ffn_hidden_size=None, vocab_size=None)
    assert contradictions(gpt2, default) == []
    assert contradictions(replace(gpt2, vocab_size=200), default) == []
    assert contradictions(gpt2, {}) == contradictions(gpt2, {"tensor_model_parallel_size": 2}) == []
    assert contradictions(llama, {"layernorm_epsilon": 1e-5, "kv_channels": None, "num_layers": 4}) == []
    (line,) = contradictions(llama, {"layernorm_epsilon": 1e-6})
    assert not missing_names(line, "norm_eps", "1e-05", "layernorm_epsilon = 1e-06")
    assert contradictions(llama, {"num_layers": "four", "qk_l2_norm": False}) == []
    (line,) = contradictions(replace(llama, vocab_size=300), {"padded_vocab_size": 256})
    assert not missing_names(line, "vocab_size", "300", "padded_vocab_size = 256")


def test_a_key_of_ours_that_is_contradicted_or_unreadable_says_nothing():
    arch = architecture("llama")
    six = replace(arch, num_layers=6)
    assert contradictions(six, args_for(arch, own=True, num_layers=6)) == []
    assert contradictions(arch, args_for(arch, own=False, **{OWN_KEY: {"model_type": "llama"}})) == []
    (line,) = contradictions(arch, args_for(arch, own=True, num_layers=6))
    assert not missing_names(line, "num_layers", "config.json says 4", "num_layers = 6")


@pytest.mark.parametrize("form", FORMATS)
def test_relayouts_keep_the_multiple_of_the_vocabulary(models, tmp_path, form):
    """Rows stated once do not grow at the next layout; a stated multiple is kept."""
    source = open_checkpoint(models("llama"))
    convert(source, tmp_path / "a", MegatronTarget(padded_vocab=102, format=form))
    convert(open_checkpoint(tmp_path / "a"), tmp_path / "b", MegatronTarget(tp=2, format=form))
    assert open_checkpoint(tmp_path / "b").layout.padded_vocab == 102
    convert(source, tmp_path / "c", MegatronTarget(vocab_multiple=64, format=form))
    stored = open_checkpoint(tmp_path / "c")
    assert (stored.layout.padded_vocab, stored.args["make_vocab_size_divisible_by"]) == (128, 64)
    convert(stored, tmp_path / "d", MegatronTarget(tp=2, format=form))
    again = open_checkpoint(tmp_path / "d")
    assert (again.layout.padded_vocab, again.args["make_vocab_size_divisible_by"]) == (128, 64)
