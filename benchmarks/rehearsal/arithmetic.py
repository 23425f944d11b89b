"""The memory of a dense model's rank by hand, beside what its rehearsal has counted.

For PPO with four roles of one model and one layout. Nothing here is the program's: parameters are counted from
config.json, and what a layer keeps for a token is from the table of docs/rehearsal-gpu.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import ROOT

GIB = 2**30
KEPT = 48_673
"""Bytes that a layer of Llama-3-70B keeps for a token under tp 8 with sequence parallelism (docs/rehearsal-gpu.md)."""


@dataclass(frozen=True)
class Row:
    """One kind of memory on the tightest rank, in bytes."""

    what: str
    formula: str
    by_hand: float
    rehearsed: float

    @property
    def difference(self) -> float:
        """Of what arithmetic says."""
        return self.rehearsed / self.by_hand - 1


def rows_of(found: dict[str, Any]) -> list[Row]:
    """Of a `rehearsal.json`, for its tightest rank at its peak; that rank must hold the first stage of each role."""
    rank = next(each for each in found["ranks"] if each["rank"] == found["tightest"])
    assert set(rank["stages"].values()) == {0}, f"rank {rank['rank']} does not hold the first stages: {rank['stages']}"
    step, phase = rank["peak_at"]
    kinds = next(each["by_kind"] for each in rank["memory"] if (each["step"], each["phase"]) == (step, phase))
    cfg, actor = found["config"], found["config"]["actor"]
    model = json.loads((ROOT / actor["model"]["path"] / "config.json").read_text(encoding="utf-8"))
    tp, pp = actor["parallel"]["tp"], actor["parallel"]["pp"]
    dp = found["world_size"] // (tp * pp)
    stage = _parameters(model, tp, layers=model["num_hidden_layers"] // pp, vocabularies=1)
    engine = _parameters(model, tp, layers=model["num_hidden_layers"], vocabularies=2)
    tokens = cfg["train"]["max_tokens_per_micro_batch"]
    layers = model["num_hidden_layers"]
    utilization = cfg["rollout"]["vllm"]["gpu_memory_utilization"]
    share = utilization * found["capacity"]
    words = f"{stage / 1e9:.3f}e9 parameters"
    return [
        Row("parameters of four roles", f"4 x 2 B x {words}", 8 * stage, kinds["parameters"]),
        Row("gradients of two", f"2 x 4 B x {words}", 8 * stage, kinds["gradients"]),
        Row("main parameters of two", f"2 x 4 B x {words} / dp {dp}", 8 * stage / dp, kinds["main parameters"]),
        Row("Adam's moments of two", f"2 x 8 B x {words} / dp {dp}", 16 * stage / dp, kinds["optimizer state"]),
        Row("vLLM's weights", f"2 B x {engine / 1e9:.3f}e9 parameters", 2 * engine, kinds["engine's weights"]),
        Row(
            "vLLM's cache",
            f"{utilization:g} of {found['capacity'] / GIB:.2f} GiB, less the weights",
            share - 2 * engine,
            kinds["engine's cache"],
        ),
        Row(
            "activations",
            f"{layers} layers in flight x {tokens} tokens x {KEPT} B",
            layers * tokens * KEPT,
            kinds["activations"],
        ),
    ]


def _parameters(model: dict[str, Any], tp: int, *, layers: int, vocabularies: int) -> float:
    """Of one rank, rows of the vocabulary filled up to 128 for each rank."""
    hidden, ffn = model["hidden_size"], model["intermediate_size"]
    kv = hidden * model["num_key_value_heads"] // model["num_attention_heads"]
    rows = -(-model["vocab_size"] // (128 * tp)) * 128
    layer = (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn) / tp + 2 * hidden
    return vocabularies * rows * hidden + layers * layer + (hidden if vocabularies == 2 else 0)
