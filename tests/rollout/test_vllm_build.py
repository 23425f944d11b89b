"""What vLLM is asked for. A stand-in takes the arguments; tests/distributed start the real one.

Not covered: GPUs. The device is only named, nothing is put there.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megarlhf.config import RolloutConfig
from megarlhf.rollout.vllm.build import build_llm
from megarlhf.runtime import Runtime


@pytest.fixture
def asked(monkeypatch):
    """Builds an engine of tp 2 on a machine of four ranks; returns what vLLM's `LLM` was called with."""

    def build(visible_devices=4, has_experts=False, llm=None, window=None, **rollout):
        taken = {}
        fake = SimpleNamespace(LLM=llm or (lambda model, **arguments: taken.update(arguments, model=model)))
        monkeypatch.setitem(sys.modules, "vllm", fake)
        runtime = Runtime(
            rank=0, local_rank=0, world_size=4, local_world_size=4, device=torch.device("cuda", 0), backend="nccl"
        )
        with (
            mock.patch.object(torch.cuda, "device_count", return_value=visible_devices),
            mock.patch.dict("os.environ"),
        ):
            settings = RolloutConfig.model_validate(rollout)
            build_llm(Path("model"), torch.bfloat16, settings, 2, 128, runtime, has_experts, window=window)
        return taken

    return build


def test_logits_are_asked_for_in_fp32_and_weights_in_the_actor_s_dtype(asked):
    arguments = asked()
    assert (arguments["hf_overrides"]["head_dtype"], arguments["dtype"]) == ("float32", "bfloat16")
    assert (arguments["load_format"], arguments["logprobs_mode"], arguments["max_model_len"]) == (
        "dummy",
        "processed_logprobs",
        128,
    )
    assert "moe_backend" not in arguments
    assert asked(has_experts=True)["moe_backend"] == "triton"


def test_the_engine_reads_config_json_where_mistral_s_params_json_lies_beside_it(asked, tmp_path):
    """The model as the trainer reads it. By itself vLLM takes params.json, which here still has another rope_theta."""
    from safetensors.torch import save_file
    from vllm.transformers_utils.config import get_config

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ours = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, **sizes}
    ours |= {"rope_theta": 100.0, "vocab_size": 64, "max_position_embeddings": 64, "sliding_window": None}
    theirs = {"dim": 64, "n_layers": 1, "head_dim": 32, "hidden_dim": 64, "n_heads": 2, "n_kv_heads": 2}
    theirs |= {"norm_eps": 1e-5, "vocab_size": 64, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(ours))
    (tmp_path / "params.json").write_text(json.dumps(theirs))
    save_file({"norm.weight": torch.ones(64)}, str(tmp_path / "consolidated.safetensors"))
    read = {name: get_config(str(tmp_path), trust_remote_code=False, config_format=name) for name in ("auto", "hf")}
    thetas = {name: config.rope_parameters["rope_theta"] for name, config in read.items()}
    assert thetas == {"auto": 1e6, "hf": 100.0}
    assert asked()["config_format"] == "hf"


@pytest.mark.parametrize("window", [None, 32])
def test_vllm_has_the_window_of_the_trainer(asked, tmp_path, monkeypatch, window):
    """Of a Llama whose config.json has a sliding_window, which transformers never reads there, vLLM reads one."""
    from vllm.transformers_utils.config import get_config

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**llama, "max_position_embeddings": 64, "sliding_window": 16}))
    overrides = asked(window=window)["hf_overrides"]
    monkeypatch.undo()
    read = [get_config(str(tmp_path), trust_remote_code=False, hf_overrides_kw=hf) for hf in ({}, overrides)]
    assert [config.sliding_window for config in read] == [16, window]


def test_a_sampler_that_is_never_used_is_not_compiled(asked, monkeypatch):
    """Unless the user asks for it."""
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    seen = []
    asked(llm=lambda model, **arguments: seen.append(os.environ["VLLM_USE_FLASHINFER_SAMPLER"]))
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    asked(llm=lambda model, **arguments: seen.append(os.environ["VLLM_USE_FLASHINFER_SAMPLER"]))
    assert seen == ["0", "1"]


def test_further_arguments_are_handed_on_and_may_replace_defaults(asked):
    arguments = asked(vllm={"args": {"max_num_seqs": 7, "enforce_eager": True}})
    assert (arguments["max_num_seqs"], arguments["enforce_eager"], arguments["seed"]) == (7, True, 0)
    assert asked()["enforce_eager"] is False


def test_what_vllm_refuses_is_said_with_the_arguments_that_it_got(asked):
    def refuse(model, **arguments):
        raise TypeError("max_num_seqs must be a number")

    with pytest.raises(ValueError, match=r"rollout.vllm.args = .*'many'.*: TypeError: max_num_seqs must be"):
        asked(llm=refuse, vllm={"args": {"max_num_seqs": "many"}})
    with pytest.raises(TypeError):  # not the user's arguments: the traceback stays
        asked(llm=refuse)


@pytest.mark.parametrize(("visible", "disabled"), [(1, True), (4, None)])
def test_with_one_visible_device_per_task_vllm_s_own_all_reduce_is_off(asked, visible, disabled):
    """It asks whether device 0 reaches device 1, and a task that sees device 0 alone has no such pair."""
    assert asked(visible_devices=visible).get("disable_custom_all_reduce") is disabled
