"""Configurations of each command with a tiny Llama, for tests that decide about a run before it starts."""

import json

from megarlhf.config import RLConfig, SFTConfig

MODEL = {
    "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 96, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 160, "vocab_size": 100, "max_position_embeddings": 64,
    "hidden_act": "silu",
}  # fmt: skip
ROW = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3", "answer": "2", "text": "1+1=2"}
ROWS = 64 * (json.dumps(ROW) + "\n")
TRAIN = {"num_steps": 10, "mini_batch_samples": 8, "micro_batch_samples": 2}
RL_TRAIN = {**TRAIN, "prompts_per_step": 6, "epochs_per_step": 3}


def role(paths, model=None, **parallel):
    """There are no weights to read, but a configuration."""
    return {"model": {"path": model or paths["model"], "random_init": True}, "parallel": parallel}


def sft(paths, *, model=None, parallel=None, **data):
    data = {"train": paths["train"], **data}
    actor = role(paths, model, **(parallel or {}))
    return SFTConfig.model_validate({"run": {"dir": "r"}, "actor": actor, "data": data, "train": TRAIN})


def rl(paths, *, train=None, rollout=None, actor=None, critic=None, data=None, **others):
    tree = {
        "run": {"dir": "r"}, "actor": actor or role(paths), "critic": critic or role(paths),
        "rewards": [{"kind": "rule", "rule": "exact_match"}],
        "data": {"train": paths["train"], "max_prompt_tokens": 40, **(data or {})},
        "train": {**RL_TRAIN, **(train or {})},
        "rollout": {"num_samples_per_prompt": 4, "max_response_tokens": 24, "engine": "megatron", **(rollout or {})},
        **others,
    }  # fmt: skip
    return RLConfig.model_validate(tree)
