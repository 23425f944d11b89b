"""The runs that both versions make: a few steps each, small enough for two cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Config = dict[str, Any]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "": (1, {}),
    "-tp2": (2, {"tp": 2}),
    "-pp2": (2, {"pp": 2}),
    "-tp2pp2": (4, {"tp": 2, "pp": 2}),
}
"""Ends of the runs' names, with ranks and `parallel` of each role."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A command with its configuration, without `run.dir`, in the newest version's keys."""

    name: str
    command: str
    config: Config
    shows: Mapping[str, float] = field(default_factory=dict)
    """Metrics, each with a number that it exceeds in some step: what the run is there for has happened."""
    last_step: int | None = None
    """The step of the last row of metrics; None of a command that has no steps."""
    kill_at: str | None = None
    """Once this folder exists in the run directory, all processes are killed and the command is given again."""
    plain: bool = False
    """Started as a user starts it, by a process that starts the ranks; otherwise they are started at once, as torchrun
    does, which takes a tenth of the time."""
    same_as: str | None = None
    """Another run, whose numbers this one has too."""


def merged(config: Config, changes: Mapping[str, Any]) -> Config:
    """A configuration with other values: mappings are merged, anything else is replaced, None removes a key."""
    result = dict(config)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = merged(result.get(key) or {}, value)
        else:
            result[key] = value
    return result


@dataclass(frozen=True)
class Configurations:
    """The configurations of all runs, for models and data in one directory."""

    inputs: Path

    def role(self, model: str, parallel: Mapping[str, int]) -> Config:
        """A role that is only read."""
        return {"model": {"path": str(self.inputs / model)}, "parallel": dict(parallel)}

    def trained(self, model: str, parallel: Mapping[str, int]) -> Config:
        """A role with an optimizer."""
        optim = {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.01}
        return {**self.role(model, parallel), "optim": optim}

    def data(self, name: str, **more: Any) -> Config:
        """Records to learn from, and others to evaluate on."""
        files = {"train": str(self.inputs / f"{name}.jsonl"), "validation": str(self.inputs / f"{name}_held_out.jsonl")}
        return {**files, "max_prompt_tokens": 32, **more}

    def supervised(self, command: str, ranks: int, parallel: Mapping[str, int]) -> Config:
        """`sft`, `rm` or `dpo`, in packed rows."""
        role = "reward_model" if command == "rm" else "actor"
        return {
            "run": {"nproc": ranks, "seed": 1},
            role: self.trained("model", parallel),
            "data": self.data("answers" if command == "sft" else "pairs", max_response_tokens=16),
            "train": {"num_steps": 3, "mini_batch_samples": 8, "max_tokens_per_micro_batch": 64},
            "checkpoint": {"every_minutes": 0},
        }

    def reinforced(self, ranks: int, parallel: Mapping[str, int], engine: str) -> Config:
        """What PPO and GRPO have in common."""
        rules = [{"kind": "rule", "rule": "equality_rules:letters", "weight": 2.0}]
        return {
            "run": {"nproc": ranks, "seed": 1},
            "actor": self.trained("model", parallel),
            "reference": self.role("model", parallel),
            "rewards": rules,
            "data": self.data("prompts"),
            "train": {
                "num_steps": 2,
                "prompts_per_step": 4,
                "mini_batch_samples": 8,
                "epochs_per_step": 1,
                "max_tokens_per_micro_batch": 128,
            },
            "rollout": {
                "engine": engine,
                "num_samples_per_prompt": 4,
                "max_response_tokens": 8,
                "temperature": 0.9,
            },
            "eval": {"max_samples": 8},
            "checkpoint": {"every_minutes": 0},
        }

    def ppo(self, ranks: int, parallel: Mapping[str, int], engine: str = "megatron") -> Config:
        """With a critic, a reward model beside the rule, and the KL in the reward."""
        changes = {
            "critic": self.trained("scorer", parallel),
            "reward_model": self.role("scorer", parallel),
            "algo": {"entropy_coef": 0.01, "kl": {"coef": 0.1}},
            "train": {"epochs_per_step": 2},
        }
        config = merged(self.reinforced(ranks, parallel, engine), changes)
        return {**config, "rewards": [{"kind": "model", "shift": 0.5, "clip": 5.0}, *config["rewards"]]}

    def grpo(self, ranks: int, parallel: Mapping[str, int], engine: str = "megatron") -> Config:
        """Without a critic, and the KL in the loss."""
        algo = {"advantage": "group_relative", "kl": {"coef": 0.05, "placement": "loss", "estimator": "k3"}}
        return {**self.reinforced(ranks, parallel, engine), "algo": algo}


def all_runs(inputs: Path) -> list[ComparedRun]:
    """Every run, in the order in which they are made."""
    make = Configurations(inputs)
    runs = []
    for end, (ranks, parallel) in LAYOUTS.items():
        for command in ("sft", "rm", "dpo"):
            config = make.supervised(command, ranks, parallel)
            runs.append(ComparedRun(name=command + end, command=command, config=config, last_step=3))
        engine = "vllm" if end in ("", "-tp2") else "megatron"
        for name, config in (("ppo", make.ppo(ranks, parallel, engine)), ("grpo", make.grpo(ranks, parallel, engine))):
            shows = {"rollout_logprob_gap_max": 0.0, "entropy": 0.0}
            runs.append(ComparedRun(name=name + end, command="rl", config=config, last_step=2, shows=shows))
    return runs + supervised_options(make) + reinforced_options(make) + without_training(make) + killed(make)


def supervised_options(make: Configurations) -> list[ComparedRun]:
    """Of `sft`, `rm` and `dpo`."""
    sft = make.supervised("sft", 1, {})
    padded = {"max_tokens_per_micro_batch": None, "micro_batch_samples": 4}
    changes: dict[str, tuple[str, Config, Config]] = {
        "sft-padded": ("sft", sft, {"train": padded}),
        "sft-dp2": ("sft", sft, {"run": {"nproc": 2}}),
        "sft-cp2": ("sft", sft, {"run": {"nproc": 2}, "actor": {"parallel": {"cp": 2}}}),
        "sft-experts": ("sft", make.supervised("sft", 2, {"ep": 2}), {"actor": make.trained("experts", {"ep": 2})}),
        "sft-chat": ("sft", sft, {"actor": make.trained("qwen2", {}), "data": make.data("chats", loss_on="all")}),
        "sft-lora": ("sft", sft, {"actor": {"lora": {"rank": 4, "export": "both"}}}),
        "rm-options": ("rm", make.supervised("rm", 1, {}), {"center_coef": 0.01, "unit_variance": True}),
        "sft-memory": ("sft", sft, {"actor": {"recompute": "full", "offload": {"optimizer": "stream"}}}),
        "dpo-kto": ("dpo", make.supervised("dpo", 1, {}), {"loss": "kto", "train": padded}),
        "dpo-unshared": ("dpo", make.supervised("dpo", 1, {}), {"train": {"share_prompts": False}, "sft_coef": 0.1}),
    }
    changes["sft-chat"][2]["data"]["max_prompt_tokens"] = 128
    changes["sft-chat"][2]["train"] = {"max_tokens_per_micro_batch": 256}
    runs = [
        ComparedRun(name=name, command=command, config=merged(config, changed), last_step=3)
        for name, (command, config, changed) in changes.items()
    ]
    stopped = {
        "train": {"num_steps": 6, "stop": {"patience": 2, "metric": "eval_loss", "mode": "max"}},
        "eval": {"every": 1},
        "checkpoint": {"export_every": 1, "best": {"metric": "eval_loss", "mode": "max"}},
    }
    launched = ComparedRun(
        name="sft-launched", command="sft", config=runs[1].config, last_step=3, plain=True, same_as="sft-dp2"
    )
    return [*runs, launched, ComparedRun(name="sft-stop", command="sft", config=merged(sft, stopped), last_step=2)]


def reinforced_options(make: Configurations) -> list[ComparedRun]:
    """Of `rl`."""
    ppo, grpo = make.ppo(1, {}), make.grpo(1, {})
    padded = {"max_tokens_per_micro_batch": None, "micro_batch_samples": 4}
    rule = [{"kind": "rule", "rule": "equality_rules:has_digit"}]
    moving = {
        "algo": {"kl": {"controller": "adaptive", "target": 0.01, "horizon": 100}},
        "reference_update": {"every": 1, "mixup": 0.6},
        "ema": {"decay": 0.9},
        "ptx": {"data": str(make.inputs / "texts.jsonl"), "coef": 0.5, "mini_batch_samples": 4},
        "train": {"num_steps": 3},
    }
    dynamic = {"rewards": rule, "algo": {"dynamic_sampling": {"max_refills": 2}}}
    options = {
        "algo": {"scale_by_group_std": False, "loss_average": "constant", "whiten_advantages": True, "clip_dual": 3.0},
        "train": {"max_policy_kl": 0.5, "shuffle": "none"},
    }
    options["algo"]["rollout_correction"] = {"kind": "truncate", "level": "sequence"}
    remax = {"algo": {"advantage": "remax", "policy_loss": "cispo", "overlong": {"buffer_tokens": 4}}}
    remax["algo"]["kl"] = {"placement": "reward", "estimator": "k1"}
    evaluated = {
        "eval": {"every": 1, "accuracy": "equality_rules:is_even"},
        "checkpoint": {"export_every": 1, "best": {"metric": "eval_reward_mean"}},
    }
    changes: dict[str, tuple[Config, Config, dict[str, float]]] = {
        "ppo-padded": (ppo, {"train": padded}, {}),
        "ppo-moving": (ppo, moving, {"kl_coef": 0, "reference_moved": 0, "ptx_loss": 0}),
        "grpo-padded": (grpo, {"train": padded}, {}),
        "grpo-shared": (grpo, {}, {"prompts_saved": 0}),
        "grpo-unshared": (grpo, {"train": {"share_prompts": False}}, {}),
        "grpo-dp2": (grpo, {"run": {"nproc": 2}, "train": {"shuffle": "groups"}}, {"prompts_saved": 0}),
        "grpo-lora": (grpo, {"actor": {"lora": {"rank": 4}}, "reference": None}, {}),
        "grpo-dynamic": (grpo, dynamic, {"sampling_rounds": 1, "groups_dropped": 0}),
        "grpo-eval": (grpo, evaluated, {"eval_accuracy": 0, "eval_reward_mean": 0}),
        "grpo-options": (grpo, options, {"rollout_correction_weight_mean": 0}),
        "remax": (grpo, remax, {}),
    }
    return [
        ComparedRun(
            name=name,
            command="rl",
            config=(config := merged(base, changed)),
            last_step=config["train"]["num_steps"],
            shows=shows,
        )
        for name, (base, changed, shows) in changes.items()
    ]


def without_training(make: Configurations) -> list[ComparedRun]:
    """`generate` and `eval`."""
    run = {"nproc": 1, "seed": 1}
    sampled = {"num_samples_per_prompt": 3, "max_response_tokens": 8, "temperature": 0.9}
    rule = {"kind": "rule", "rule": "equality_rules:is_even"}
    actor = {"model": {"path": str(make.inputs / "model")}}
    held_out = {"train": str(make.inputs / "prompts_held_out.jsonl"), "max_prompt_tokens": 32}
    generate = {
        "run": run,
        "actor": actor,
        "data": held_out,
        "rollout": {"engine": "vllm", **sampled},
        "rewards": [rule],
        "greedy": False,
    }
    evaluate = merged(
        generate, {"rollout": {"engine": "megatron"}, "eval": {"pass_at": [1, 2], "accuracy": "equality_rules:is_even"}}
    )
    evaluate |= {"forward": {"max_tokens_per_micro_batch": 128}}
    perplexity = {
        "run": run,
        "actor": actor,
        "data": {"train": str(make.inputs / "answers_held_out.jsonl"), "max_prompt_tokens": 32},
        "forward": {"max_tokens_per_micro_batch": 64},
        "eval": {"tasks": ["perplexity"]},
    }
    pairs = {
        "run": run,
        "reward_model": make.role("scorer", {}),
        "data": {**held_out, "train": str(make.inputs / "pairs_held_out.jsonl")},
        "forward": {"micro_batch_samples": 4},
    }
    return [
        ComparedRun(name="generate", command="generate", config=generate),
        ComparedRun(name="eval", command="eval", config=evaluate),
        ComparedRun(name="eval-perplexity", command="eval", config=perplexity),
        ComparedRun(name="eval-pairs", command="eval", config=pairs),
    ]


def killed(make: Configurations) -> list[ComparedRun]:
    """PPO killed inside its second step, and the same without."""
    often = {
        "train": {"num_steps": 3},
        "rewards": [{"kind": "model", "normalise": "running"}],
        "checkpoint": {"every_updates": 1, "keep": 99},
    }
    whole = ComparedRun(name="ppo-updates", command="rl", config=merged(make.ppo(1, {}), often), last_step=3)
    return [
        whole,
        ComparedRun(
            name="ppo-killed",
            command="rl",
            config=whole.config,
            last_step=3,
            kill_at="resume/step_000001_update_0002",
            same_as=whole.name,
        ),
    ]
