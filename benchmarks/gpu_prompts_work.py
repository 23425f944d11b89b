"""What `make bench-gpu-prompts` does on the device: attention over shared prompts, and training phases of GRPO.

Legend: T tokens, N query heads and G key-value groups, D head dimension.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_timing import Clock
from benchmarks.packing_workload import Workload
from benchmarks.prompts_work import by_formula
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import RLConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.models.attention.packed import packed_attention
from megarlhf.models.attention.tree import kernel_for, plain_attention
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.packing.partition import forward_cost
from megarlhf.parallel.packing.rows import packed_row
from megarlhf.rollout.engine import gather_rollouts
from megarlhf.rollout.responses import Response
from megarlhf.runtime import Runtime, counts_allocations, synchronize
from megarlhf.trainers.experience.prompts import PromptData, make_experience
from megarlhf.trainers.rl.build import build
from megarlhf.trainers.rl.rollout import complete
from megarlhf.trainers.rl.scoring import score
from megarlhf.trainers.rl.update import StepState, plan_step, train_on
from megarlhf.trainers.run.session import Session
from tools.demo.make_data import base_files
from tools.gpu_check.memory import AllocatorMeter

MIXES = {"1_1": (512, 512), "4_1": (1024, 256), "1_4": (256, 1024)}
"""Tokens of a prompt and of each of its responses."""
PER_PROMPT = 8
SIDES = {"shared": True, "unshared": False}
PHASES = ("score/actor", "train/actor", "optimizer/actor")
"""What a training phase consists of; rewards and advantages, on the host, are not counted."""
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
MODELS: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 8192, "vocab_size": 128256},
    "135m": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "intermediate_size": 1536, "vocab_size": 49152},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 96, "vocab_size": 256},
}  # fmt: skip
"""The shapes of Llama-3.2-1B and of SmolLM2-135M, and one to rehearse with."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a step."""

    model: str = "1b"
    prompts: int = 8
    mini_batches: int = 2
    budget: int = 9216
    """Tokens of a micro-batch: whole trees of each mix fill it, to 92% or more."""
    shrink: int = 1
    """Lengths are divided by this."""

    def lengths(self, mix: str) -> tuple[int, int]:
        prompt, response = MIXES[mix]
        return prompt // self.shrink, response // self.shrink


