"""TRL's GRPO trainer as a child of `make bench-packing`.

One method of `GRPOTrainer` is replaced: `_generate_single_turn`, which turns prompts into completions, returns the
workload's own responses where the command says so. All that follows is TRL's, and is timed from there to the end of
the step's last optimizer step: decoding, rewards, advantages, old and reference log-probs where its settings need
them, loss, backward, clipping, AdamW. The other methods that are overridden only look at the clock.

    {"command": "round", "inject": true}   ->   seconds of the phase and of the whole step, and of their parts
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.packing_children import Message, Parent
from benchmarks.packing_workload import Sizes, Workload, make_workload, reward, text_of


class NoMoreError(Exception):
    """There are no more commands."""


class Clocked:
    """Before one of TRL's trainers in the order of bases: what it inherits looks at the clock, and at each update's
    loss and gradient norm."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norms: list[float] = []
        self.loss = 0.0
        """Of the micro-batches since `begin`, as the trainer adds it up."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.start = self.cpu = 0.0

    def begin(self) -> None:
        """What is measured begins here."""
        self.seconds.clear()
        self.norms.clear()
        self.loss = 0.0
        self.start, self.cpu = time.perf_counter(), time.process_time()

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        # The first of a step may wait for the command before the step's own clock starts.
        self.seconds["training_step"] += time.perf_counter() - max(start, self.start)
        self.loss += float(loss)
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("compute_loss"):
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: Any) -> Any:
        with self.clock("clip"):
            norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        self.norms.append(float(norm))
        return norm


class Timed(Clocked, GRPOTrainer):
    """GRPOTrainer that takes its completions from the workload, and the time."""

    def __init__(self, workload: Workload, parent: Parent, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.workload = workload
        self.does: dict[str, Callable[..., Message]] = {}
        """Other commands than `round`, between two steps."""
        self._parent = parent
        self._inject = True
        self._injected = self.reward = 0.0
        self.responses: list[list[int]] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """The beginning of a step: waits for the command."""
        message = self._parent.next_of(self.does)
        if message is None:
            raise NoMoreError
        self._inject = self.begin_round(message)
        self.begin()
        completions = super()._generate_and_score_completions(inputs)
        self.seconds["until_scored"] += time.perf_counter() - self._injected
        return completions

    def begin_round(self, message: Message) -> bool:
        """Whether the workload's responses are taken."""
        return bool(message["inject"])

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inject:
            per_prompt = self.num_generations
            assert [list(ids) for ids in prompt_ids[::per_prompt]] == self.workload.prompts, "the prompts differ"
            generated = [list(row) for row in self.workload.responses], None
        else:
            with self.clock("generate"):
                generated = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.responses = [list(row) for row in generated[0]]
        self._injected, self.cpu = time.perf_counter(), time.process_time()
        return generated

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            name = "forward"
        else:
            name = "reference_logprobs" if model is self.ref_model else "old_logprobs"
        with self.clock(name):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("rewards"):
            rewards = super()._calculate_rewards(*args, **kwargs)
        self.reward = float(rewards.mean())
        return rewards

    def answer(self) -> None:
        """After the step's last optimizer step."""
        end, cpu = time.perf_counter(), time.process_time()
        parts = dict(self.seconds)
        # The first training_step of a step has generation and scoring inside.
        scored = parts.pop("until_scored")
        parts["backward"] = parts.pop("training_step") - parts["compute_loss"] - (self._injected - self.start) - scored
        parts["loss_after_logprobs"] = parts.pop("compute_loss") - parts["forward"]
        parts["other_until_scored"] = scored - sum(
            parts.get(name, 0.0) for name in ("old_logprobs", "reference_logprobs", "rewards")
        )
        phase = end - self._injected
        inside = sum(seconds for name, seconds in parts.items() if name != "generate")
        self._parent.say(
            {
                "phase_seconds": phase,
                "step_seconds": end - self.start,
                "phase_cpu_seconds": cpu - self.cpu,
                "parts": parts | {"other": phase - inside},
                "loss": self.loss,
                "grad_norms": list(self.norms),
                "reward": self.reward,
                "response_length": statistics.mean(map(len, self.responses)),
                "generated_tokens": None if self._inject else sum(map(len, self.responses)),
                "threads": torch.get_num_threads(),
            }
        )


class Ends(TrainerCallback):
    """Sees optimizer steps begin and end."""

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self.trainer: Timed | None = None
        self._start = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.trainer.seconds["optimizer"] += time.perf_counter() - self._start

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        if state.global_step % self._updates == 0:
            self.trainer.answer()


def rewards(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """The workload's, as TRL asks for them."""
    return [reward(prompt, completion, {}) for prompt, completion in zip(prompts, completions, strict=True)]


def common_settings(options: dict[str, Any], out: str) -> dict[str, Any]:
    """Of each of TRL's trainers: fp32 on the CPU, activations kept, a constant learning rate, no logs and files."""
    return {
        "output_dir": out,
        "max_steps": 1_000_000,
        "learning_rate": options["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"attn_implementation": options["attention"], "dtype": "float32"},
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def configuration(options: dict[str, Any], sizes: Sizes, out: str) -> GRPOConfig:
    """GRPO: a token mean over the mini-batch, rewards not divided by their deviation."""
    micro = options["micro_batch_samples"]
    return GRPOConfig(
        **common_settings(options, out),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=sizes.samples // sizes.mini_batches // micro,
        steps_per_generation=sizes.samples // micro,
        num_generations=sizes.per_prompt,
        max_completion_length=sizes.mean_response,
        beta=options["beta"],
        loss_type="dapo",
        scale_rewards="none",
        shuffle_dataset=False,
        torch_compile=options["compile"],
        use_transformers_continuous_batching=options["continuous_batching"],
    )


def about(trainer: Any) -> Message:
    """What a child says of itself when it is ready."""
    return {
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "accelerate", "transformers", "torch")},
        "threads": torch.get_num_threads(),
        "attention": trainer.model.config._attn_implementation,
        "dtype": str(trainer.model.dtype).removeprefix("torch."),
        "optimizer": str(trainer.args.optim),
        "installed_in": Path(importlib.import_module("trl").__file__ or "").parent.name,
    }


def main() -> None:
    parent = Parent()
    options = json.loads(sys.argv[1])
    sizes = Sizes(**options["sizes"])
    torch.set_num_threads(options["threads"])
    workload = make_workload(options["workload"], sizes)
    ends = Ends(sizes.mini_batches)
    with tempfile.TemporaryDirectory() as out:
        trainer = Timed(
            workload,
            parent,
            model=options["model"],
            reward_funcs=rewards,
            args=configuration(options, sizes, out),
            train_dataset=Dataset.from_list([{"prompt": text_of(ids)} for ids in workload.prompts]),
            processing_class=AutoTokenizer.from_pretrained(options["model"], padding_side="left"),
            callbacks=[ends],
        )
        ends.trainer = trainer
        parent.say(about(trainer))
        try:
            trainer.train()
        except NoMoreError:
            return


if __name__ == "__main__":
    main()
