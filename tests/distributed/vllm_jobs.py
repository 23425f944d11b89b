"""What the rank processes do with vLLM's engine and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf.config import RoleConfig, RolloutConfig
from megarlhf.models.role import Role, build_role
from megarlhf.models.weights import load_weights
from megarlhf.parallel.mesh import GroupCache
from megarlhf.rollout.engine import Sampling
from megarlhf.runtime import Runtime
from megarlhf.weights.placement import Placement, RankPlacements
from megarlhf.weights.tensor_map import vllm_placements

MAX_LENGTH, NEW_TOKENS, EOS = 64, 6, 2


class _Session:
    """An actor and an engine that it feeds."""

    def __init__(self, runtime: Runtime, model: str, tp: int, parallel: dict[str, Any], **rollout: Any) -> None:
        from megarlhf.rollout.vllm_engine import VllmEngine

        self.runtime = runtime
        self.section = RoleConfig.model_validate({"model": {"path": model}, "parallel": parallel})
        self.actor: Role = build_role("actor", self.section, "lm", GroupCache(runtime), seed=0)
        settings = RolloutConfig.model_validate({"max_response_tokens": NEW_TOKENS, **rollout})
        self.engine = VllmEngine(Path(model), torch.float32, settings, tp, MAX_LENGTH, runtime)

    def update(self, model: str, version: int) -> None:
        load_weights(self.actor.part, self.section.model.model_copy(update={"path": Path(model)}), seed=0)
        self.engine.update_weights(self.actor.part, version)

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        sampling = Sampling(max_tokens=NEW_TOKENS, greedy=True, eos_id=EOS)
        rollouts = self.engine.generate([torch.tensor(p) for p in prompts], [0] * len(prompts), sampling)
        return [row.tolist() for row in rollouts.responses.rows()]

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.engine._parameters.items()}


def _error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 -- whatever it is, the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def vllm_family(
    runtime: Runtime, first: str, second: str, tp: int, parallel: dict[str, Any], prompts: list[list[int]]
) -> dict[str, Any]:
    """What an engine says with two sets of weights, and which parameters vLLM's own loading would fill otherwise."""
    from safetensors.torch import load_file

    from megarlhf.rollout.vllm_patches import cpu_patches

    session = _Session(runtime, first, tp, parallel)
    early = _error(lambda: session.greedy(prompts))
    said, held = [], []
    for version, path in enumerate((first, second)):
        session.update(path, version)
        session.engine.verify_weights(session.actor.part)
        said.append(session.greedy(prompts))
        held.append(session.weights())
    changed = [name for name, value in held[0].items() if not torch.equal(value, held[1][name])]

    def by_reload(path: str) -> None:
        tensors = iter(load_file(Path(path) / "model.safetensors").items())
        with cpu_patches(runtime.device):
            session.engine._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})

    def by_load(path: str) -> None:
        session.engine._load(iter(load_file(Path(path) / "model.safetensors").items()))

    different = {}
    for how, path, expected in ((by_reload, first, held[0]), (by_load, second, held[1])):
        how(path)
        live = session.engine._llm.apply_model(lambda model: dict(model.named_parameters()))[0]
        assert live.keys() == expected.keys()
        different[how.__name__] = [name for name, value in live.items() if not torch.equal(value, expected[name])]
    session.engine.close()
    return {"early": early, "said": said, "different": different, "changed": changed, "all": list(held[0])}
