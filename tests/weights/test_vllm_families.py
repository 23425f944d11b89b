"""vLLM's placements against plain torch, and against vLLM's own models, filled by its loaders from transformers' files.
Not covered: what happens to weights after loading (on a CPU, vLLM repacks the linear layers and the experts; on a GPU,
some kernels reorder the experts), and expert parallelism in vLLM."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarlhf.architectures.families import FAMILIES
from megarlhf.architectures.hf_config import hf_class
from megarlhf.architectures.placements import hf_placements, vllm_placements
from megarlhf.weights.plan.copy_plan import make_plan
from tests.refuses import refuses
from tests.weights.cases import copy_in_memory, empty, random_logical
from tests.weights.families import CONFIGS, architecture, config
from tests.weights.megatron_reference import EMBEDDINGS, attention, fc1, mlp


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen3_biases"])
def test_vllm_gets_the_model(name, tp):
    """Values of each layer's storages by concatenation. That vLLM has these names is tested below."""
    arch = architecture(name)
    logical = random_logical(arch)
    ranks = [vllm_placements(arch, tp=tp, tp_rank=r, rank=r) for r in range(tp)]
    live = empty(ranks)
    copy_in_memory(make_plan([hf_placements(arch, rank=99)], ranks), {99: logical}, live)
    prefix = FAMILIES[arch.model_type].table.vllm_layer
    for rank in range(tp):
        for layer in range(arch.num_layers):
            for storage, value in vllm_layer_by_hand(arch, logical, layer, tp, rank).items():
                assert torch.equal(live[rank].pop(prefix.format(layer=layer) + storage), value), storage
        words = EMBEDDINGS.get(arch.model_type, ("model.embed_tokens.weight",))[0]
        vocabulary = {words} if arch.tied_embeddings else {words, "lm_head.weight"}
        for storage in vocabulary:
            padded = torch.full((128, 64), -1.0, dtype=torch.float64)
            padded[:100] = logical[storage]
            assert torch.equal(live[rank].pop(storage), padded.chunk(tp)[rank])
        assert live[rank].keys() <= logical.keys()  # position table, final norm: whole, by their own names
        assert all(torch.equal(value, logical[storage]) for storage, value in live[rank].items())
        assert len(live[rank]) == {"gpt2": 3, "opt": 3}.get(arch.model_type, 1)


