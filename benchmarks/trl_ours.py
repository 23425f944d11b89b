"""Our GRPO in `make bench-trl`, as a child: steps of the training loop's own functions, on prompts of a file.

{"command": "draw"}                          ->   prompts as ids, and responses to each, without any training
{"command": "round", "way": "ours 2048"}     ->   seconds of a step, and of its parts
{..., "prompts": ids, "responses": ids}      ->   the same with these responses in place of a rollout
{"command": "evaluate"}                      ->   what the rule says of greedy responses to the test prompts
{"command": "memory"}                        ->   the most memory so far
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import Peak
from benchmarks.packing_children import Message, Parent
from benchmarks.packing_ours import Run
from benchmarks.sampling import sample
from benchmarks.trl_task import rule_of
from megarlhf.config import RLConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.runtime import RankInfo, Runtime, initialize
from megarlhf.trainers.experience.prompts import load_prompts


class Grpo(Run):
    """Steps of a run; each begins with the next prompts of the training file."""

    def __init__(self, cfg: RLConfig, runtime: Runtime, options: Message) -> None:
        data = load_prompts(cfg.data, cfg.actor.model.tokenizer_place(), run_dir=cfg.run.dir)
        self._train, self._test = [data.train[n] for n in range(len(data.train))], list(data.test)
        self._tokenizer, self._options = data.tokenizer, options
        super().__init__(cfg, runtime, self._of_step(0))
        if options["whole"]:
            sampling = dataclasses.replace(self._run.sampling, end_ids=())
            self._run = dataclasses.replace(self._run, sampling=sampling)
        start = time.perf_counter()
        self._run.engine.verify_weights(self._run.actor.shard)
        self.certificate_seconds = time.perf_counter() - start

    def _of_step(self, step: int) -> list[PromptSample]:
        """In the order of the file, again and again."""
        per_step = self._options["prompts_per_step"]
        return [self._train[n % len(self._train)] for n in range(step * per_step, (step + 1) * per_step)]

    def draw(self) -> Message:
        """Responses of the weights as they are, to the prompts of the next step."""
        self.prompts = self._of_step(self._step)
        drawn = sample(self._cfg, self._run.engine, self.prompts, self._run.sampling, self._step)
        responses = [row.tolist() for row in drawn.rollouts.responses.rows()]
        return {"prompts": [prompt.tokens for prompt in self.prompts], "responses": responses}

    def step(self, way: str, prompts: Sequence[Any] = (), responses: Sequence[Sequence[int]] = ()) -> Message:
        """A step, with given responses or with a rollout of its own."""
        train = self._cfg.train.model_copy(update=self._options["ways"][way])
        self._cfg = self._cfg.model_copy(update={"train": train})
        self.prompts, self.responses = self._of_step(self._step), responses
        found = self.round(inject=bool(responses))
        metrics = found.pop("metrics")
        return found | {
            "grad_norms": [metrics["actor_grad_norm"]],
            "loss": metrics["policy_loss"],
            "reward": metrics["reward_mean"],
            "response_length": metrics["response_length_mean"],
        }

    def evaluate(self) -> Message:
        """Greedy responses to the test prompts."""
        rule = rule_of(self._options["rule"])
        greedy = dataclasses.replace(self._run.sampling, greedy=True)
        rows = [torch.tensor(prompt.tokens) for prompt in self._test]
        rollouts = self._run.engine.generate(rows, [0] * len(rows), greedy)
        texts = [self._tokenizer.decode(row.tolist(), continuation=True) for row in rollouts.responses.rows()]
        rewards = [rule(each.text, text, each.fields) for each, text in zip(self._test, texts, strict=True)]
        return {"rewards": rewards, "mean": statistics.mean(rewards), "texts": texts[:5]}


def configuration(options: Message, out: str) -> RLConfig:
    """GRPO with the settings that TRL's trainer has by default, but for the KL, which is on, and for what both are
    told: learning rate, AdamW's second decay, precision."""
    role = {
        "model": {"path": options["model"]},
        "optim": {"lr": options["lr"], "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "clip_grad": 1.0},
    }
    kl = {"coef": options["beta"], "placement": "loss", "estimator": "k3", "ratio_weighted": True}
    way = next(iter(options["ways"].values()))
    return RLConfig.model_validate(
        {
            "run": {"dir": out, "seed": options["seed"]},
            "actor": role,
            "rewards": [{"kind": "rule", "rule": options["rule"]}],
            "data": {
                "train": options["prompts"],
                "test": options["test"],
                "template": "chat",
                "cache": "none",
                "max_prompt_tokens": options["max_prompt"],
            },
            "train": {
                "num_steps": 1_000_000,
                "prompts_per_step": options["prompts_per_step"],
                "mini_batch_samples": options["prompts_per_step"] * options["per_prompt"],
                "shuffle": "groups",
                **way,
            },
            "rollout": {
                "engine": options["engine"],
                "num_samples_per_prompt": options["per_prompt"],
                "max_response_tokens": options["max_response"],
            },
            "algo": {"advantage": "group_relative", "group_std_eps": 1e-4, "kl": kl},
        }
    )


def main() -> None:
    parent = Parent()
    options = json.loads(sys.argv[1])
    runtime = initialize(RankInfo(), seed=options["seed"])
    torch.set_num_threads(options["threads"])
    peak = Peak() if options["memory"] else None
    with tempfile.TemporaryDirectory() as out:
        run = Grpo(configuration(options, str(Path(out) / "run")), runtime, options)
        parent.say(
            {
                "threads": torch.get_num_threads(),
                "engine": options["engine"],
                "ways": options["ways"],
                "certificate_seconds": run.certificate_seconds,
            }
        )
        parent.serve(
            {
                "draw": run.draw,
                "round": run.step,
                "evaluate": run.evaluate,
                "memory": lambda: peak.so_far() if peak else {},
            }
        )
        run.close()
        if peak:
            peak.close()


if __name__ == "__main__":
    main()
