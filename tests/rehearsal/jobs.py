"""Small jobs for `megarlhf rehearse`: models that are a config.json, and configurations in YAML."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megarlhf.commands.rehearse import CONFIGS, main
from megarlhf.config import load_config
from megarlhf.rehearsal.cost_model.hardware import load_hardware
from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.rehearsal.fakes.inputs import stand_in
from megarlhf.rehearsal.fakes.lengths import Uniform
from megarlhf.rehearsal.job import Job, RankRecord
from megarlhf.rehearsal.processes import run_ranks
from megarlhf.rehearsal.request import Request

H100 = Path("configs/hardware/h100.yaml")
DENSE: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
TIED = {**DENSE, "tie_word_embeddings": True}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "moe_intermediate_size": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MODELS = {"dense": DENSE, "tied": TIED, "experts": EXPERTS}
TRAINED = {"sft": "actor", "rm": "reward_model", "dpo": "actor", "rl": "actor"}
"""The role whose layout is given."""


def write_model(folder: Path, config: dict[str, Any] = DENSE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def job_tree(command: str, folder: Path, model: str = "dense", **parallel: Any) -> dict[str, Any]:
    """A configuration whose trained role has this layout; a reward model has one of its own, a reference the actor's.
    Data and tokenizer are not there."""
    path = str(write_model(folder / model, MODELS[model]))
    role = {"model": {"path": path, "dtype": "bf16"}, "parallel": parallel}
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "data": {"train": str(folder / "none.jsonl"), "max_prompt_tokens": 32},
        "train": {"num_steps": 4, "mini_batch_samples": 8, "max_tokens_per_micro_batch": 192},
    }
    if command == "rl":
        tree["train"]["prompts_per_step"] = 4
        tree |= {
            "actor": role,
            "critic": role,
            "reward_model": {**role, "parallel": {"tp": 4}},
            "rewards": [{"kind": "model"}],
            "rollout": {"num_samples_per_prompt": 2, "max_response_tokens": 64},
            "algo": {"advantage": "gae", "kl": {"coef": 0.05}},
        }
        return tree
    tree["data"]["max_response_tokens"] = 64
    return tree | {TRAINED[command]: role} | ({"reference": role} if command == "dpo" else {})


def write_job(command: str, folder: Path, tree: dict[str, Any]) -> Path:
    file = folder / f"{command}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@dataclass
class Rehearsed:
    """What the command has done."""

    status: int
    out: Path

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "rehearsal.json").read_text())
        return found


def run_command(command: str, file: Path, out: Path, *options: str) -> Rehearsed:
    """`megarlhf rehearse`, in this process."""
    return Rehearsed(main([command, "-c", str(file), "-o", str(out), *options]), out)


def request_of(command: str, tree: dict[str, Any], folder: Path, **options: Any) -> Request:
    """What the command would make of it, for a device of an H100."""
    hardware = load_hardware(H100)
    given: dict[str, Any] = {
        "world_size": 4, "device_bytes": int(hardware.memory.value), "response_lengths": Uniform(8, 64), "workers": 2,
    }  # fmt: skip
    cfg = load_config(CONFIGS[command], write_job(command, folder, tree))
    return Request(command=command, cfg=cfg, hardware=hardware, **(given | options))


def job_of(request: Request, cfg: Any) -> Job:
    """Rank 0 of what was asked for, with the configuration in which inputs stand in."""
    same = ("command", "world_size", "ranks_per_node", "layers", "response_lengths", "device_bytes", "routing")
    asked: dict[str, Any] = {name: getattr(request, name) for name in same}
    return Job(cfg=cfg, rank=0, kind=request.hardware.kind, num_steps=request.steps, **asked)


def records_of(request: Request, folder: Path, *ranks: int, **changes: Any) -> list[RankRecord]:
    """What these ranks have seen, each in a process of its own; `changes` of what they are told."""
    lengths = {"prompt_lengths": request.prompt_lengths, "response_lengths": request.response_lengths}
    stood = stand_in(request.cfg, folder, steps=request.steps, **lengths)
    assert request.response_lengths is not None
    job = job_of(request, stood.cfg)
    jobs = [replace(job, rank=rank, **changes) for rank in ranks]
    return run_ranks(jobs, Pricing(request.hardware, request.ranks_per_node), workers=request.workers)
