"""Host memory for what leaves the device, by hand. Starts that it stops: test_illegal_layouts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import count_elements
from megarlhf.config import RLConfig, SFTConfig, load_config
from megarlhf.planning.layout import check_role
from megarlhf.planning.machine.capabilities import check_host_memory, engine_host_weights, host_bytes

ROOT = Path(__file__).parents[2]


def needed(kind: type[Any], name: str, world_size: int, *overrides: str) -> dict[str, int]:
    cfg = load_config(kind, ROOT / "configs" / name, overrides)
    roles = cfg.roles()
    checked = {role: check_role(role, section, world_size) for role, section in roles.items()}
    return host_bytes(cfg, roles, checked, device_type="cuda")


def refusal(kind: type[Any], name: str, *overrides: str) -> str:
    """Message for a run that offloads one byte more than its machine has."""
    cfg = load_config(kind, ROOT / "configs" / name, overrides)
    with pytest.raises(ValueError, match="set some of these keys to false") as refused:
        check_host_memory({"actor.offload.optimizer": 2}, engine_host_weights(cfg), 1, 1)
    return str(refused.value)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_an_optimizer_is_shared_out_or_on_every_data_parallel_rank() -> None:
    """12 bytes of a parameter in bf16: on 8 ranks an eighth of them each, or, at tp 2, half of them on each."""
    parameters, _ = count_elements(architecture_from_hf(Path("configs/plan/llama-3.1-8b")))
    assert parameters == pytest.approx(8.03e9, rel=1e-3)
    shared = needed(SFTConfig, "llama-3-8b/sft-8.yaml", 8)
    whole = needed(SFTConfig, "llama-3-8b/sft-8.yaml", 8, "actor.optim.distributed=false")
    assert shared == {"actor.offload.optimizer": 12 * parameters // 8}
    assert whole == {"actor.offload.optimizer": 12 * (parameters // 2)}


def test_a_moving_average_is_a_copy_in_fp32() -> None:
    parameters, _ = count_elements(architecture_from_hf(Path("configs/plan/llama-3.1-8b")))
    without = needed(RLConfig, "llama-3-8b/grpo-8.yaml", 8)
    averaged = needed(RLConfig, "llama-3-8b/grpo-8.yaml", 8, "ema={decay: 0.99}")
    assert averaged == without | {"ema": 4 * (parameters // 2)}
    assert without["actor.offload.parameters"] == 2 * (parameters // 2)


def test_experts_are_cut_by_ep_too() -> None:
    others, experts = count_elements(architecture_from_hf(Path("configs/plan/qwen3-30b-a3b")))
    assert experts == 48 * 128 * 3 * 2048 * 768
    found = needed(RLConfig, "qwen3-30b-a3b/grpo-16.yaml", 16)
    assert found["actor.offload.parameters"] == 2 * (others + experts // 8)


def test_an_engine_is_named_as_a_remedy_only_where_it_moves_weights_to_host_memory() -> None:
    assert "rollout" not in refusal(SFTConfig, "llama-3-8b/sft-8.yaml")
    assert "rollout" not in refusal(RLConfig, "llama-3-8b/grpo-8.yaml")
    light = refusal(RLConfig, "llama-3-8b/grpo-8.yaml", "rollout.vllm.sleep_level=1")
    assert "to false (rollout.vllm.sleep_level to 2), use more machines" in light
