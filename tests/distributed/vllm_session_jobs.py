"""What the rank processes do with an engine of vLLM's that an actor feeds more than once."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megarlhf.config import RoleConfig, RolloutConfig
from megarlhf.models.role import Role, build_role
from megarlhf.models.weights import load_weights
from megarlhf.parallel.mesh import GroupCache
from megarlhf.rollout.megatron_engine import MegatronEngine
from megarlhf.rollout.responses import Sampling
from megarlhf.runtime import Runtime


def vllm_session(runtime: Runtime, first: str, second: str, tp: int, prompts: list[list[int]]) -> dict[str, Any]:
    """An engine fed by an actor twice: what it says each time, and whether planted faults are found."""
    from megarlhf.rollout.vllm.engine import VllmEngine

    section = RoleConfig.model_validate({"model": {"path": first}, "parallel": {"tp": tp}})
    actor = build_role("actor", section, "lm", GroupCache(runtime), seed=0)
    rollout = RolloutConfig.model_validate({"max_response_tokens": 8})
    engine = VllmEngine(rollout, actor, torch.float32, 392)
    rows, seeds = [torch.tensor(p) for p in prompts], list(range(len(prompts)))
    greedy = Sampling(max_tokens=8, greedy=True, end_ids=(2,))
    warm = Sampling(max_tokens=8, temperature=0.7, end_ids=(2,))
    responses: dict[str, Any] = {}
    for version, path in enumerate((first, second, first)):
        load_weights(actor.shard, section.model.model_copy(update={"path": Path(path)}), seed=0)
        engine.update_weights(actor.shard, version)
        engine.verify_weights(actor.shard)
        for name, sampling in (("greedy", greedy), ("sampled", warm)):
            rollouts = engine.generate(rows, seeds, sampling)
            responses[f"{name}{version}"] = [
                (tokens.tolist(), logprobs.tolist())
                for tokens, logprobs in zip(rollouts.responses.rows(), rollouts.logprobs.rows(), strict=True)
            ]
    oracle = MegatronEngine(actor.shard, 2, actor.parts)
    oracle.update_weights(actor.shard, 2)
    responses["oracle"] = [row.tolist() for row in oracle.generate(rows, seeds, greedy).responses.rows()]
    responses["faults"] = _planted_faults(runtime, actor, engine)
    responses["cuda_untouched"] = torch.cuda.current_device.__module__ == "torch.cuda"
    engine.close()
    return responses


def vllm_prompt_once(runtime: Runtime, model: str, prompt: list[int], copies: int) -> list[dict[str, Any]]:
    """Samples of one prompt as megarlhf starts vLLM, and without a prefix cache; and how many tokens it computed."""
    from megarlhf.rollout.vllm.engine import VllmEngine

    section = RoleConfig.model_validate({"model": {"path": model}})
    actor = build_role("actor", section, "lm", GroupCache(runtime), seed=0)
    load_weights(actor.shard, section.model, seed=0)
    sampling, found = Sampling(max_tokens=8, end_ids=(2,)), []
    for arguments in ({}, {"enable_prefix_caching": False}):
        rollout = RolloutConfig.model_validate({"max_response_tokens": 8, "vllm": {"args": arguments}})
        engine = VllmEngine(rollout, actor, torch.float32, 392)
        engine.update_weights(actor.shard, 0)
        scheduler, computed = engine._llm.llm_engine.engine_core.engine_core.scheduler, []
        schedule = scheduler.schedule

        def noted(*given: Any, schedule: Any = schedule, computed: list[int] = computed) -> Any:
            output = schedule(*given)
            computed.append(output.total_num_scheduled_tokens)
            return output

        with mock.patch.object(scheduler, "schedule", noted):
            rollouts = engine.generate([torch.tensor(prompt)] * copies, list(range(copies)), sampling)
        engine.close()
        pairs = zip(rollouts.responses.rows(), rollouts.logprobs.rows(), strict=True)
        said = [(tokens.tolist(), logprobs.tolist()) for tokens, logprobs in pairs]
        found.append({"said": said, "computed": sum(computed)})
    return found


def _planted_faults(runtime: Runtime, actor: Role, engine: Any) -> dict[str, str]:
    """Change a parameter of vLLM's on one rank only; verification must name the tensor on every rank."""
    messages = {}
    # With 16 tokens vLLM's last rank holds padding only: the embedding's fault is planted on the first.
    faulty = {"model.embed_tokens.weight": 0}
    for storage in ("model.layers.1.mlp.gate_up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"):
        live = engine._parameters[storage]
        kept = live.detach().clone()
        if runtime.rank == faulty.get(storage, runtime.world_size - 1):
            with torch.no_grad():
                live.view(-1)[0].add_(1e-3) if storage == "model.norm.weight" else live[0].mul_(1.5)
        try:
            engine.verify_weights(actor.shard)
            messages[storage] = ""
        except RuntimeError as error:
            messages[storage] = str(error)
        with torch.no_grad():
            live.copy_(kept)
    messages["lm_head.weight"] = _head_of_its_own(runtime, actor, engine)
    engine.verify_weights(actor.shard)
    return messages


def _head_of_its_own(runtime: Runtime, actor: Role, engine: Any) -> str:
    """As when an update replaced a tied embedding: the last rank's head keeps the old memory."""
    (head,) = engine._llm.apply_model(lambda model: model.lm_head)
    kept = head.weight
    if runtime.rank == runtime.world_size - 1:
        head.weight = torch.nn.Parameter(kept.detach().clone(), requires_grad=False)
    try:
        engine.verify_weights(actor.shard)
    except RuntimeError as error:
        return str(error)
    finally:
        head.weight = kept
    return ""
