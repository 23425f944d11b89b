"""Our side of `make bench-packing` and `make bench-prompts`, as a child: the training loop's own functions on the
workload's responses.

One process builds a run for each way of laying rows out (the same weights, one configuration key apart), and trains
whichever the command names. A phase is score, StepState.begin, train_on and describe, as in trainers/rl/loop.py; a
whole step has generation before it and the transfer of the weights behind it.

    {"command": "round", "way": "packed", "inject": true}   ->   seconds of phase and step, and of their parts
    {"command": "look", "way": "packed"}   ->   floating-point operations and memory of a phase
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.packing_children import Parent
from benchmarks.packing_workload import Sizes, make_workload, text_of
from benchmarks.prompts_work import looked_at
from benchmarks.sampling import sample
from megarlhf.columns import Ragged
from megarlhf.config import LogprobGapConfig, RLConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.experience import Experience
from megarlhf.models.role import Role
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.loss import Accumulated, Loss, StepResult
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.rollouts import Rollouts, VersionRuns
from megarlhf.runtime import RankInfo, Runtime, initialize
from megarlhf.trainers.experience.prompts import PromptData, make_experience
from megarlhf.trainers.rl.build import build
from megarlhf.trainers.rl.logprob_gap import MismatchGuard
from megarlhf.trainers.rl.metrics import describe
from megarlhf.trainers.rl.rollout import complete
from megarlhf.trainers.rl.scoring import score
from megarlhf.trainers.rl.update import StepState, train_on
from megarlhf.trainers.run.session import Session

Clock = Callable[[str], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedRole(Role):
    """A role that says how long its forwards, its forwards and backwards and its optimizer steps took."""

    clock: Clock

    def forward(self, batches: Sequence[MicroBatch], score: Callable[[Tensor, MicroBatch], Tensor]) -> list[Tensor]:
        with self.clock({"actor": "old_logprobs", "reference": "reference_logprobs", "critic": "values"}[self.name]):
            return super().forward(batches, score)

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> Accumulated:
        with self.clock(f"{self.name}_forward_backward"):
            return super().accumulate(batches, loss)

    def optimizer_step(self, sums: dict[str, float], reason_to_skip: Callable[..., str]) -> StepResult:
        with self.clock(f"{self.name}_optimizer"):
            return super().optimizer_step(sums, reason_to_skip)


def timed(role: Role, clock: Clock) -> TimedRole:
    """The same role, which tells the clock."""
    return TimedRole(**{f.name: getattr(role, f.name) for f in dataclasses.fields(role)}, clock=clock)


class Run:
    """One configuration's roles, trained a step further by each round on the prompts that it then has."""

    def __init__(
        self,
        cfg: RLConfig,
        runtime: Runtime,
        prompts: Sequence[PromptSample],
        responses: Sequence[Sequence[int]] = (),
    ) -> None:
        """`responses`: what a round trains on that is told to inject them, a row for each sample."""
        self._cfg, self.prompts, self.responses = cfg, prompts, responses
        self._seconds: dict[str, float] = defaultdict(float)
        self._step = 0
        tokenizer = load_tokenizer(cfg.actor.model.hf_directory())
        run = build(cfg, runtime, PromptData(prompts, [], tokenizer, []), Phases())
        roles = {name: timed(role, self._clock) for name, role in run.roles.items()}
        self._run, self._session = dataclasses.replace(run, roles=roles), Session(runtime, cfg.run.dir)
        self._run.engine.update_weights(self._run.actor.shard, version=0)

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    def round(self, inject: bool) -> dict[str, Any]:
        """One step, or, with injected responses, its training phase."""
        cfg, run, step = self._cfg, self._run, self._step
        self._seconds.clear()
        begin = time.perf_counter()
        if inject:
            experience = self._injected()
        else:
            with self._clock("generate"):
                experience = sample(cfg, run.engine, self.prompts, run.sampling, step)
        start, cpu = time.perf_counter(), time.process_time()
        rollout = complete(run, self._session, self.prompts, experience, step)
        experience, plan, _ = score(run, self._session, rollout, step)
        scored = time.perf_counter()
        state = StepState.begin(run, experience, plan, {})
        prepared = time.perf_counter()
        metrics = train_on(run, state, step)
        metrics |= describe(state.experience, cfg)
        if not inject:
            gap = MismatchGuard(LogprobGapConfig(steps=1), run.actor.shard.dtype)
            gap.watch(state.metrics)
            gap.raise_if_failed(last=False)
        trained, cpu = time.perf_counter(), time.process_time() - cpu
        with self._clock("update_weights"):
            run.engine.update_weights(run.actor.shard, version=step + 1)
        end = time.perf_counter()
        self._step += 1
        part_seconds = dict(self._seconds)
        if inject:  # a phase ends before it
            del part_seconds["update_weights"]
        scoring = sum(part_seconds.get(name, 0.0) for name in ("old_logprobs", "reference_logprobs", "values"))
        training = sum(seconds for name, seconds in part_seconds.items() if name.endswith(("_backward", "_optimizer")))
        part_seconds |= {
            "other_until_scored": scored - start - scoring,
            "advantages": prepared - scored,
            "other_in_training": trained - prepared - training,
        }
        return {
            "phase_seconds": trained - start,
            "step_seconds": end - begin,
            "phase_cpu_seconds": cpu,
            "parts": part_seconds,
            "metrics": metrics,
            "generated_tokens": None if inject else int(experience.response_lengths_N.sum()),
            "threads": torch.get_num_threads(),
        }

    def look(self) -> dict[str, Any]:
        """What a training phase computes, and its memory."""
        return looked_at(lambda: self.round(inject=True))

    def _injected(self) -> Experience:
        """Given responses as if the engine had drawn them; it gives no log-probs, and none are compared."""
        responses = Ragged.from_rows([torch.tensor(row) for row in self.responses], torch.int64)
        rollouts = Rollouts(
            responses=responses,
            logprobs=Ragged(torch.zeros(responses.num_tokens), responses.lengths_N),
            finished_N=torch.ones(len(responses.lengths_N), dtype=torch.bool),
            versions=VersionRuns.constant(self._step, responses.lengths_N),
        )
        return make_experience(self.prompts, rollouts, self._cfg.rollout.num_samples_per_prompt)

    def close(self) -> None:
        self._run.engine.close()


