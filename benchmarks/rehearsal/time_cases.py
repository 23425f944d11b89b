"""Jobs over which the estimate of time is compared with real runs: model sizes, dtypes, layouts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megarlhf.config import RLConfig, SFTConfig
from megarlhf.rehearsal.fakes.inputs import stand_in
from megarlhf.rehearsal.fakes.lengths import Constant, Lengths, Uniform
from megarlhf.rehearsal.program import Job

LONGEST = 256


@dataclass(frozen=True, kw_only=True)
class TimeCase:
    """A job in words."""

    command: Literal["sft", "ppo"]
    hidden: int
    layers: int = 4
    dtype: Literal["fp32", "bf16"] = "fp32"
    parallel: dict[str, int] = field(default_factory=dict)
    world_size: int = 1
    samples: int = 16
    """Of a step."""
    packed: bool = True

    @property
    def layout(self) -> str:
        cuts = {"TP": self.parallel.get("tp", 1), "PP": self.parallel.get("pp", 1)}
        cuts["DP"] = self.world_size // (cuts["TP"] * cuts["PP"])
        return " ".join(f"{name}{size}" for name, size in cuts.items() if size > 1) or "1 rank"

    @property
    def size(self) -> str:
        """Everything but the layout: cases of one size do the same work."""
        rows = "" if self.packed else " padded"
        return f"{self.command} hidden {self.hidden} x {self.layers} {self.dtype}{rows}"

    @property
    def name(self) -> str:
        return f"{self.size} {self.layout}"


def config_of(hidden: int, layers: int) -> dict[str, Any]:
    """config.json of a dense model."""
    heads = max(2, hidden // 64)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 16 * 16,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(2, heads // 2),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def job_of(case: TimeCase, directory: Path, num_steps: int) -> Job:
    """With everything that it reads, in `directory`. All steps are of the same samples, so that they take the same
    time."""
    model = directory / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(config_of(case.hidden, case.layers)))
    role = {
        "model": {"path": str(model), "dtype": case.dtype, "random_init": True},
        "parallel": case.parallel,
        "optim": {"lr": 1e-5},
    }
    micro = {"max_tokens_per_micro_batch": 2 * LONGEST} if case.packed else {"micro_batch_samples": 4}
    data = {"train": str(directory / "none.jsonl"), "max_prompt_tokens": 64}
    tree: dict[str, Any] = {"run": {"dir": str(directory / "run")}, "data": data, "actor": role}
    tree["train"] = {"num_steps": num_steps, **micro}
    if case.command == "ppo":
        tree["train"] |= {"prompts_per_step": case.samples // 4, "mini_batch_samples": case.samples}
        tree |= {"critic": {**role, "model": {**role["model"], "fresh_head": True}}, "reference": role}
        tree["rollout"] = {"num_samples_per_prompt": 4, "max_response_tokens": LONGEST - 64, "engine": "vllm"}
        tree["rollout"]["logprob_gap"] = {"mean": 1e3, "p999": 1e3}  # responses are not drawn from the model
        tree |= {"rewards": [{"kind": "rule", "rule": "exact_match"}]}
        tree["algo"] = {"advantage": "gae", "kl": {"coef": 0.05}}
    else:
        data["max_response_tokens"] = LONGEST - 64
        tree["train"] |= {"mini_batch_samples": case.samples}
    cfg: Any = (SFTConfig if case.command == "sft" else RLConfig).model_validate(tree)
    lengths: Lengths = Uniform(32, LONGEST - 96)
    if case.command == "ppo":
        lengths = Constant(LONGEST // 2)  # drawn anew in each step
    stood = stand_in(cfg, directory / "standing_in", prompt_lengths=Uniform(8, 48), response_lengths=lengths, steps=1)
    return Job(
        command="sft" if case.command == "sft" else "rl",
        cfg=stood.cfg,
        rank=0,
        world_size=case.world_size,
        ranks_per_node=case.world_size,
        kind="cpu",
        num_steps=num_steps,
        response_lengths=lengths,
        bare_engine=True,
    )
