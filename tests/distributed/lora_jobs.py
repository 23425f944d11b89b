"""What the rank processes do with adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarlhf.config import RoleConfig, RolloutConfig, SFTConfig
from megarlhf.models.build import ModelShard, placements_on
from megarlhf.models.role import Role, build_role
from megarlhf.models.weights import load_weights
from megarlhf.parallel.mesh import GroupCache
from megarlhf.rollout.megatron_engine import MegatronEngine
from megarlhf.rollout.responses import Sampling
from megarlhf.runtime import Runtime
from megarlhf.weights.transport.storages import view
from tests.distributed.gathered import record_gradients, weights_of
from tests.distributed.logical import Arrays


def draw_adapter(role: Role, std: float = 0.2) -> None:
    """Numbers in every B, the same at every layout; a new one is zero, and its A would have no gradient."""
    live = role.shard.parameters()
    with torch.no_grad():
        for placement in placements_on(role.shard, role.mesh.runtime.rank).placements:
            if placement.tensor.endswith(".lora_B.weight"):
                shape = placements_on(role.shard, role.mesh.runtime.rank).tensors[placement.tensor]
                seed = sum(map(ord, placement.tensor))
                whole = std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                box = tuple(slice(a, b) for a, b in zip(placement.box.start, placement.box.stop, strict=True))
                view(placement, live).copy_(whole[box])


def lora_gradients(runtime: Runtime, config: dict[str, Any], merged: str) -> dict[str, Any]:
    """Loss, gradients and weights of the first step of an adapter whose B is not zero; its model is exported first."""
    from megarlhf.trainers.supervised.sft import SupervisedFineTuning
    from tests.distributed.jobs import _sft_samples, train_once

    cfg = SFTConfig.model_validate(config)
    objective, samples = SupervisedFineTuning(cfg), _sft_samples(cfg)
    actor = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1)
    draw_adapter(actor)
    actor.export(Path(merged))
    gradients: list[Arrays] = []
    record_gradients(actor, gradients)
    weights = weights_of(actor)
    step = train_once(objective, actor, samples[: cfg.train.mini_batch_samples])
    return {"loss": step["loss"], "grad_norm": step["grad_norm"], "gradients": gradients[0], "weights": weights}


def lora_exports(runtime: Runtime, config: dict[str, Any], directory: str, draw: bool = True) -> None:
    """What an actor exports before it is trained; `draw`: with numbers in every B."""
    cfg = SFTConfig.model_validate(config)
    actor = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0)
    if draw:
        draw_adapter(actor)
    actor.export(Path(directory))


def vllm_with_adapter(
    runtime: Runtime, model: str, adapters: list[str], tp: int, prompts: list[list[int]], how: str
) -> dict[str, Any]:
    """An engine fed by an actor with one adapter after the other: what it says and how likely it finds it, and whether
    planted wrong adapters are found."""
    from megarlhf.rollout.factory import make_engine

    section = {"model": {"path": model}, "parallel": {"tp": tp}, "lora": {"path": adapters[0]}}
    actor = build_role("actor", RoleConfig.model_validate(section), "lm", GroupCache(runtime), seed=0)
    rollout = RolloutConfig.model_validate({"max_response_tokens": 8, "lora": how, "parallel": {"tp": tp}})
    engine = make_engine(rollout, actor, 100, 2)
    rows, greedy = [torch.tensor(p) for p in prompts], Sampling(max_tokens=8, greedy=True, end_ids=(2,))
    found: dict[str, Any] = {"responses": [], "digests": [], "faults": {}}
    oracle = MegatronEngine(actor.shard, 2, actor.parts)
    live = actor.shard.parameters()
    base = {name: tensor.clone() for name, tensor in live.items() if ".lora." not in name}
    for version, adapter in enumerate(adapters):
        shard = replace(actor.shard, adapter_path=Path(adapter))
        load_weights(shard, actor.section.model, seed=0)
        engine.update_weights(shard, version)
        found["digests"].append(engine.engine.verify_weights(shard).digest)
        oracle.update_weights(actor.shard, version)
        for each in (engine, oracle):
            drawn = each.generate(rows, [0] * len(rows), greedy)
            pairs = zip(drawn.responses.rows(), drawn.logprobs.rows(), strict=True)
            found["responses"].append([(tokens.tolist(), logprobs.tolist()) for tokens, logprobs in pairs])
    assert all(torch.equal(live[name], tensor) for name, tensor in base.items()), "the base has changed"
    for what, name in (("another A", "A"), ("another B", "B")):
        parameter = next(tensor for key, tensor in live.items() if f"linear_qkv.lora.{name}" in key)
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.25)
        found["faults"][what] = _refusal(engine, actor)
        with torch.no_grad():
            parameter.copy_(kept)
    found["faults"]["none"] = _refusal(engine, actor)
    for parameter in actor.shard.parameters().values():  # the engine has the base alone
        parameter.requires_grad_(False)
    if how == "merged":
        inner = engine.engine
        inner._transfer(inner._resharder_from(replace(actor.shard.base)), _Unmerged(actor.shard))
        found["faults"]["no adapter"] = _refusal(engine, actor)
    else:
        slot = next(tensor for name, tensor in engine.engine._parameters.items() if "down_proj.lora_b" in name)
        slot.zero_()
        found["faults"]["no adapter"] = _refusal(engine, actor)
    found["slots"] = sum(".lora_" in name for name in engine.engine._parameters)
    engine.close()
    return found


class _Unmerged:
    """As an actor whose adapter never arrives."""

    def __init__(self, shard: ModelShard) -> None:
        self._shard = shard

    def merged(self) -> dict[str, torch.Tensor]:
        return self._shard.base.parameters()


def _refusal(engine: Any, actor: Role) -> str:
    try:
        engine.engine.verify_weights(actor.shard)
    except RuntimeError as error:
        return str(error)
    return ""


def trained_bytes(runtime: Runtime, config: dict[str, Any]) -> dict[str, int]:
    """After a step: bytes of this rank's parameters, gradient buffers and optimizer's state."""
    from megarlhf.trainers.supervised.sft import SupervisedFineTuning
    from tests.distributed.jobs import _sft_samples, train_once

    cfg = SFTConfig.model_validate(config)
    actor = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1)
    train_once(SupervisedFineTuning(cfg), actor, _sft_samples(cfg)[: cfg.train.mini_batch_samples])
    assert actor.parts.gradients is not None
    return {
        "parameters": actor.parts.parameters.nbytes,
        "gradients": actor.parts.gradients.nbytes,
        "optimizer": sum(piece.nbytes for piece in actor.parts.optimizer),
        "adapter": sum(p.numel() for p in actor.shard.module.parameters() if p.requires_grad),
    }
