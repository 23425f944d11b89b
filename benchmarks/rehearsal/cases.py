"""Small jobs over which a rehearsal is compared with real runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarlhf.config import DPOConfig, RLConfig, RMConfig, SFTConfig
from megarlhf.rehearsal.fake_device.routing import Routing
from megarlhf.rehearsal.fakes.inputs import stand_in
from megarlhf.rehearsal.fakes.lengths import Lengths, Uniform
from megarlhf.rehearsal.job import Job

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "moe_intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
BALANCED: dict[str, Any] = {**EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.01}
TIED: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
WINDOW: dict[str, Any] = {
    **DENSE,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 64,
}
LEARNED: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 512,
    "n_embd": 256,
    "n_inner": 1024,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 2048,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "tie_word_embeddings": True,
}
MODELS = {
    "dense": DENSE,
    "experts": EXPERTS,
    "balanced": BALANCED,
    "tied": TIED,
    "window": WINDOW,
    "learned": LEARNED,
}
"""A Llama; a mixture of experts, and one with its load-balancing loss; tied embeddings, a sliding window, learned
positions."""
CONFIGS = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "rl": RLConfig}
LONGEST = 192
CACHE = 1 << 30
"""Bytes of an engine's cache, of which nothing is ever written."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job in words."""

    command: str
    parallel: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    dtype: str = "fp32"
    packed: bool = False
    model: str = "dense"
    advantage: str = "gae"
    """Of `rl`."""
    skew: float = 1.0
    """Of experts."""
    engine_tp: int = 0
    """Of an engine with weights; 0: there is none, and nothing is moved into it."""
    samples: int = 16
    """Of a mini-batch."""
    layers: int = 4
    recompute: str = "none"
    """`layers`: the first of each stage."""
    offload: dict[str, Any] = field(default_factory=dict)
    distributed: bool = True
    """Whether the optimizer is."""
    frozen: dict[str, Any] = field(default_factory=dict)
    """`parallel` of reference and reward model, where it is not that of the others."""
    shares: bool = True
    """Prompts are, where rows are packed; in `rm`, `dpo` and `rl`, which has four responses to each."""
    lora: int = 0
    """Rank of the actor's adapter; 0: the actor has none."""

    slices: int = 1
    """Parts in which responses are drawn, over as many steps; of `rl`."""
    gathers_run_on: bool = False
    """Into the next phase, in which gloo keeps copies until a thread of its own is done, sooner or later. A rehearsal
    counts them until they are waited for: there it says more than what is measured. NCCL makes no copies."""

    @property
    def name(self) -> str:
        command = {"gae": "ppo", "group_relative": "grpo"}[self.advantage] if self.command == "rl" else self.command
        cuts = {key: self.parallel.get(key, 1) for key in ("tp", "cp", "pp")}
        dp = self.world_size // math.prod(cuts.values())
        axes = [*cuts.items(), ("dp", dp), *((key, self.parallel.get(key, 1)) for key in ("ep", "vpp"))]
        layout = " ".join(f"{axis.upper()}{size}" for axis, size in axes if size > 1) or "1 rank"
        layout += "" if self.layers == 4 else f" {self.layers} layers"
        layout += " uneven" if "layers_per_stage" in self.parallel else ""
        layout += " SP" if self.parallel.get("sequence_parallel") else ""
        model = self.model if self.skew == 1.0 else f"{self.model} x{self.skew:g}"
        layout += f", engine TP{self.engine_tp}" if self.engine_tp else ""
        layout += "" if self.recompute == "none" else f", recompute {self.recompute}"
        layout += f", offload {self.offload['optimizer']}" if self.offload else ""
        layout += "" if self.distributed else ", plain optimizer"
        layout += ", gathers run on" if self.gathers_run_on else ""
        layout += f", LoRA {self.lora}" if self.lora else ""
        layout += f", {self.slices} slices" if self.slices > 1 else ""
        layout += "" if self.shares else ", prompts apart"
        layout += f", read-only roles on ranks {self.frozen['ranks']}" if self.frozen else ""
        return f"{command} {model} {self.dtype} {'packed' if self.packed else 'padded'} {layout}"

    @property
    def num_steps(self) -> int:
        """Steps until one has been trained on samples that only later weights than the first ones drew."""
        return 1 + self.slices


