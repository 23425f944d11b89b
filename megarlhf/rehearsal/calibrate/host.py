"""Measurement of the host's time for an operation: Python, autograd and dispatch, in forward and backward of a tiny
model.

The model is the program's own, as Megatron-Core builds it, since most of the host's time is spent in Megatron's Python.
Tensors are so small that the device's share is next to nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf.config import RoleConfig
from megarlhf.models.role import build_role
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.packing.rows import packed_row
from megarlhf.rehearsal.calibrate.stopwatch import undisturbed_clock
from megarlhf.rehearsal.cost_model.meter import Meter, OperationPricing
from megarlhf.rehearsal.fake_device.torch_patches import TorchDispatchMode, tree_flatten
from megarlhf.runtime import Runtime, synchronize

TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LENGTHS = (16, 9, 7)
"""Lengths of the sequences in a packed row."""


class _Counted(TorchDispatchMode):
    """Mode that hands real operations to a meter, as a rehearsal does with operations without numbers."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace == "aten":
            tensors = [x for x in (*tree_flatten((args, kwargs))[0], *tree_flatten(out)[0]) if isinstance(x, Tensor)]
            self._meter.operation(func, args, out, tensors)
        return out


def host_seconds(runtime: Runtime, price: OperationPricing, *, repeats: int) -> float:
    """Seconds of the host for one operation, without those that `price` gives for its work. Collective.

    For a device that works by itself `price` should be 0 throughout: the host runs ahead.
    """
    step = _forward_backward(runtime)
    step()
    meter = Meter(price)
    with _Counted(meter):
        step()
    operations = sum(meter.operations.values())
    samples = []
    for _ in range(repeats):
        synchronize(runtime.device)
        began = undisturbed_clock()
        step()
        samples.append(undisturbed_clock() - began)
    return max(1e-9, (min(samples) - meter.seconds) / operations)


def _forward_backward(runtime: Runtime) -> Callable[[], None]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
        model = {"path": directory, "random_init": True, "dtype": "fp32"}
        section = RoleConfig.model_validate({"model": model})
        role = build_role("actor", section, "lm", GroupCache(runtime), seed=0)
    module, device = role.shard.module.requires_grad_(True), runtime.device
    tokens = torch.zeros(1, sum(LENGTHS), dtype=torch.int64, device=device)

    def step() -> None:
        row = packed_row(LENGTHS, device)
        assert row.positions_T is not None
        with megatron_device(device):
            module(tokens, row.positions_T.expand(tokens.shape), None, packed_seq_params=row).sum().backward()
        module.zero_grad()

    return step
