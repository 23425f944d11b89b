"""What is run: tiny models, their jobs, and the layouts in which each is started.

Nothing here depends on the machine: the same jobs gave `expected.json` on a CPU. Weights are drawn from the seed and
are the same numbers at every layout, responses are given, so that no figure depends on what an engine has sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tools.demo.make_data import base_files

Dtype = Literal["fp32", "bf16"]
Layers = Literal["auto", "local"]
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")

LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
    "tp2_sequence_parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}),
    "tp2pp2dp2": (8, {"tp": 2, "pp": 2}),
}
"""(ranks, parallel) by name; data parallelism follows from the two."""
ENGINES: Mapping[str, tuple[str, int]] = {
    "tp1_to_tp1": ("tp1", 1),
    "pp2_to_tp2": ("pp2", 2),
    "tp2pp2_to_tp2": ("tp2pp2", 2),
}
"""(the trainer's layout, vLLM's tp)."""
PROMPT_LAYOUTS, PROMPT_MODELS = ("tp1", "tp2"), ("dense", "grouped")
MEMORY_LAYOUTS = ("tp1", "tp2", "tp2pp2")
RESUME_LAYOUTS = ("tp1", "tp2pp2dp2")

_COMMON: Mapping[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    # Large enough that log-probs are far from uniform.
    "initializer_range": 0.04,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense": {**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4},
    "grouped": {
        **_COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "experts": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 192,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    # Other weights than those of `dense`, so that the KL to it is not zero.
    "reference": {
        **_COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 4,
        "initializer_range": 0.05,
    },
    # So large that what libraries keep for themselves is little beside it: 0.3 G parameters, 7 GB when trained in bf16.
    "memory": {
        **_COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "memory_experts": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "moe_intermediate_size": 768,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
}
PACKED: Mapping[str, bool] = {"dense": True, "grouped": False, "experts": True}
"""Packed rows, or padded ones."""
STEPS, SAMPLES = 3, 8
"""Steps of fine-tuning; samples of an optimizer step."""
PROGRAM = ("-m", "tools.gpu_check.rank")
"""Behind python: what a rank runs."""
REWARD = "megarlhf.rehearsal.fakes.inputs:length_of_response"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a command."""

    name: str
    """Of its stored results, where it has some: the same at every layout."""
    command: Literal["sft", "rl"]
    config: Mapping[str, Any]
    given: int = 0
    """Longest of the responses that stand in for an engine's; 0: the configured engine draws them."""
    constant: int = 0
    """The same with this length each, as a rehearsal draws them."""
    measured: bool = False
    """Whether memory is measured by phase."""
    layers: Layers = "auto"
    """`local`: not TransformerEngine's, where that is installed."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Jobs that the same ranks do, one after the other."""

    check: str
    case: str
    ranks: int
    nodes: int = 1
    """Over which the ranks are spread evenly."""
    jobs: list[Job] = field(default_factory=list)
    seconds: float = 600.0
    """After which it is ended, and counts as failed."""

    @property
    def name(self) -> str:
        return f"{self.check} {self.case}".replace(" ", "_")

    def dump(self, directory: Path) -> Path:
        """Write it for the ranks."""
        path = directory / self.name / "launch.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Launch:
        tree = json.loads(path.read_text())
        return cls(**{**tree, "jobs": [Job(**job) for job in tree["jobs"]]})


# --- files ----------------------------------------------------------------------------------------


def write_inputs(directory: Path) -> Path:
    """Models without weights and data, under `directory`; returns it."""
    tokenizer = base_files()["tokenizer.model"]
    for name, config in MODELS.items():
        folder = directory / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (folder / "tokenizer.model").write_bytes(tokenizer)
    for name, rows in {"sums": _sums(64), "shots": _shots(64), "long": _long(16)}.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def _sums(count: int) -> list[dict[str, str]]:
    """Prompts and responses of different lengths."""
    pairs = [(3 + 7 * n % 90, 1 + 13 * n % 95) for n in range(count)]
    return [{"prompt": f"{a}+{b}=", "response": str(a * b * (a + b))} for a, b in pairs]


def _shots(count: int) -> list[dict[str, str]]:
    """Prompts of 50 to 76 tokens, several times as long as their responses."""
    sums = [f"{a}+{b}={a + b}" for a, b in ((3 + 7 * n % 90, 1 + 13 * n % 95) for n in range(count + 9))]
    return [{"prompt": "".join(sums[n : n + 8 + n % 2]) + "=", "response": str(n)} for n in range(count)]


