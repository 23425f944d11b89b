"""`megarlhf rl` with vLLM on four ranks: every step samples with the weights that the step before trained.

Not covered: GPUs, an actor in bf16, families other than Llama (test_vllm_families.py), rollout layouts for which ranks
stand in another order (the same).
"""

import re
from typing import Any

import pytest
from safetensors.torch import load_file

from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.test_rl_layouts import config

LIMIT = 1e-4
"""Nats by which trainer and vLLM may differ on a token in fp32."""
CERTIFIED = re.compile(r"weights of version (\d+) certified: digest (\w+)")

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "tp2pp2_to_tp2": ({"tp": 2, "pp": 2}, 2), "tp2cp2_to_tp2": ({"tp": 2, "cp": 2}, 2),
    "pp2vpp2_to_tp2": ({"pp": 2, "vpp": 2}, 2), "dp4_to_tp1": ({}, 1), "dp4_to_tp4": ({}, 4),
}  # fmt: skip
"""The trainer's layout and vLLM's tp: two engines, twice; four; one, whose ranks hold two to a key-value head."""


@pytest.mark.parametrize(
    "layout", [name if "pp2" in name else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_rl_samples_with_what_it_has_trained(layout, vllm_ranks, models, data, tmp_path) -> None:
    """The gap stays within rounding in every step, and the weights of the start would not pass: from the second step
    on, the mean difference to them is above the limit. Certificates at the start, after the first step, every N."""
    parallel, tp = LAYOUTS[layout]
    cfg = config({**models, "other": models["scorer"]}, data["prompts"], parallel, micro_batch_samples=2)
    cfg["run"] = {"dir": str(tmp_path / "run"), "nproc": 4}
    cfg["train"] |= {"num_steps": 3, "epochs_per_step": 1}
    cfg["rollout"] |= {"engine": "vllm", "parallel": {"tp": tp}, "verify_weights_every": 3}
    written = vllm_ranks.run(4, "command", *argv_of("rl", cfg, tmp_path / "cfg.yaml"))

    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert 0 < row["rollout_logprob_gap_max"] < LIMIT
        assert row["actor_grad_norm"] > 0
        assert row["seconds_reshard"] > 0
    assert rows[1]["kl"] == 0.0
    assert min(abs(row["kl"]) for row in rows[2:]) > 10 * LIMIT, "the weights of the start could pass"
    assert [row["step"] for row in rows if "seconds_certificate" in row] == [1, 3]
    certified = CERTIFIED.findall("".join(written))
    assert [int(version) for version, _ in certified] == [0, 1, 3], "of the steps, and said by rank 0 alone"
    assert len({digest for _, digest in certified}) == 3, "the weights were the same twice"

    start = load_file(models["plain"] / "model.safetensors")
    end = load_file(tmp_path / "run/checkpoints/latest/actor/model.safetensors")
    assert start.keys() == end.keys()
    for name, tensor in start.items():
        assert float((end[name] - tensor).abs().max()) > 1e-3, f"{name} was not trained"


def test_an_engine_in_bf16_under_an_actor_in_fp32_is_corrected_for(vllm_ranks, models, data, tmp_path) -> None:
    """At TP2: the engine holds the actor's weights rounded to bf16, certified; the gap is that of bf16 and ends no run;
    truncated importance sampling cuts some ratios. Without correction the same samples give another gradient."""
    cfg = config({**models, "other": models["scorer"]}, data["prompts"], {"tp": 2}, advantage="grpo")
    del cfg["critic"]
    cfg["run"], cfg["train"]["num_steps"] = {"dir": str(tmp_path / "tis")}, 2
    cfg["rollout"] |= {"engine": "vllm", "dtype": "bf16", "parallel": {"tp": 2}, "logprob_gap": {"steps": 1}}
    cfg["algo"]["rollout_correction"] = {"kind": "truncate", "high": 1.001}
    argv = argv_of("rl", cfg, tmp_path / "cfg.yaml")
    said = vllm_ranks.run(2, "command", *argv)
    vllm_ranks.run(2, "command", *argv, f"run.dir={tmp_path / 'without'}", "algo.rollout_correction.kind=none")
    corrected, without = (read_metrics(tmp_path / name)[1:] for name in ("tis", "without"))
    for row in corrected:
        assert 1e-4 < row["rollout_logprob_gap_mean"] < 0.1
        assert 0 < row["rollout_correction_cut"] < 1
        assert 0.9 < row["rollout_correction_weight_mean"] < 1
        assert row["rollout_correction_ratio_max"] > 1.001
        assert row["actor_grad_norm"] > 0
    assert corrected[0]["rollout_logprob_gap_mean"] == without[0]["rollout_logprob_gap_mean"]
    assert corrected[0]["actor_grad_norm"] != without[0]["actor_grad_norm"]
    assert CERTIFIED.findall("".join(said)), "of the rounded weights"