def job_of(
    case: Case,
    directory: Path,
    num_steps: int | None = None,
    *,
    resume_point: bool = False,
    prompt_lengths: Lengths = Uniform(8, 64),  # noqa: B008 -- frozen
    response_lengths: Lengths = Uniform(24, LONGEST - 64),  # noqa: B008 -- frozen
) -> Job:
    """With everything that it reads, in `directory`. With `resume_point` it writes one, before its last step.

    num_steps: default: those of the case
    """
    num_steps = num_steps or case.num_steps
    model = directory / "model"
    model.mkdir(parents=True)
    config = {**MODELS[case.model], "bos_token_id": 1, "eos_token_id": 2}
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = case.layers
    (model / "config.json").write_text(json.dumps(config))
    optim = {"lr": 1e-3, "overlap_param_gather": case.gathers_run_on}
    optim |= {} if case.distributed else {"distributed": False}
    role = {"model": {"path": str(model), "dtype": case.dtype}, "parallel": case.parallel, "optim": optim}
    role |= {"recompute": case.recompute, "offload": case.offload}
    role |= {"recompute_layers": 1} if case.recompute == "layers" else {}
    adapted = role | ({"lora": {"rank": case.lora}} if case.lora else {})
    frozen = role | ({"parallel": case.frozen} if case.frozen else {})
    micro: dict[str, Any] = {"max_tokens_per_micro_batch": 4 * LONGEST} if case.packed else {"micro_batch_samples": 2}
    micro |= {} if case.shares else {"share_prompts": False}
    data = {"train": str(directory / "none.jsonl"), "max_prompt_tokens": 64}
    tree: dict[str, Any] = {"run": {"dir": str(directory / "run")}, "data": data}
    if case.command == "rl":
        tree |= {"actor": adapted, "reference": frozen, "rollout": {"num_samples_per_prompt": 4}}
        tree["train"] = {
            "num_steps": num_steps,
            "prompts_per_step": case.samples // 4,
            "mini_batch_samples": case.samples,
            **micro,
        }
        tree["rollout"] |= {"max_response_tokens": LONGEST - 64, "engine": "vllm", "slices": case.slices}
        tree["rollout"] |= {"logprob_gap": {"mean": 1e9, "p999": 1e9}}  # log-probs are made up
        tree["rollout"] |= (
            {"parallel": {"tp": case.engine_tp}, "vllm": {"cpu_cache_gib": CACHE >> 30}} if case.engine_tp else {}
        )
        tree["rewards"] = [{"kind": "rule", "rule": "exact_match"}]
        tree["algo"] = {"advantage": case.advantage, "kl": {"coef": 0.05}}
        if case.advantage == "gae":
            tree |= {"critic": role, "reward_model": frozen, "rewards": [{"kind": "model"}]}
    else:
        data["max_response_tokens"] = LONGEST - 64
        tree["reward_model" if case.command == "rm" else "actor"] = adapted
        tree |= {"reference": frozen} if case.command == "dpo" else {}
        tree["train"] = {"num_steps": num_steps, "mini_batch_samples": case.samples, **micro}
    cfg: Any = CONFIGS[case.command].model_validate(tree)
    stood = stand_in(
        cfg,
        directory / "standing_in",
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        steps=num_steps,
        resume_point=resume_point,
    )
    return Job(
        command=case.command,
        cfg=stood.cfg,
        rank=0,
        world_size=case.world_size,
        ranks_per_node=case.world_size,
        kind="cpu",
        num_steps=num_steps,
        response_lengths=response_lengths,
        rollout_tokens_per_second=1000.0,
        bare_engine=not case.engine_tp,
        routing=Routing(skew=case.skew),
    )
