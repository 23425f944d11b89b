"""Configuration of the rollout: the engine, its sampling, and the limits of its difference to the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from megarlhf.config.old_keys import refuse_moved_keys
from megarlhf.config.roles import Fraction, FrozenModel, Positive, RoleConfig

Dtype = Literal["fp32", "bf16"]

Balance = Literal["on_demand", "length", "fixed"]

GAP_LIMITS: Mapping[Dtype, tuple[float, float]] = {"fp32": (1e-3, 1e-2), "bf16": (0.1, 2.0)}
"""Default `rollout.logprob_gap.mean` and `p999` in nats, by the coarser dtype of actor and engine."""

_SET_BY_US = {
    "trainer and engine run one model, as actor.model and its config.json describe it": (
        "model model_weights model_impl model_class_overrides hf_config_path hf_overrides config_format runner convert "
        "revision code_revision disable_sliding_window diffusion_config"
    ),
    "rollout.dtype sets it": "dtype",
    "the actor's weights are copied into the engine's as they are": "quantization quantization_config",
    "the engine's weights come only from the actor": (
        "load_format model_loader_extra_config weight_transfer_config pt_load_map_location"
    ),
    "an update writes the engine's weights in place, so they must not be moved": (
        "cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_params "
        "offload_prefetch_step"
    ),
    "rollout.vllm.sleep_level sets it": "enable_sleep_mode",
    "other kernels of experts reorder the weights in memory, and an update would write to the wrong place": (
        "moe_backend kernel_config linear_backend"
    ),
    "experts are cut by rollout.parallel.tp over the ranks of an engine, and must not be moved": (
        "enable_expert_parallel enable_eplb eplb_config expert_placement_strategy enable_elastic_ep"
    ),
    "adapters rename the weights that an update writes": "enable_lora default_mm_loras",
    "a draft model's weights are not updated with the actor's": (
        "speculative_config spec_model spec_method spec_tokens"
    ),
    "rollout.parallel.tp sets it": "tensor_parallel_size",
    "rollout.vllm.gpu_memory_utilization sets it": "gpu_memory_utilization",
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
    "the launcher of the ranks sets it": "nnodes node_rank master_addr master_port",
    "each sample has a seed of its own, which follows from run.seed": "seed",
    "log-probs must be those of the distribution that was sampled from, which the trainer makes from the logits and "
    "rollout.temperature alone": (
        "logprobs_mode logits_processors generation_config override_generation_config watermark_config"
    ),
    "the engine takes and returns tokens; the tokenizer is the actor's": (
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init"
    ),
}
RESERVED_ARGS = {name: reason for reason, names in _SET_BY_US.items() for name in names.split()}
"""Arguments of vLLM that `rollout.vllm.args` may not set, with the reason."""


_NOTHING_OF_ITS_OWN: Mapping[str, str] = {
    "megatron": (
        "samples with the actor itself, in its layout and dtype, and has nothing of its own that could sleep; leave "
        "that out (on the command line: rollout.parallel.tp= rollout.vllm.args={} rollout.dtype=auto "
        "rollout.vllm.sleep_level=auto)"
    )
}
"""Engines for which layout, dtype, arguments and sleep cannot be set, with the reason and the remedy."""


OF_SLICES = frozenset(f"rollout.{key}" for key in ("slices", "steps_ahead", "gap_probe_samples"))
"""Keys that only `rl` takes."""
DRAWS = (
    "rollout.slices",
    "rollout.steps_ahead",
    "rollout.num_samples_per_prompt",
    "rollout.max_response_tokens",
    "rollout.temperature",
    "rollout.stop",
    "rollout.stop_token_ids",
    "train.prompts_per_step",
    "train.sampler",
    "algo.dynamic_sampling.surplus",
    "run.seed",
)
"""Keys that decide how the responses of a step of rl are drawn. They cannot change while some are drawn in slices."""


class RolloutParallelConfig(FrozenModel):
    tp: PositiveInt | None = None
    """Tensor-parallel size of one engine; default: the actor's."""


class LogprobGapConfig(FrozenModel):
    """Limits of the difference between rollout and trainer: |rollout's log-prob - trainer's| of each sampled token at
    the same weights and temperature, in nats.

    A run ends when a limit is exceeded in `steps` consecutive steps, after writing the last step's checkpoint.
    The largest gap of a step is only logged: in bf16 a few of millions of tokens always have a large gap, most of all
    if a mixture of experts sends a token to another expert.
    """

    mean: Positive | None = None
    """Limit of the mean over the response tokens of a step. Default: 0.001 if actor and engine are fp32, 0.1 if either
    is bf16. A real fault (other weights, another temperature) makes a mean of tenths of a nat or more; rounding in bf16
    makes hundredths."""
    p999: Positive | None = None
    """Limit of the 99.9th percentile: the smallest gap that at least 999 of 1000 tokens do not exceed (in a step of
    less than 1000 tokens the largest). Default: 0.01 in fp32, 2 in bf16. It finds faults of few tokens, such as those
    of one rank of several."""
    steps: PositiveInt = 3
    """Consecutive steps above a limit that end the run. A shorter run fails at its end if all of its steps exceed
    it."""

    def limits(self, dtype: Dtype) -> dict[str, float]:
        """Limits in force for the coarser dtype of actor and engine."""
        mean, p999 = GAP_LIMITS[dtype]
        return {"mean": self.mean or mean, "p999": self.p999 or p999}