def write_model(directory: Path, name: str) -> Path:
    """A folder with config.json and the demo's tokenizer, and no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**_LLAMA, **MODELS[name]}, indent=1) + "\n")
    (directory / "tokenizer.model").write_bytes(base_files()["tokenizer.model"])
    return directory


def workload_of(sizes: Sizes, mix: str) -> Workload:
    """Prompts and responses of digits, equally long each."""
    draw, (prompt, response) = random.Random(0), sizes.lengths(mix)

    def ids(length: int) -> list[int]:
        return [draw.randrange(4, 14) for _ in range(length)]

    return Workload(
        [ids(prompt) for _ in range(sizes.prompts)], [ids(response) for _ in range(sizes.prompts * PER_PROMPT)]
    )


def configuration(model: Path, sizes: Sizes, mix: str, side: str, out: Path, data: str = "unused") -> dict[str, Any]:
    """GRPO without a reference, the actor in bf16 on a GPU: old log-probs, then two updates."""
    prompt, response = sizes.lengths(mix)
    dtype = "fp32" if sizes.model == "tiny" else "bf16"
    return {
        "run": {"dir": str(out), "on_existing": "overwrite"},
        "checkpoint": {"every_minutes": 0},
        # As good as not trained: each round computes with the same weights.
        "actor": {
            "model": {"path": str(model), "random_init": True, "dtype": dtype},
            "optim": {"lr": 1e-9, "weight_decay": 0.0},
            # All of it stays on the device: what moves takes the same time on either side.
            "offload": {"parameters": False, "optimizer": False},
        },
        "rewards": [{"kind": "rule", "rule": "benchmarks.packing_workload:reward", "name": "crc", "workers": 0}],
        "data": {"train": data, "max_prompt_tokens": prompt},
        "train": {
            "num_steps": 2,
            "prompts_per_step": sizes.prompts,
            "mini_batch_samples": sizes.prompts * PER_PROMPT // sizes.mini_batches,
            "max_tokens_per_micro_batch": sizes.budget,
            "shuffle": "groups",
            "share_prompts": SIDES[side],
        },
        "rollout": {
            "engine": "megatron",
            "num_samples_per_prompt": PER_PROMPT,
            "max_response_tokens": response,
            "logprob_gap": {"mean": 1e3, "p999": 1e3},
        },
        "algo": {"advantage": "grpo"},
        "samples": {"count": 0},
    }


def flops(model: Path, sizes: Sizes, mix: str, side: str) -> dict[str, float]:
    """By formula, of the old log-probs and of training: forward and backward."""
    arch, workload = architecture_from_hf(model), workload_of(sizes, mix)
    head = 2 * arch.hidden_size * arch.vocab_size
    asked = partial(by_formula, forward_cost(arch), workload, shared=SIDES[side], head=head)
    train, both = (sum(asked(forwards=forwards).values()) for forwards in (0, 1))
    return {"score": both - train, "train": train, "all": both}


# --- training phases ------------------------------------------------------------------------------


class Trainer:
    """One set of roles, which every mix and side trains on in turn."""

    def __init__(self, model: Path, sizes: Sizes, runtime: Runtime, out: Path) -> None:
        self._model, self._sizes, self._runtime, self._out = model, sizes, runtime, out
        self._step = 0

        def clock() -> float:
            synchronize(runtime.device)
            return time.monotonic()

        self._meter = AllocatorMeter(runtime.device) if counts_allocations(runtime.device) else None
        cfg = self._config("4_1", "unshared")
        tokenizer = load_tokenizer(cfg.actor.model.hf_directory())
        prompts = self._prompts("4_1")
        self._run = build(cfg, runtime, PromptData(prompts, [], tokenizer, []), Phases(clock))
        self._session = Session(runtime, cfg.run.dir, phases=self._run.phases)

    def _config(self, mix: str, side: str) -> RLConfig:
        return RLConfig.model_validate(configuration(self._model, self._sizes, mix, side, self._out / "run"))

    def _prompts(self, mix: str) -> list[PromptSample]:
        return [
            PromptSample(tokens=ids, text="".join(str(token - 4) for token in ids), fields={}, index=n)
            for n, ids in enumerate(workload_of(self._sizes, mix).prompts)
        ]

    def round(self, mix: str, side: str) -> dict[str, Any]:
        """A training phase: its seconds, the most memory, the gradient norm, and how many prompts were computed."""
        workload, prompts = workload_of(self._sizes, mix), self._prompts(mix)
        run = dataclasses.replace(self._run, cfg=self._config(mix, side))
        given = {
            n: Response(ids, [-2.0] * len(ids), True, ((self._step, len(ids)),))
            for n, ids in enumerate(workload.responses)
        }
        rollouts = gather_rollouts(given, len(given), self._runtime.device)
        experience = make_experience(prompts, rollouts, PER_PROMPT)
        if self._meter is not None:
            self._meter.reset()
        run.phases.begin_step(self._step + 1)
        rollout = complete(run, self._session, prompts, experience, self._step)
        experience, _, _ = score(run, self._session, rollout, self._step)
        # As step 0: by which step it is, groups would be in other mini-batches.
        state = StepState.begin(run, experience, plan_step(experience, run.cfg.train, run.cfg.run.seed, 0), {})
        metrics = train_on(run, state, 0)
        by_phase = run.phases.end_step(self._step + 1)
        self._step += 1
        seconds = {phase: by_phase.get(phase, 0.0) for phase in PHASES}
        return {
            "seconds": sum(seconds.values()),
            "by_phase": seconds,
            "peak_bytes": None if self._meter is None else self._meter.peak(),
            "grad_norm": metrics["actor_grad_norm"],
            "prompts_computed": metrics.get("prompts_computed"),
        }

    def close(self) -> None:
        self._run.engine.close()


# --- attention alone ------------------------------------------------------------------------------


def attention_ms(clock: Clock, sizes: Sizes, mix: str, calls: int) -> dict[str, float]:
    """Forward and backward of one layer's attention over a micro-batch of whole trees, by way, in milliseconds."""
    shape = MODELS[sizes.model]
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    size = shape["hidden_size"] // heads
    prompt, response = sizes.lengths(mix)
    trees = max(1, sizes.budget // (prompt + PER_PROMPT * response))
    lengths = [prompt] * trees + [response] * (trees * PER_PROMPT)
    parents = [-1] * trees + [n // PER_PROMPT for n in range(trees * PER_PROMPT)]
    shared = packed_row(lengths, clock.device, parents=parents)
    unshared = packed_row([prompt + response] * (trees * PER_PROMPT), clock.device)
    dtype = torch.float32 if clock.device.type == "cpu" else torch.bfloat16

    def made(tokens: int) -> list[torch.Tensor]:
        return [
            torch.randn(tokens, count, size, device=clock.device, dtype=dtype)
            for count in (heads, groups, groups, heads)
        ]

    def forward_backward(attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        leaves = [x.requires_grad_() for x in tensors[:3]]
        return torch.autograd.grad(attend(*leaves), leaves, tensors[3])

    found = {}
    of_shared, of_unshared = made(sum(lengths)), made(trees * PER_PROMPT * (prompt + response))
    ways: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
        "merged": (partial(packed_attention, row=shared, scale=None, window=None), of_shared),
        "plain": (partial(plain_attention, trees=shared.trees, scale=None, window=None), of_shared),
        "unshared": (partial(packed_attention, row=unshared, scale=None, window=None), of_unshared),
    }
    for name, (attend, tensors) in ways.items():
        found[name] = clock.median(partial(forward_backward, attend, tensors), calls)
    return found


def way_of(device: torch.device, sizes: Sizes) -> str:
    """Of attention over shared prompts, and why."""
    size = MODELS[sizes.model]["hidden_size"] // MODELS[sizes.model]["num_attention_heads"]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    kernel, why = kernel_for(device.type, dtype, size, None)
    return f"{'plain' if kernel is None else 'merged'} ({why})"


def attention_pairs(sizes: Sizes, mix: str) -> float:
    """Pairs of a query and a key that it sees, unshared over shared."""
    prompt, response = sizes.lengths(mix)
    own, whole = prompt * (prompt + 1) / 2, (prompt + response) * (prompt + response + 1) / 2
    return PER_PROMPT * whole / (own + PER_PROMPT * (whole - own))


def as_dict(sizes: Sizes) -> dict[str, Any]:
    """With the lengths."""
    return dataclasses.asdict(sizes) | {"per_prompt": PER_PROMPT, "mixes": {mix: sizes.lengths(mix) for mix in MIXES}}
