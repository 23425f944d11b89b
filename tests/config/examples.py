"""A valid configuration of each command, as its file says it."""

from megarlhf.config import DPOConfig, GenerateConfig, RLConfig, RMConfig, SFTConfig

SFT = {
    "run": {"dir": "runs/x"},
    "actor": {"model": {"path": "models/base", "random_init": True}, "optim": {"lr": 0.001}},
    "data": {"train": "data/train.jsonl"},
    "train": {"num_steps": 3, "mini_batch_samples": 8, "micro_batch_samples": 2},
    "checkpoint": {"export_keep": 5},
}
RM = {"reward_model" if key == "actor" else key: value for key, value in SFT.items()}
DPO = {**SFT, "data": {"train": "data/pairs.jsonl", "validation": "data/validation.jsonl"}}
RL = {
    "run": {"dir": "runs/x"}, "actor": {"model": {"path": "models/sft"}}, "critic": {"model": {"path": "models/sft"}},
    "reward_model": {"model": {"path": "models/rm"}},
    "rewards": [{"kind": "model", "shift": 0.5}, {"kind": "rule", "rule": "exact_match", "weight": 2}],
    "data": {"train": "data/prompts.jsonl", "validation": "data/validation.jsonl"},
    "train": {"num_steps": 3, "prompts_per_step": 8, "mini_batch_samples": 8, "micro_batch_samples": 2},
}  # fmt: skip
GENERATE = {"run": RL["run"], "actor": RL["actor"], "data": {"train": "data/prompts.jsonl"}}
KINDS = {
    "sft": (SFTConfig, SFT), "rm": (RMConfig, RM), "dpo": (DPOConfig, DPO), "rl": (RLConfig, RL),
    "generate": (GenerateConfig, GENERATE),
}  # fmt: skip
