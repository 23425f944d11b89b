"""Configuration of the rollout: the engine, how it samples, and how far it may be from the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from megarlhf.config.roles import Fraction, FrozenModel, Positive, RoleConfig

Dtype = Literal["fp32", "bf16"]

Balance = Literal["on_demand", "length", "fixed"]

GAP_LIMITS: Mapping[Dtype, tuple[float, float]] = {"fp32": (1e-3, 1e-2), "bf16": (0.1, 2.0)}
"""Default `rollout.logprob_gap.mean` and `p999`, nats, by the coarser dtype of actor and engine."""

_SET_BY_US = {
    "trainer and engine run one model, as actor.model and its config.json describe it": (
        "model model_weights model_impl model_class_overrides hf_config_path hf_overrides config_format runner convert "
        "revision code_revision disable_sliding_window diffusion_config"
    ),
    "rollout.dtype says it": "dtype",
    "the actor's weights are copied into the engine's as they are": "quantization quantization_config",
    "the engine's weights come from the actor and from nowhere else": (
        "load_format model_loader_extra_config weight_transfer_config pt_load_map_location"
    ),
    "an update writes the engine's weights where they lie, so they must stay there": (
        "cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_params "
        "offload_prefetch_step"
    ),
    "rollout.sleep_level says it": "enable_sleep_mode",
    "other kernels of experts reorder the weights in memory, and an update would write wrongly": (
        "moe_backend kernel_config linear_backend"
    ),
    "experts are cut by rollout.parallel.tp over the ranks of an engine, and stay where they are": (
        "enable_expert_parallel enable_eplb eplb_config expert_placement_strategy enable_elastic_ep"
    ),
    "adapters rename the weights that an update writes": "enable_lora default_mm_loras",
    "a draft model's weights are not updated with the actor's": (
        "speculative_config spec_model spec_method spec_tokens"
    ),
    "rollout.parallel.tp says it": "tensor_parallel_size",
    "rollout.gpu_memory_utilization says it": "gpu_memory_utilization",
    "it follows from data.max_prompt_tokens + rollout.max_response_tokens": "max_model_len",
    "vLLM runs in the trainer's processes, on their devices": (
        "distributed_executor_backend worker_cls worker_extension_cls device_ids"
    ),
    "an engine is rollout.parallel.tp contiguous ranks, cut by tensor parallelism alone": (
        "pipeline_parallel_size prefill_context_parallel_size data_parallel_size data_parallel_size_local "
        "data_parallel_rank data_parallel_backend data_parallel_start_rank data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_address data_parallel_rpc_port "
        "decode_context_parallel_size scheduler_cls"
    ),
    "whoever starts the ranks decides it": "nnodes node_rank master_addr master_port",
    "each sample has a seed of its own, which follows from run.seed": "seed",
    "log-probs must be those of the distribution that was sampled from, which the trainer makes from the logits and "
    "rollout.temperature alone": (
        "logprobs_mode logits_processors generation_config override_generation_config watermark_config"
    ),
    "the engine takes and returns tokens; the tokenizer is the actor's": (
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init"
    ),
}
RESERVED_ENGINE_ARGS = {name: reason for reason, names in _SET_BY_US.items() for name in names.split()}
"""Arguments of vLLM that `rollout.engine_args` may not give, and why not."""


class RolloutParallelConfig(FrozenModel):
    tp: PositiveInt | None = None
    """Tensor-parallel size of one engine; default: the actor's."""


class LogprobGapConfig(FrozenModel):
    """How far rollout and trainer may be apart: |rollout's log-prob - trainer's| of each sampled token at the same
    weights and temperature, in nats.

    A run ends when a limit is exceeded in `steps` consecutive steps; the checkpoint of the last one is written before.
    The largest gap of a step is logged and ends nothing: among millions of tokens some are always far apart in bf16,
    most of all where a mixture of experts sends a token elsewhere.
    """

    mean: Positive | None = None
    """Limit of the mean over the response tokens of a step. Default: 0.001 where actor and engine are fp32, 0.1 where
    either is bf16. What it is there to find (other weights, another temperature) makes a mean of tenths of a nat or
    more; rounding in bf16 makes hundredths."""
    p999: Positive | None = None
    """Limit of the 99.9th percentile: the smallest gap that at least 999 of 1000 tokens do not exceed (in a step of
    less than 1000 tokens the largest). Default: 0.01 in fp32, 2 in bf16. It finds what is wrong for few tokens only,
    such as one rank of several."""
    steps: PositiveInt = 3
    """Consecutive steps above a limit that end the run. A run of fewer steps fails at its end if all of them were."""

    def limits(self, dtype: Dtype) -> dict[str, float]:
        """The limits in force where the coarser dtype of actor and engine is this."""
        mean, p999 = GAP_LIMITS[dtype]
        return {"mean": self.mean or mean, "p999": self.p999 or p999}


