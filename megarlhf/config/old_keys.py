"""Keys and values of earlier versions: refused in new configurations, translated in files of earlier runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHUFFLE = {"true": "samples", "false": "none"}
"""Earlier values of `train.shuffle`, and their meaning."""
VLLM = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "cpu_cache_gib": "cpu_cache_gib",
    "sleep_level": "sleep_level",
    "engine_args": "args",
}
"""Earlier keys of `rollout`, and their names in `rollout.vllm`."""


def refuse_moved_keys(rollout: Any) -> Any:
    """Raises: ValueError for keys of `rollout` that are now in `rollout.vllm`."""
    moved = [name for name in VLLM if isinstance(rollout, Mapping) and name in rollout]
    if moved:
        keys = ", ".join(f"rollout.{name} is now rollout.vllm.{VLLM[name]}" for name in moved)
        section = ", ".join(f"{VLLM[name]}: {rollout[name]}" for name in moved)
        arguments = " ".join(f"rollout.vllm.{VLLM[name]}={rollout[name]}" for name in moved)
        raise ValueError(f"{keys}: write vllm: {{{section}}} in a file, or {arguments} on the command line")
    return rollout


def translate(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace earlier keys and values in a configuration that a run of an earlier version wrote."""
    config = dict(config)
    train, rollout = config.get("train"), config.get("rollout")
    if isinstance(train, Mapping) and isinstance(train.get("shuffle"), bool):
        config["train"] = {**train, "shuffle": SHUFFLE[str(train["shuffle"]).lower()]}
    if isinstance(rollout, Mapping) and (moved := VLLM.keys() & rollout.keys()):
        kept = {name: value for name, value in rollout.items() if name not in moved}
        vllm = {VLLM[name]: rollout[name] for name in rollout if name in moved}
        config["rollout"] = {**kept, "vllm": {**vllm, **rollout.get("vllm", {})}}
    return config
