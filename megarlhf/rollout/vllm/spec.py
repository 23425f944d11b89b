"""Description of vLLM. vLLM itself is imported only to make an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import vllm_placements
from megarlhf.architectures.vllm_adapters import MAX_RANK, MODEL_TYPES
from megarlhf.config import RoleConfig, RolloutConfig
from megarlhf.rollout.engine_spec import EngineSpec
from megarlhf.rollout.vllm.arguments import cpu_experts_multiple, cpu_head_sizes, unknown_arguments

if TYPE_CHECKING:
    import torch

    from megarlhf.models.role import Role
    from megarlhf.rollout.engine import RolloutEngine

ENGINE_NCCL: Mapping[str, str] = {
    "NCCL_LAUNCH_MODE": "GROUP",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_NET_DISABLE": "1",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "ring,tree;allreduce:tree",
    "NCCL_NTHREADS": "1",
    "NCCL_SOCKET_NTHREADS": "1",
}
"""Variables that vLLM sets for a batch-invariant engine of several ranks, so that the order of a sum does not depend on
the number of tokens. NCCL reads most of them at its first call, which in the trainer's processes is before vLLM's."""

INVARIANT_ATTENTION = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
"""vLLM's batch-invariant attention backends, as far as this project's families can use them."""


class VllmSpec(EngineSpec):
    has_own_weights = True
    sleep_key = "rollout.vllm.sleep_level"

    def make(
        self, rollout: RolloutConfig, actor: Role, dtype: torch.dtype, max_prompt_tokens: int, micro_batch_samples: int
    ) -> RolloutEngine:
        from megarlhf.rollout.vllm.adapter_engine import VllmAdapterEngine
        from megarlhf.rollout.vllm.engine import VllmEngine

        kind = VllmAdapterEngine if rollout.lora == "adapter" else VllmEngine
        return kind(rollout, actor, dtype, max_prompt_tokens)

    def check(
        self, rollout: RolloutConfig, actor: RoleConfig, arch: Architecture, world_size: int, *, on_cpu: bool
    ) -> None:
        tp, path = rollout.tp(actor), actor.model.path
        if world_size % tp:
            raise ValueError(f"rollout.parallel.tp = {tp} does not divide the {world_size} ranks of the run")
        if unknown := unknown_arguments(rollout.vllm.args):
            raise ValueError(f"rollout.vllm.args: {'; '.join(unknown)}")
        try:
            vllm_placements(arch, tp=tp, tp_rank=0, rank=0)
        except ValueError as error:
            raise ValueError(
                f"rollout.parallel.tp = {tp} of vLLM and {path}: {error}; or use rollout.engine=megatron"
            ) from None
        sizes = cpu_head_sizes() if on_cpu else ()
        if sizes and arch.head_dim not in sizes:
            raise ValueError(
                f"{path} has heads of {arch.head_dim} (head_dim), and vLLM's attention on a CPU supports "
                f"only {', '.join(map(str, sizes))}; use another model, a GPU, or rollout.engine=megatron"
            )
        multiple = cpu_experts_multiple() if on_cpu and arch.num_experts else 1
        if arch.hidden_size % multiple:
            raise ValueError(
                f"{path} has experts and hidden_size = {arch.hidden_size}, and vLLM's experts on a CPU "
                f"support only multiples of {multiple}; use another model, a GPU, or rollout.engine=megatron"
            )

    def check_adapter(self, rollout: RolloutConfig, arch: Architecture) -> None:
        assert arch.adapter is not None
        if arch.model_type not in MODEL_TYPES:
            raise ValueError(
                f"rollout.lora = adapter: vLLM's layers of {arch.model_type} do not support an adapter for each linear "
                f"layer ({', '.join(MODEL_TYPES)} do); set rollout.lora to merged"
            )
        if arch.adapter.rank > MAX_RANK:
            raise ValueError(
                f"rollout.lora = adapter: vLLM supports adapters up to rank {MAX_RANK}, and actor.lora has rank "
                f"{arch.adapter.rank}; set rollout.lora to merged"
            )

    def host_weights(self, rollout: RolloutConfig) -> Mapping[str, str]:
        return {self.sleep_key: "2"} if rollout.vllm.sleep_level == 1 else {}

    def deterministic_environment(self, engine_ranks: int) -> Mapping[str, tuple[str, ...]]:
        nccl = {name: (value,) for name, value in ENGINE_NCCL.items()} if engine_ranks > 1 else {}
        return {"VLLM_BATCH_INVARIANT": ("1",), **nccl}  # a response has the same bits whichever requests run beside it

    def check_deterministic(self, rollout: RolloutConfig) -> None:
        args = rollout.vllm.args
        section = args.get("attention_config")
        backend = args.get("attention_backend") or (section.get("backend") if isinstance(section, Mapping) else None)
        if backend is not None and str(backend).upper() not in ("AUTO", *INVARIANT_ATTENTION):
            raise ValueError(
                f"run.deterministic = true, but rollout.vllm.args sets the attention backend {backend}, with which "
                f"vLLM's responses depend on other requests; use {', '.join(INVARIANT_ATTENTION)} or leave it out"
            )

    def deterministic_device_problem(self, capability: tuple[int, int]) -> str:
        major, minor = capability
        if major >= 9:
            return ""
        return (
            f"on a GPU of compute capability {major}.{minor} vLLM is batch-invariant by replacing aten::linear and "
            "aten::matmul in this process, which is also the trainer's, and its replacements have no gradient "
            "(vllm/model_executor/determinism/batch_invariant.py); expected 9.0 or higher. Use rollout.engine=megatron"
        )

    def unread_keys(self, *, on_cpu: bool | None) -> Mapping[str, str]:
        if on_cpu is None:
            return {}
        if on_cpu:
            return {"vllm.gpu_memory_utilization": "on a CPU it is rollout.vllm.cpu_cache_gib"}
        return {"vllm.cpu_cache_gib": "on a GPU it is rollout.vllm.gpu_memory_utilization"}