class RolloutConfig(FrozenModel):
    engine: Literal["vllm", "megatron"] = "vllm"
    """`megatron` generates with the actor itself: slow, the oracle in tests."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of vLLM's weights and computation; `auto`: the actor's. bf16 under an actor in fp32 halves the engine's memory;
    log-probs then differ by what bf16 rounds, for which `algo.rollout_correction` corrects. Read for the engine
    `vllm`."""
    parallel: RolloutParallelConfig = RolloutParallelConfig()
    lora: Literal["merged", "adapter"] = "merged"
    """How vLLM gets an actor with an adapter. `merged`: the adapter is added to the weights on the way. `adapter`:
    the base once, then in every step the adapter alone, into vLLM's own LoRA layers: far fewer bytes, and a slower
    sampling. Of Llama, Mistral, Qwen2 and Qwen3."""
    num_samples_per_prompt: PositiveInt = 1
    """Responses drawn for each prompt of a step."""
    max_response_tokens: PositiveInt = 1024
    """A response that has not ended by then is truncated, and counted."""
    temperature: Positive = 1.0
    """Divides logits in sampling and in every log-prob, on both sides."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Draw from the fewest tokens, the likeliest first, that together have this probability. Of `generate` and `eval`
    only, as `top_k` and `min_p`."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from the so many likeliest tokens; 0: from all."""
    min_p: Fraction = 0.0
    """Draw from tokens that have at least this share of the largest probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response: it ends with the token in which the first of them is complete. That token stays as it
    was drawn, with what stands behind the text in it."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Further tokens that end a response, beside the tokenizer's and those of generation_config.json."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.4
    """Share of GPU memory for vLLM's weights and cache. CPU: the cache is `cpu_cache_gib`."""
    cpu_cache_gib: PositiveInt = 1
    """Memory of vLLM's cache on each rank when it runs on a CPU."""
    verify_weights_every: Annotated[int, Field(ge=0)] = 10
    """Steps between digest checks that vLLM holds the actor's weights; also at start and after the
    first step. 0: only there."""
    reshard_bucket_mib: PositiveInt = 256
    """Memory in which a rank gathers weights to send, and as much for what it receives; less where less is free."""
    poison_weights: bool = False
    """Debug: fill vLLM's weights with NaN before each update and name what is left of it."""
    sleep_level: Literal["auto", 0, 1, 2] = "auto"
    """What vLLM gives back while the trainer works. 0: nothing. 1: its cache; its weights are in host memory meanwhile.
    2: both, and the actor's weights are copied again when it wakes, which a step does anyway. `auto`: 2 on a GPU in
    `rl`, otherwise 0. Of the engine `vllm`; with another one 1 and 2 are refused."""
    max_engine_rebuilds: Annotated[int, Field(ge=0)] = 2
    """How often vLLM may be built anew in one rollout when it fails: it gets the actor's weights again, they are
    certified, and the responses that are missing are drawn. One failure more ends the run; so does the first with 0.
    Read for the engine `vllm`."""
    balance: Balance = "on_demand"
    """How samples are dealt to several engines, which all wait for the slowest. A prompt's samples stay together.
    `on_demand`: each engine begins with a part, and takes more when its batch has room. `length`: all at the beginning,
    so that expected work is equal: prompt and responses as long as they were last time, or in the last step on average.
    `fixed`: equal numbers. Who draws a sample does not change it. Read for the engine `vllm`, where there are several.
    """
    logprob_gap: LogprobGapConfig = LogprobGapConfig()
    """When the difference between rollout and trainer ends the run."""
    engine_args: Mapping[str, Any] = {}
    """Further arguments of vLLM's `LLM`, by vLLM's names, such as `{max_num_seqs: 64, enable_prefix_caching: false}`.
    Names that vLLM does not know are refused, and so are those that this project has to set itself, with the reason.
    Read for the engine `vllm`."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, data: Any) -> Any:
        if isinstance(data, dict) and "max_logprob_gap" in data:
            raise ValueError(
                f"max_logprob_gap = {data['max_logprob_gap']} is no longer read: a run is not ended by the largest of "
                "millions of tokens. Write logprob_gap: {mean: ..., p999: ...} (limits in nats; left out, they follow "
                "from the actor's dtype); the largest gap is the metric rollout_logprob_gap_max"
            )
        return data

    @field_validator("engine_args")
    @classmethod
    def _refuse_reserved(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Whether vLLM knows a name is for `planning/preflight.py` to ask."""
        refused = [f"{name}: {RESERVED_ENGINE_ARGS[name]}" for name in arguments if name in RESERVED_ENGINE_ARGS]
        if refused:
            raise ValueError(f"megarlhf sets these itself, remove them: {'; '.join(refused)}")
        if words := [name for name, value in arguments.items() if str(value).lower() in ("yes", "no", "on", "off")]:
            raise ValueError(f"{', '.join(words)}: write true or false; vLLM would get a text, which counts as true")
        return arguments

    @model_validator(mode="after")
    def _only_of_vllm(self) -> RolloutConfig:
        dtype = None if self.dtype == "auto" else self.dtype
        given = [("engine_args", self.engine_args), ("parallel.tp", self.parallel.tp), ("dtype", dtype)]
        given += [("sleep_level", self.sleep_level not in ("auto", 0))]
        if self.engine == "megatron" and (unread := [key for key, value in given if value]):
            raise ValueError(
                f"{' and '.join(unread)} would have no effect: engine = 'megatron' samples with the actor itself, in "
                "its layout and dtype, and has nothing of its own that could sleep; leave that out (on the command "
                "line: rollout.parallel.tp= rollout.engine_args={} rollout.dtype=auto rollout.sleep_level=auto)"
            )
        return self

    @property
    def filters(self) -> list[str]:
        """What restricts which tokens are drawn, as it is set."""
        set_filters = {"top_p": self.top_p != 1.0, "top_k": self.top_k != 0, "min_p": self.min_p != 0.0}
        return [f"rollout.{name} = {getattr(self, name)}" for name, is_set in set_filters.items() if is_set]

    def tp(self, actor: RoleConfig) -> int:
        """Tensor-parallel size of one engine."""
        return self.parallel.tp or actor.parallel.tp
