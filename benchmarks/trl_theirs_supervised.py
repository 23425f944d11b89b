"""TRL's SFT and reward trainers in `make bench-trl`, as a child: optimizer steps on one mini-batch of token ids.

The trainers are TRL's; what is inherited looks at the clock. A step is from its first micro-batch, padded already, to
behind the optimizer.

    {"command": "round"}    ->   seconds of a step, and of its parts
    {"command": "memory"}   ->   the most memory so far
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.memory import Peak
from benchmarks.packing_children import Message, Parent
from benchmarks.packing_workload import Sizes, Workload, make_workload
from benchmarks.peers_trl import Clocked, NoMoreError, about, common_settings


class Sft(Clocked, SFTTrainer):
    """With a clock."""


class Reward(Clocked, RewardTrainer):
    """With a clock."""


class Steps(TrainerCallback):
    """Begins a step when it is told to, and says what it took."""

    def __init__(self, parent: Parent, peak: Peak | None) -> None:
        self._parent, self._peak = parent, peak
        self.trainer: Clocked | None = None
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        message = self._parent.next_of({"memory": lambda: self._peak.so_far() if self._peak else {}})
        if message is None:
            raise NoMoreError
        self.trainer.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.trainer.seconds["optimizer"] += time.perf_counter() - self._start

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        trainer, seconds = self.trainer, dict(self.trainer.seconds)
        took = time.perf_counter() - trainer.start
        computing = seconds.pop("training_step")
        parts = {"forward": seconds.pop("compute_loss"), **seconds}
        parts |= {"backward": computing - parts["forward"], "other": took - computing - sum(seconds.values())}
        self._parent.say(
            {
                "phase_seconds": took,
                "phase_cpu_seconds": time.process_time() - trainer.cpu,
                "parts": parts,
                "loss": trainer.loss,
                "grad_norms": list(trainer.norms),
            }
        )


def dataset_of(command: str, workload: Workload) -> Dataset:
    """Ids, as TRL takes them: it prepares nothing further. Lengths are for its samplers."""
    responses = iter(workload.responses)
    if command == "sft":
        rows = [(prompt, next(responses)) for prompt in workload.prompts]
        made = [{"input_ids": [*p, *r], "labels": [*[-100] * len(p), *r], "length": len(p) + len(r)} for p, r in rows]
    else:
        pairs = [(prompt, next(responses), next(responses)) for prompt in workload.prompts]
        made = [
            {"chosen_ids": p + chosen, "rejected_ids": p + rejected, "length": len(p) + max(len(chosen), len(rejected))}
            for p, chosen, rejected in pairs
        ]
    return Dataset.from_list(made)


def trainer_of(options: Message, workload: Workload, out: str, steps: Steps) -> Clocked:
    """One mini-batch is one epoch; its micro-batches follow the settings."""
    micro, samples = options["micro_batch_samples"], len(workload.prompts)
    settings = common_settings(options, out) | {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": samples // micro,
        "max_length": None,
        **options["settings"],
    }
    common: dict[str, Any] = {
        "model": options["model"],
        "train_dataset": dataset_of(options["command"], workload),
        "processing_class": AutoTokenizer.from_pretrained(options["model"]),
        "callbacks": [steps],
    }
    if options["command"] == "sft":
        return Sft(args=SFTConfig(**settings), **common)
    return Reward(args=RewardConfig(**settings), **common)


def main() -> None:
    parent = Parent()
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    peak = Peak() if options["memory"] else None
    workload = make_workload(options["workload"], Sizes(**options["sizes"]))
    steps = Steps(parent, peak)
    with tempfile.TemporaryDirectory() as out:
        trainer: Any = trainer_of(options, workload, out, steps)
        steps.trainer = trainer
        parent.say(about(trainer))
        with contextlib.suppress(NoMoreError):
            trainer.train()
        if peak:
            peak.close()


if __name__ == "__main__":
    main()