def configuration(options: dict[str, Any], sizes: Sizes, train: dict[str, Any], out: str) -> RLConfig:
    """GRPO as benchmarks/peers_trl.py sets it, or PPO with a critic of the actor's size."""
    high = sizes.prompt_tokens[1]
    role = {
        "model": {"path": options["model"]},
        "optim": {"lr": options["lr"], "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "clip_grad": 1.0},
    }
    group = {"advantage": "group_relative", "scale_by_group_std": False}
    kl = {"coef": options["beta"], "placement": "loss", "estimator": "k3"}
    algo: dict[str, Any] = {"grpo": group | {"kl": kl}, "ppo": {"advantage": "gae", "kl": {"coef": options["beta"]}}}
    return RLConfig.model_validate(
        {
            "run": {"dir": out},
            "actor": role,
            "critic": role | {"model": {**role["model"], "fresh_head": True}} if options["algo"] == "ppo" else None,
            "rewards": [{"kind": "rule", "rule": "benchmarks.packing_workload:reward"}],
            "data": {"train": "unused", "max_prompt_tokens": high},
            "train": {
                "num_steps": 1_000_000,
                "prompts_per_step": sizes.prompts,
                "mini_batch_samples": sizes.samples // sizes.mini_batches,
                **train,
            },
            "rollout": {
                "engine": options["engine"],
                "num_samples_per_prompt": sizes.per_prompt,
                "max_response_tokens": sizes.mean_response if options["workload"] == "equal" else sizes.max_response,
            },
            "algo": algo[options["algo"]],
        }
    )


def main() -> None:
    parent = Parent()
    options = json.loads(sys.argv[1])
    sizes = Sizes(**options["sizes"])
    runtime = initialize(RankInfo(), seed=0)
    torch.set_num_threads(options["threads"])
    workload = make_workload(options["workload"], sizes)
    prompts = [
        PromptSample(tokens=ids, text=text_of(ids), fields={}, index=n) for n, ids in enumerate(workload.prompts)
    ]
    with tempfile.TemporaryDirectory() as out:
        runs = {
            way: Run(configuration(options, sizes, train, str(Path(out) / way)), runtime, prompts, workload.responses)
            for way, train in options["ways"].items()
        }
        parent.say({"threads": torch.get_num_threads(), "engine": options["engine"], "ways": options["ways"]})
        parent.serve(
            {
                "round": lambda way, inject: runs[way].round(inject),
                "look": lambda way: runs[way].look(),
            }
        )
        for run in runs.values():
            run.close()


if __name__ == "__main__":
    main()