class VllmConfig(FrozenModel):
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.4
    """Share of GPU memory for vLLM's weights and cache. On a CPU `cpu_cache_gib` sets the cache."""
    cpu_cache_gib: PositiveInt = 1
    """Memory of vLLM's cache on each rank when it runs on a CPU."""
    sleep_level: Literal["auto", 0, 1, 2] = "auto"
    """Memory that vLLM frees while the trainer works. 0: none. 1: the cache, and its weights are moved to host memory.
    2: cache and weights; the actor's weights are copied again when it wakes, which a step does anyway. `auto`: 2 on a
    GPU in `rl`, otherwise 0. Other engines refuse 1 and 2."""
    args: Mapping[str, Any] = {}
    """Further arguments of vLLM's `LLM`, by vLLM's names, such as `{max_num_seqs: 64, enable_prefix_caching: false}`.
    Names that vLLM does not know are refused. So are those that this project sets itself, with the reason."""

    @field_validator("args")
    @classmethod
    def _refuse_reserved(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse reserved names. A preflight checks whether vLLM knows the others."""
        refused = [f"{name}: {RESERVED_ARGS[name]}" for name in arguments if name in RESERVED_ARGS]
        if refused:
            raise ValueError(f"megarlhf sets these itself, remove them: {'; '.join(refused)}")
        if switches := [name for name, value in arguments.items() if str(value).lower() in ("yes", "no", "on", "off")]:
            raise ValueError(f"{', '.join(switches)}: write true or false; vLLM would get a text, which counts as true")
        return arguments


class RolloutConfig(FrozenModel):
    engine: Literal["vllm", "megatron"] = "vllm"
    """Engine that generates responses. `megatron` uses the actor itself: slow, the oracle in tests."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the engine's weights and computation; `auto`: the actor's. bf16 with an actor in fp32 halves the
    engine's memory; log-probs then differ by rounding to bf16, which `algo.rollout_correction` corrects. `megatron` has
    no dtype of its own."""
    parallel: RolloutParallelConfig = RolloutParallelConfig()
    lora: Literal["merged", "adapter"] = "merged"
    """Transfer of an actor with an adapter to the engine. `merged`: add the adapter to the weights that are sent.
    `adapter`: send the base once, then in every step only the adapter, into vLLM's own LoRA layers: far fewer bytes,
    and slower sampling. For Llama, Mistral, Qwen2 and Qwen3."""
    num_samples_per_prompt: PositiveInt = 1
    """Responses drawn for each prompt of a step."""
    max_response_tokens: PositiveInt = 1024
    """Longest response. A longer one is cut, and counted."""
    slices: PositiveInt = 1
    """Parts in which a response is drawn, in as many steps, each with the newest weights: no step waits for the longest
    response. 1: each step draws its own samples whole. Only for `rl`, like `steps_ahead` (docs/slices.md)."""
    steps_ahead: Literal[0, 1] = 0
    """1: samples are whole one step before they are trained on, as on engines that draw while the trainer trains. On
    the trainer's own ranks that saves no time; it gives the numbers of a recipe."""
    temperature: Positive = 1.0
    """Divisor of the logits in sampling and in every log-prob, in engine and trainer."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Draw from the smallest set of likeliest tokens that together have this probability. Only for `generate` and
    `eval`, like `top_k` and `min_p`."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many likeliest tokens; 0: from all."""
    min_p: Fraction = 0.0
    """Draw from tokens with at least this share of the largest probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response, with the token that completes the first of them. That token is kept as it was drawn,
    including any text after the stop text."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Further tokens that end a response, besides the tokenizer's and those of generation_config.json."""
    verify_weights_every: Annotated[int, Field(ge=0)] = 10
    """Steps between checks, by digests, that the engine holds the actor's weights. The check also runs at the start and
    after the first step; 0: only then."""
    reshard_bucket_mib: PositiveInt = 256
    """Memory of a rank for weights that it gathers to send, and the same again for weights that it receives; less if
    less is free."""
    poison_weights: bool = False
    """Debug: fill the engine's weights with NaN before each update, and name the tensors that the update did not
    overwrite."""
    max_engine_rebuilds: Annotated[int, Field(ge=0)] = 2
    """Number of times that the engine may be rebuilt after a failure in one rollout. It gets the actor's weights again,
    they are verified, and the missing responses are drawn. One more failure ends the run."""
    balance: Balance = "on_demand"
    """Distribution of samples to several engines, which all wait for the slowest. A prompt's samples stay together.
    `on_demand`: each engine starts with a part, and takes more when its batch has room. `length`: everything at the
    start, with equal expected work: prompts and responses as long as they were last time, or on average in the last
    step. `fixed`: equal numbers. The choice does not change any sample."""
    logprob_gap: LogprobGapConfig = LogprobGapConfig()
    """Limits of the difference between rollout and trainer that end the run."""
    gap_probe_samples: PositiveInt = 4
    """Responses of each slice in which trainer and engine are compared before the step's update, at equal weights;
    only with slices or steps ahead, where older weights drew most tokens. Otherwise all tokens are compared."""
    vllm: VllmConfig = VllmConfig()
    """Settings of the engine `vllm`."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, data: Any) -> Any:
        if isinstance(data, dict) and "max_logprob_gap" in data:
            raise ValueError(
                f"max_logprob_gap = {data['max_logprob_gap']} is no longer read: a run is not ended by the largest of "
                "millions of tokens. Write logprob_gap: {mean: ..., p999: ...} (limits in nats; left out, they follow "
                "from the actor's dtype); the largest gap is the metric rollout_logprob_gap_max"
            )
        return refuse_moved_keys(data)

    @model_validator(mode="after")
    def _check_engine_keys(self) -> RolloutConfig:
        dtype = None if self.dtype == "auto" else self.dtype
        given = [("vllm.args", self.vllm.args), ("parallel.tp", self.parallel.tp), ("dtype", dtype)]
        given += [("vllm.sleep_level", self.vllm.sleep_level not in ("auto", 0))]
        why = _NOTHING_OF_ITS_OWN.get(self.engine)
        if why and (unread := [key for key, value in given if value]):
            raise ValueError(f"{' and '.join(unread)} would have no effect: engine = {self.engine!r} {why}")
        return self

    @property
    def filters(self) -> list[str]:
        """Settings that restrict which tokens are drawn, such as `rollout.top_k = 5`."""
        set_filters = {"top_p": self.top_p != 1.0, "top_k": self.top_k != 0, "min_p": self.min_p != 0.0}
        return [f"rollout.{name} = {getattr(self, name)}" for name, is_set in set_filters.items() if is_set]

    @property
    def is_stale(self) -> bool:
        """Whether older weights than those of its step draw a part of a sample."""
        return self.slices > 1 or self.steps_ahead > 0

    def require_drawable(self, correction: str, max_refills: int) -> None:
        """Raises: ValueError for slices that cannot be drawn, or trained on without bias.

        correction: `algo.rollout_correction.kind`. max_refills: `algo.dynamic_sampling.max_refills`
        """
        if self.slices > self.max_response_tokens:
            raise ValueError(
                f"rollout.slices = {self.slices} is more than the longest response, rollout.max_response_tokens = "
                f"{self.max_response_tokens}; give at most that, usually 2 to 8"
            )
        if not self.is_stale:
            return
        given = f"rollout.slices = {self.slices} and rollout.steps_ahead = {self.steps_ahead}"
        if correction == "none":
            raise ValueError(
                f"algo.rollout_correction.kind = none with {given}: older weights draw a part of each sample, and "
                "without the correction the gradient would be that of another policy; give auto, truncate or mask"
            )
        if max_refills:
            raise ValueError(
                f"algo.dynamic_sampling.max_refills = {max_refills} with {given}: a refill would need the weights of "
                "earlier steps, which are gone; set it to 0 and algo.dynamic_sampling.surplus to the number of prompts "
                "that each step draws beside its own, or draw responses whole"
            )

    def changed_of_slices(self) -> list[str]:
        """Keys of slices that differ from the default, such as `rollout.slices = 2`."""
        names = self.changed(*(key.partition(".")[2] for key in sorted(OF_SLICES)))
        return [f"rollout.{name} = {getattr(self, name)}" for name in names]

    def require_whole(self) -> None:
        """Raises: ValueError for slices, in a command that draws responses with one version of the weights."""
        if changed := self.changed_of_slices():
            raise ValueError(f"{changed[0]} is for rl, whose weights change while a response is drawn; leave it out")

    def require_greedy(self) -> None:
        """Raises: ValueError for settings that make no sense if the likeliest token is always taken."""
        if self.filters:
            raise ValueError(
                f"{' and '.join(self.filters)} has no effect with greedy = true, which takes the likeliest token; set "
                "greedy to false, or leave it out"
            )
        if (samples := self.num_samples_per_prompt) > 1:
            raise ValueError(
                f"rollout.num_samples_per_prompt = {samples} with greedy = true would draw {samples} equal responses "
                "to each prompt; set greedy to false, or the number to 1"
            )

    def tp(self, actor: RoleConfig) -> int:
        """Tensor-parallel size of one engine."""
        return self.parallel.tp or actor.parallel.tp
