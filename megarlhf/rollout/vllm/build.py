"""How vLLM is started: its environment, the arguments that a trainer's engine needs, and its requests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megarlhf.config import RolloutConfig
from megarlhf.rollout.requests import EngineRequest
from megarlhf.rollout.responses import Sampling
from megarlhf.rollout.vllm.patches import NUM_DRAWN, cpu_patches
from megarlhf.runtime import Runtime, without_torch_determinism


def build_llm(
    model_path: Path,
    dtype: torch.dtype,
    rollout: RolloutConfig,
    tp: int,
    max_model_len: int,
    runtime: Runtime,
    has_experts: bool,
    *,
    window: int | None = None,
    sleeps: bool = False,
    further: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The engine with memory for weights and cache, its weights still dummies. window: the model's sliding window"""
    set_environment(rollout, runtime)
    from vllm import LLM

    if runtime.world_size % tp:
        raise ValueError(f"rollout.parallel.tp = {tp} does not divide the {runtime.world_size} ranks of the run")
    on_cpu = runtime.device.type == "cpu"
    ours = {
        "load_format": "dummy",
        # Of a directory with both, vLLM would take Mistral's params.json; the trainer reads config.json.
        "config_format": "hf",
        "dtype": str(dtype).removeprefix("torch."),
        # Logits in fp32, as the trainer's: those of bf16 are 1/8 apart between 16 and 32. The weight stays as it is.
        # vLLM applies a sliding_window of config.json to every model type, also to those that never have one.
        "hf_overrides": {"head_dtype": "float32", "sliding_window": window},
        "skip_tokenizer_init": True,
        "tensor_parallel_size": tp,
        "distributed_executor_backend": "external_launcher",
        "gpu_memory_utilization": rollout.vllm.gpu_memory_utilization,
        "max_model_len": max_model_len,
        # Log-probs of the distribution that was sampled from: after the temperature.
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
    }
    ours |= {"enable_sleep_mode": True} if sleeps and not on_cpu else {}
    if has_experts and not on_cpu:
        # Other kernels of experts swap, permute or shuffle the weights after loading, at unchanged shape.
        ours["moe_backend"] = "triton"
    defaults = _defaults(runtime, tp)
    try:
        with cpu_patches(runtime.device), without_torch_determinism():
            llm = LLM(str(model_path), **{**defaults, **rollout.vllm.args, **ours, **further})
    except (ValueError, TypeError, ImportError) as error:
        if not rollout.vllm.args:
            raise
        raise ValueError(
            f"vLLM does not start with rollout.vllm.args = {dict(rollout.vllm.args)}: {type(error).__name__}: "
            f"{error}. Correct them, or leave them out"
        ) from error
    return llm if on_cpu else require_runner(llm, rollout)


def _defaults(runtime: Runtime, tp: int) -> dict[str, Any]:
    """Arguments that the configuration may change."""
    on_cpu = runtime.device.type == "cpu"
    # Compilation takes 10 s at the first sample and gains nothing with small batches on a CPU.
    defaults: dict[str, Any] = {"enforce_eager": on_cpu, "disable_log_stats": True}
    if on_cpu:
        # Whole blocks of a prompt are computed once for all its samples. The default block on a CPU has 128 tokens,
        # which is longer than many prompts; 32 is the smallest that its attention supports.
        defaults["block_size"] = 32
    if not on_cpu and torch.cuda.device_count() < min(tp, runtime.local_world_size):
        # vLLM's own all-reduce asks by device number whether two devices reach each other. A task that sees one device
        # has no second number, so NCCL's all-reduce is used.
        defaults["disable_custom_all_reduce"] = True
    return defaults


def require_runner(llm: Any, rollout: RolloutConfig) -> Any:
    """Return vLLM. Raises: ValueError for slices on a GPU by a runner whose noise cannot go on in a later slice."""
    if rollout.slices > 1 and not llm.llm_engine.vllm_config.use_v2_model_runner:
        raise ValueError(
            f"rollout.slices = {rollout.slices}: a response goes on with its own random numbers only by vLLM's model "
            "runner V2, and vLLM chose the older one for this model (its log says why). Leave out rollout.vllm.args "
            "that V2 does not have, unset VLLM_USE_V2_MODEL_RUNNER, or set rollout.slices to 1"
        )
    return llm


def enqueue(llm: Any, sampling: Sampling, requests: Sequence[EngineRequest], *, adapter: bool = False) -> list[str]:
    """Hand requests to vLLM's `LLM`, and return their names.

    A later part of a response is a request whose prompt ends with the earlier parts. On a GPU its noise follows from
    seed and position, as that of the whole response does. On a CPU vLLM is told how many draws came before.

    adapter: use vLLM's adapter
    """
    from vllm import SamplingParams

    prompts: list[Any] = [{"prompt_token_ids": request.prompt.tolist()} for request in requests]
    parameters = [
        SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            max_tokens=part.max_tokens,
            seed=None if sampling.greedy else seed,
            extra_args={NUM_DRAWN: len(part.so_far)} if len(part.so_far) else None,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=list(sampling.end_ids),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            ignore_eos=True,  # stop_token_ids are all end tokens; vLLM would read others from the model's directory
        )
        for _, seed, part in requests
    ]
    lora_request = adapter_request() if adapter else None
    names = list(llm.enqueue(prompts, parameters, use_tqdm=False, lora_request=lora_request))
    if sampling.stop is not None:  # stop texts are searched after each token; `enqueue` asks for final outputs only
        from vllm.sampling_params import RequestOutputKind

        states = llm.llm_engine.output_processor.request_states
        for name in names:
            states[name].output_kind = RequestOutputKind.CUMULATIVE
    return names


def adapter_request() -> Any:
    """Request for the only adapter of an engine. It is in vLLM's slot already, so its path is not read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="actor", lora_int_id=1, lora_path="actor")


def set_environment(rollout: RolloutConfig, runtime: Runtime) -> None:
    """Set variables that vLLM reads when it is imported. A variable that the user has set stays."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if runtime.device.type == "cpu":
        defaults |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(rollout.vllm.cpu_cache_gib),
            # The split of a sequence would depend on the other sequences in the batch, and so would the bits.
            "VLLM_CPU_ATTN_SPLIT_KV": "0",
        }
    else:
        # FlashInfer's sampler is compiled at the first start. It supports neither a seed for each request nor log-probs
        # of the sampled distribution, so it is never used here.
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def changed_in_memory(parameters: Mapping[str, Tensor]) -> list[str]:
    """Parameters that no longer hold vLLM's dummy values, which are a function of their shape.

    Call it before anything is written. An emptied parameter has the values of its empty shape; the shape is compared
    with the table.
    """
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    changed = []
    for name, parameter in parameters.items():
        expected = torch.empty_like(parameter.detach())
        initialize_single_dummy_weight(expected)
        if not torch.equal(expected, parameter.detach()):
            changed.append(f"{name} {list(parameter.shape)} was changed in memory after loading")
    return changed
