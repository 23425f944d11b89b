"""vLLM's placements against vLLM's own models, filled by vLLM's own loaders from files that transformers wrote.

Not covered: what happens to weights after loading (on a CPU, vLLM repacks the linear layers and the experts; on a GPU,
some kernels reorder the experts), and expert parallelism in vLLM.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarlhf.weights.architecture import hf_class
from megarlhf.weights.plan import make_plan
from megarlhf.weights.tensor_map import hf_placements, vllm_placements
from tests.weights.cases import carry_in_memory, empty
from tests.weights.families import CONFIGS, architecture, config

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
    """Names, shapes and values of every parameter on every rank, padding left alone; KV heads replicated in one case."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    logical = {name: _write(name, changes, tmp_path / name) for name, changes in MODELS.items()}
    _load_by_vllm(tp, [tmp_path / name for name in MODELS])
    for name, changes in MODELS.items():
        arch = architecture(name.removesuffix("_one_kv_head"), **changes)
        ranks = [vllm_placements(arch, tp=tp, tp_rank=rank, rank=rank) for rank in range(tp)]
        live = empty(ranks, torch.float32)
        carry_in_memory(make_plan([hf_placements(arch, rank=99)], ranks), {99: logical[name]}, live)
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
    processes = [
        subprocess.Popen(
            [*command, str(rank), port, *map(str, directories)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(tp)
    ]
    try:
        outputs = [process.communicate(timeout=280)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