def vllm_layer_by_hand(arch, logical, layer, tp, rank):
    qkv, output, _ = attention(arch, logical, layer)
    first, second = mlp(arch, logical, layer)
    kv_rank, kv_ranks = (rank, tp) if tp <= arch.num_kv_heads else (rank * arch.num_kv_heads // tp, arch.num_kv_heads)
    names = {"gpt2": ("attn.c_attn", "attn.c_proj"), "opt": ("self_attn.qkv_proj", "self_attn.out_proj")}
    attn, out_proj = names.get(arch.model_type, ("self_attn.qkv_proj", "self_attn.o_proj"))
    out = {}
    for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
        heads = [qkv[f"q.{kind}"].chunk(tp)[rank], *(qkv[f"{x}.{kind}"].chunk(kv_ranks)[kv_rank] for x in "kv")]
        out[f"{attn}.{kind}"] = torch.cat(heads)
    out[out_proj + ".weight"] = output["weight"].chunk(tp, dim=1)[rank]
    if arch.num_experts:
        block = "block_sparse_moe" if arch.model_type == "mixtral" else "mlp"
        experts = f"{block}.experts.routed_experts."
        out[experts + "w13_weight"] = torch.stack([fc1(arch, expert, "weight", tp, rank) for expert in first])
        out[experts + "w2_weight"] = torch.stack([expert["weight"].chunk(tp, dim=1)[rank] for expert in second])
    else:
        names = {"gpt2": ("mlp.c_fc", "mlp.c_proj"), "opt": ("fc1", "fc2")}
        up, down = names.get(arch.model_type, ("mlp.gate_up_proj", "mlp.down_proj"))
        for kind in ("weight", "bias") if arch.mlp_bias else ("weight",):
            out[f"{up}.{kind}"] = fc1(arch, first[0], kind, tp, rank)
        out[down + ".weight"] = second[0]["weight"].chunk(tp, dim=1)[rank]
        if arch.mlp_bias:
            out[down + ".bias"] = second[0]["bias"]
    if arch.output_bias:
        out[out_proj + ".bias"] = output["bias"]
    prefix = FAMILIES[arch.model_type].table.hf_layer.format(layer=layer)
    for name, value in logical.items():  # norms and router: whole, by their own names
        short = name.removeprefix(prefix)
        if name.startswith(prefix) and ("norm" in short or "ln_" in short or short.endswith(".gate.weight")):
            out[short] = value
    return out


def test_a_parameter_that_vllm_lacks_is_refused():
    """vLLM's Qwen3 leaves out the output projection's bias without a word."""
    with refuses("qwen3", "model.layers.0.self_attn.o_proj.bias"):
        vllm_placements(architecture("qwen3_biases"), tp=1, tp_rank=0, rank=0)


MODELS = {
    # vLLM makes its expert-parallel group with the first model, so one with experts comes first.
    "mixtral": {},
    "qwen3_moe": {},
    **{name: {} for name in CONFIGS if name not in ("mixtral", "qwen3_moe", "qwen3_biases")},
    "qwen2_one_kv_head": {"num_key_value_heads": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_every_storage_equals_what_vllm_loads(tp: int, tmp_path: Path) -> None:
    """Names, shapes and values of every parameter on every rank, padding not; KV heads replicated once."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    logical = {name: _write(name, changes, tmp_path / name) for name, changes in MODELS.items()}
    _load_by_vllm(tp, [tmp_path / name for name in MODELS])
    for name, changes in MODELS.items():
        arch = architecture(name.removesuffix("_one_kv_head"), **changes)
        ranks = [vllm_placements(arch, tp=tp, tp_rank=rank, rank=rank) for rank in range(tp)]
        live = empty(ranks, torch.float32)
        copy_in_memory(make_plan([hf_placements(arch, rank=99)], ranks), {99: logical[name]}, live)
        for rank in range(tp):
            theirs = torch.load(tmp_path / name / f"vllm-{tp}-{rank}.pt")
            assert theirs.keys() == live[rank].keys(), name
            for storage, value in theirs.items():
                # vLLM zeroes the rows of padding that follow the real ones; ours are left at -1.
                ours = live[rank][storage]
                assert value.shape == ours.shape, (name, storage)
                assert torch.equal(value[ours != -1], ours[ours != -1]), (name, storage)
                assert not (value[ours == -1] > 0).any(), (name, storage)


def _write(name: str, changes: dict[str, int], directory: Path) -> dict[str, torch.Tensor]:
    """A model whose weights are all different from each other and from -1, and what is in its file."""
    import transformers
    from safetensors.torch import load_file

    arch = architecture(name.removesuffix("_one_kv_head"), **changes)
    model = getattr(transformers, hf_class(arch.model_type, "lm"))(config(name.removesuffix("_one_kv_head"), **changes))
    start = 1
    with torch.no_grad():
        for parameter in model.parameters():
            count = parameter.numel()
            parameter.copy_(torch.arange(start, start + count, dtype=torch.float32).view(parameter.shape))
            start += count
    assert start < 2**24, "fp32 holds no more whole numbers"
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def _load_by_vllm(tp: int, directories: list[Path]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.weights.vllm_loader", str(tp)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": Path(__file__).parents[2]}
    env = {**os.environ, "VLLM_DIST_IDENT": port}  # which vLLM's own starters set, for memory that ranks share
    processes = [
        subprocess.Popen([*command, str(rank), port, *map(str, directories)], env=env, **options) for rank in range(tp)
    ]
    try:
        outputs = [process.communicate(timeout=280)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