def _long(count: int) -> list[dict[str, str]]:
    """A token a character: prompts of 500, responses of 400 to 1500."""
    digits = "".join(str(n % 10) for n in range(1500))
    return [{"prompt": digits[:500], "response": digits[: 400 + 157 * n % 1100]} for n in range(count)]


# --- configurations -------------------------------------------------------------------------------


def _role(inputs: Path, model: str, dtype: Dtype, parallel: Mapping[str, Any], lr: float = 1e-4) -> dict[str, Any]:
    # Megatron-Core trains experts under tensor parallelism with sequence parallelism only.
    experts = "num_experts" in MODELS[model]
    needed = {"sequence_parallel": True} if experts and parallel.get("tp", 1) > 1 else {}
    return {
        "model": {"path": str(inputs / "models" / model), "random_init": True, "dtype": dtype},
        "parallel": {**parallel, **needed},
        "optim": {"lr": lr, "weight_decay": 0.1},
    }


def _common(runs: Path, name: str) -> dict[str, Any]:
    """A run that saves nothing but its last export."""
    run_dir = runs / name.replace(" ", "_")
    return {"run": {"dir": str(run_dir), "on_existing": "overwrite"}, "checkpoint": {"every_minutes": 0}}


def _batch(packed: bool, tokens: int = 96) -> dict[str, int]:
    return {"max_tokens_per_micro_batch": tokens} if packed else {"micro_batch_samples": 2}


def sft_job(inputs: Path, runs: Path, model: str, dtype: Dtype, parallel: Mapping[str, Any]) -> Job:
    """Three steps of fine-tuning."""
    name = f"sft {model} {dtype}"
    config = {
        **_common(runs, name),
        "actor": _role(inputs, model, dtype, parallel, lr=3e-4),
        "data": {"train": str(inputs / "sums.jsonl"), "max_prompt_tokens": 32, "max_response_tokens": 32},
        "train": {"num_steps": STEPS, "mini_batch_samples": SAMPLES, **_batch(PACKED[model])},
    }
    return Job(name=name, command="sft", config=config)


def resume_jobs(inputs: Path, runs: Path, parallel: Mapping[str, Any]) -> list[Job]:
    """Fine-tuning of six steps; four steps of the same in another directory; and the same command, which goes on there
    with two more. Then a step of PPO with a resume point after each update: those inside a step hold its samples."""
    base = sft_job(inputs, runs, "grouped", "fp32", parallel)
    jobs = []
    for part, where, steps in (("whole", "whole", 6), ("first", "parts", 4), ("rest", "parts", 6)):
        changes = {
            "run": {"dir": str(runs / where), "on_existing": "resume"},
            "checkpoint": {"every": 2, "every_minutes": 0},
            "train": {**base.config["train"], "num_steps": steps},
        }
        jobs.append(Job(name=f"resume {part}", command="sft", config={**base.config, **changes}))
    ppo = ppo_job(inputs, runs, "grouped", "fp32", parallel)
    often = {"checkpoint": {"every_updates": 1, "every_minutes": 0, "keep": 8, "background": False}}
    return [*jobs, replace(ppo, name="resume inside", config={**ppo.config, **often})]


def ppo_job(inputs: Path, runs: Path, model: str, dtype: Dtype, parallel: Mapping[str, Any]) -> Job:
    """One step of PPO on given responses, with two updates of actor and critic."""
    name = f"ppo {model} {dtype}"
    config = {
        **_common(runs, name),
        "actor": _role(inputs, model, dtype, parallel),
        "critic": _role(inputs, model, dtype, parallel),
        "reference": _role(inputs, "reference", dtype, parallel),
        "rewards": [{"kind": "rule", "rule": REWARD, "name": "length", "workers": 0, "weight": 0.3}],
        "data": {"train": str(inputs / "sums.jsonl"), "max_prompt_tokens": 32},
        "train": {
            "num_steps": 1,
            "prompts_per_step": 16,
            "mini_batch_samples": 2 * SAMPLES,
            **_batch(PACKED[model]),
        },
        "rollout": {
            "engine": "megatron",
            "num_samples_per_prompt": 2,
            "max_response_tokens": 24,
            # Given responses are nobody's samples: what they stand for is no gap.
            "logprob_gap": {"mean": 1e3, "p999": 1e3},
        },
        "algo": {"entropy_coef": 0.01, "kl": {"coef": 0.05}},
        "samples": {"count": 0},
    }
    return Job(name=name, command="rl", config=config, given=24)


