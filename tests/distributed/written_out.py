"""SFT written out in plain torch on a model of transformers: what runs of ours are held against."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.distributed.compare import assert_gradients_equal, assert_weights_equal
from tests.distributed.samples import sft_samples

LR, STEPS, MINI_BATCH = 1e-3, 3, 8


def config(model: Path, data: Path, parallel: dict[str, Any], *, micro_batch: int = 2, **role: Any) -> dict[str, Any]:
    """The same as a configuration; `role` adds keys of the actor."""
    return {
        "run": {"dir": "unused"},
        "actor": {"model": {"path": str(model)}, "parallel": parallel, "optim": {"lr": LR}, **role},
        "data": {"train": str(data)},
        "train": {"num_steps": STEPS, "mini_batch_samples": MINI_BATCH, "micro_batch_samples": micro_batch},
    }


def sft_written_out(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    tokenizer: Path,
    data: Path,
    weight_decay: float = 0.0,
) -> dict[str, Any]:
    """AdamW and clip_grad_norm_, one sequence at a time: no padding, nothing of ours.

    `parameters` are those that are trained, by the names of what is returned: losses and gradient norms of the steps,
    gradients before they are clipped, and weights at the end. Weight decay applies to matrices.
    """
    samples = sft_samples(data, tokenizer)
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    trace: dict[str, Any] = {"loss": [], "grad_norm": [], "gradients": []}
    for step in range(STEPS):
        batch = samples[step * MINI_BATCH : (step + 1) * MINI_BATCH]
        denominator = sum(len(s.tokens) - s.prompt_length for s in batch)
        optimizer.zero_grad()
        total = 0.0
        for sample in batch:
            tokens = torch.tensor([sample.tokens])
            nll = torch.nn.functional.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
            loss = nll[sample.prompt_length - 1 :].sum() / denominator
            loss.backward()
            total += loss.item()
        trace["loss"].append(total)
        trace["gradients"].append({n: p.grad.numpy().copy() for n, p in parameters.items() if p.grad is not None})
        trace["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)))
        optimizer.step()
    trace["weights"] = {name: p.detach().numpy().copy() for name, p in parameters.items()}
    return trace


def assert_same_training(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Losses and gradient norms to 1e-5, each gradient, and weights to 1e-4 at the end."""
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(actual["grad_norm"], expected["grad_norm"], rtol=1e-5)
    assert len(actual["gradients"]) == len(expected["gradients"]) == STEPS
    for step in range(STEPS):
        relative = 1e-5 if step == 0 else 1e-4  # from the second step on each run's weights carry rounding of their own
        gradients = actual["gradients"][step], expected["gradients"][step]
        assert_gradients_equal(*gradients, relative=relative, what=f"step {step}")
    assert_weights_equal(actual["weights"], expected["weights"])
