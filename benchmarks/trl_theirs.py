"""TRL's GRPO trainer in `make bench-trl`, as a child: `peers_trl.py` on conversations, with its defaults.

Prompts are handed to it as conversations, from which it makes ids; the commands are those of `trl_ours.py`, but for
`draw`, and `drawn`, which says the responses of the last step. Of the methods that are replaced only
`_generate_single_turn` changes anything, where responses are given.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig

from benchmarks.memory import Peak
from benchmarks.packing_children import Message, Parent
from benchmarks.packing_workload import Workload
from benchmarks.peers_trl import Ends, NoMoreError, Timed, about, common_settings
from benchmarks.trl_task import conversation_of, read_records, rewards_of, rule_of, text_of


class Grpo(Timed):
    """Takes given responses from the command, and answers greedily when it is asked to."""

    def __init__(self, options: Message, parent: Parent, **kwargs: Any) -> None:
        super().__init__(Workload([], []), parent, **kwargs)
        self._rule = rule_of(options["rule"])
        self._test = read_records(Path(options["test"]))
        self.does = {"evaluate": self.evaluate_greedily, "drawn": lambda: {"responses": self.responses}}

    def begin_round(self, message: Message) -> bool:
        """Whether responses are given."""
        self.workload = Workload(message.get("prompts", []), message.get("responses", []))
        return bool(self.workload.responses)

    def evaluate_greedily(self) -> Message:
        """Of the test prompts, padded on the left, in one batch for each half."""
        texts: list[str] = []
        tokenizer, size = self.processing_class, (len(self._test) + 1) // 2
        self.model.eval()
        for first in range(0, len(self._test), size):
            messages = [conversation_of(record)["prompt"] for record in self._test[first : first + size]]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
            )
            with torch.no_grad():
                rows = self.model.generate(
                    **inputs,
                    do_sample=False,
                    max_new_tokens=self.max_completion_length,
                    eos_token_id=self.eos_token_ids,
                    pad_token_id=tokenizer.pad_token_id,
                )
            texts += tokenizer.batch_decode(rows[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
        self.model.train()
        rewards = []
        for record, text in zip(self._test, texts, strict=True):
            prompt = text_of(conversation_of(record)["prompt"], tokenizer)
            rewards.append(self._rule(prompt, text, record))
        return {"rewards": rewards, "mean": statistics.mean(rewards), "texts": texts[:5]}


def configuration(options: Message, out: str) -> GRPOConfig:
    """TRL's defaults: one update for each rollout, rewards over the group's deviation, the mean over tokens."""
    micro, longest = options["micro_batch_samples"], options["max_response"]
    samples = options["prompts_per_step"] * options["per_prompt"]
    generation = {"min_new_tokens": longest} if options["whole"] else {}
    return GRPOConfig(
        **common_settings(options, out),
        seed=options["seed"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        num_generations=options["per_prompt"],
        max_completion_length=longest,
        beta=options["beta"],
        shuffle_dataset=False,
        generation_kwargs=generation or None,
        **options["settings"],
    )


def main() -> None:
    parent = Parent()
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    peak = Peak() if options["memory"] else None
    ends = Ends(1)
    with tempfile.TemporaryDirectory() as out:
        records = read_records(Path(options["prompts"]))
        tokenizer = AutoTokenizer.from_pretrained(options["model"], padding_side="left")
        trainer = Grpo(
            options,
            parent,
            model=options["model"],
            reward_funcs=rewards_of(options["rule"], tokenizer),
            args=configuration(options, out),
            train_dataset=Dataset.from_list([conversation_of(record) for record in records]),
            processing_class=tokenizer,
            callbacks=[ends],
        )
        ends.trainer = trainer
        trainer.does |= {"memory": lambda: peak.so_far() if peak else {}}
        parent.say(about(trainer))
        with contextlib.suppress(NoMoreError):
            trainer.train()
        if peak:
            peak.close()


if __name__ == "__main__":
    main()