def grpo_job(inputs: Path, runs: Path, model: str, dtype: Dtype, parallel: Mapping[str, Any], *, shared: bool) -> Job:
    """One step of GRPO on given responses, four to a prompt, with two updates; `shared`: prompts are computed once."""
    name = f"prompts {model} {'shared' if shared else 'unshared'} {dtype}"
    config = {
        **_common(runs, name),
        "actor": _role(inputs, model, dtype, parallel),
        "reference": _role(inputs, "reference", dtype, parallel),
        "rewards": [{"kind": "rule", "rule": REWARD, "name": "length", "workers": 0}],
        "data": {"train": str(inputs / "shots.jsonl"), "max_prompt_tokens": 96},
        "train": {
            "num_steps": 1,
            "prompts_per_step": 8,
            "mini_batch_samples": 16,
            "max_tokens_per_micro_batch": 320,
            "shuffle": "groups",
            "share_prompts": shared,
        },
        "rollout": {
            "engine": "megatron",
            "num_samples_per_prompt": 4,
            "max_response_tokens": 24,
            "logprob_gap": {"mean": 1e3, "p999": 1e3},
        },
        "algo": {
            "advantage": "grpo",
            "entropy_coef": 0.01,
            "kl": {"coef": 0.05, "placement": "loss", "estimator": "k3"},
        },
        "samples": {"count": 0},
    }
    return Job(name=name, command="rl", config=config, given=24)


def engine_job(inputs: Path, runs: Path, parallel: Mapping[str, Any], tp: int, dtype: Dtype = "bf16") -> Job:
    """A step of GRPO with the real vLLM: its gap, and the certificates of two transfers of weights."""
    name, actor = f"engine {dtype}", _role(inputs, "grouped", dtype, parallel)
    config = {
        **_common(runs, name),
        "actor": actor,
        "rewards": [{"kind": "rule", "rule": REWARD, "name": "length", "workers": 0}],
        "data": {"train": str(inputs / "sums.jsonl"), "max_prompt_tokens": 32},
        "train": {"num_steps": 1, "prompts_per_step": 16, "mini_batch_samples": 64, "max_tokens_per_micro_batch": 512},
        "rollout": {"engine": "vllm", "parallel": {"tp": tp}, "num_samples_per_prompt": 4, "max_response_tokens": 32},
        "algo": {"advantage": "grpo"},
        "samples": {"count": 0},
    }
    return Job(name=name, command="rl", config=config)


@dataclass(frozen=True, kw_only=True)
class MemorySize:
    """Of the jobs whose memory is measured."""

    model: str = "memory"
    experts: str = "memory_experts"
    data: str = "long"
    prompt: int = 512
    response: int = 1504
    micro_batch: int = 4096
    """Tokens."""


def memory_jobs(
    inputs: Path,
    runs: Path,
    parallel: Mapping[str, Any],
    size: MemorySize = MemorySize(),
) -> Iterator[Job]:
    """Two steps each of fine-tuning, in several ways, and of PPO, measured and rehearsed."""
    role = _role(inputs, size.model, "bf16", parallel)
    ways: Mapping[str, Mapping[str, Any]] = {
        "sft": role,
        "sft_streamed": {**role, "offload": {"parameters": True, "optimizer": "stream"}},
        "sft_recomputed": {**role, "recompute": "full"},
        "sft_core_attention": {**role, "recompute": "core_attention"},
        "sft_experts": _role(inputs, size.experts, "bf16", parallel),
    }
    data = {"train": str(inputs / f"{size.data}.jsonl"), "max_prompt_tokens": size.prompt}
    batch = {"num_steps": 2, "mini_batch_samples": SAMPLES, "max_tokens_per_micro_batch": size.micro_batch}
    for name, actor in ways.items():
        sft = {
            **_common(runs, name),
            "actor": actor,
            "data": {**data, "max_response_tokens": size.response},
            "train": batch,
        }
        yield Job(name=name, command="sft", config=sft, measured=True)
    ppo = {
        **_common(runs, "ppo"),
        **dict.fromkeys(("actor", "critic", "reference"), role),
        "rewards": [{"kind": "rule", "rule": REWARD, "name": "length", "workers": 0}],
        "data": data,
        "train": {**batch, "prompts_per_step": SAMPLES},
        "rollout": {
            "engine": "megatron",
            "max_response_tokens": size.response,
            "logprob_gap": {"mean": 1e3, "p999": 1e3},
        },
        "algo": {"kl": {"coef": 0.05}},
        "samples": {"count": 0},
    }
    yield Job(name="ppo", command="rl", config=ppo, constant=size.response, measured=True)
