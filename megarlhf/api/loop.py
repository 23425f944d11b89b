"""A user's own loop over the engine and the trainer of `rl`.

Legend: N samples, T tokens of their responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from megarlhf.api.configuration import Config, load_config
from megarlhf.api.open_loop import OpenLoop, UserState, opened
from megarlhf.api.sample_batch import SampleBatch
from megarlhf.collective_errors import from_first_rank, require_same_items
from megarlhf.columns import Ragged
from megarlhf.config.loop import LoopConfig
from megarlhf.data.text.writer import text_tokens
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.experience import Experience
from megarlhf.observe.records.metrics import Metric
from megarlhf.own_code.guarded import plain_metrics
from megarlhf.rollout.responses import sample_seed
from megarlhf.rollout.rewards.score import response_texts
from megarlhf.trainers.rl.loop import update_weights
from megarlhf.trainers.rl.metrics import kl_metrics
from megarlhf.trainers.rl.scoring import add_logprobs_and_values
from megarlhf.trainers.rl.update import StepState, plan_step, train_on
from megarlhf.trainers.run.session import is_due

Value = TypeVar("Value")

_SAME = "every rank of a loop must compute the same, so use no rank, clock or unseeded random number, or take rank 0's "
_SAME += "by loop.from_first_rank(...)"


class Loop:
    """A training loop of your own, over an actor, its optimizer and a rollout engine.

        config = {
            "run": {"dir": "runs/mine"},
            "actor": {"model": {"path": "llama"}, "optim": {"lr": 1e-6}},
            "train": {"num_steps": 10, "prompts_per_step": 8, "mini_batch_samples": 32,
                      "max_tokens_per_micro_batch": 4096},
            "rollout": {"num_samples_per_prompt": 4, "max_response_tokens": 256},
        }
        with megarlhf.Loop(config) as loop:
            for step in loop.steps():
                samples = loop.generate(prompts_of(step))
                rewards = torch.tensor([reward(text) for text in samples.texts])
                loop.train(samples, megarlhf.group_relative(rewards, samples.groups))
                loop.update_weights()

    The configuration has the sections run, actor, reference, data (`max_prompt_tokens`), train, rollout, algo (the
    policy's loss), checkpoint and watchdog of `rl`. A loop that was stopped or killed and is opened again in the same
    run.dir goes on after its last saved step. On several ranks (torchrun, srun) every rank runs the same script and
    must pass the same values; they are compared.
    """

    def __init__(self, config: Config, overrides: Sequence[str] = ()) -> None:
        """Raises: ValueError for mistakes of the configuration. `with` opens the loop."""
        self.config: LoopConfig = load_config("loop", config, overrides)
        self._state = UserState()
        self._context: Any = None
        self._open_loop: OpenLoop | None = None
        self._calls = 0
        """Calls of `generate` in this step, each with seeds of its own."""
        self._in_step = False
        self._known = {"kl", "loss", "policy_loss", "entropy", "tokens"}
        """Names of metrics that a user's own must not have."""

    def __enter__(self) -> Loop:
        """Build the models, go on from the newest resume point, and give the engine the weights. Collective."""
        if self._context is not None:
            raise ValueError("this Loop was opened before; make a new one, which goes on in the same run.dir")
        self._context = opened(self.config, self._state)
        self._open_loop = self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open_loop, context = None, self._context
        context.__exit__(kind, error, traceback)

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._open.session.step

    @property
    def num_steps(self) -> int:
        """Steps of the whole loop, `train.num_steps`."""
        return self.config.train.num_steps

    @property
    def resumed(self) -> bool:
        """Whether the loop goes on from a resume point."""
        return self._open.session.resumed

    @property
    def state(self) -> dict[str, Any]:
        """Values of your own that resume points hold: texts, numbers, lists and mappings. `train` saves the step, so
        change them before it."""
        return self._state.values

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which may print and write."""
        return self._open.session.runtime.is_main

    @property
    def tokenizer(self) -> Tokenizer:
        """The actor's tokenizer."""
        return self._open.run.data.tokenizer

    def from_first_rank(self, value: Value) -> Value:
        """Rank 0's value, on every rank. Collective."""
        return from_first_rank(value)

    def steps(self) -> Iterator[int]:
        """Iterate over the steps that are left; yields the number of steps done. Each must call `train` once."""
        while (before := self.step) < self.num_steps:
            yield before
            if self.step == before:
                raise ValueError(f"step {before + 1} has not called loop.train(...), which ends a step")

    def generate(
        self, prompts: Sequence[str | Sequence[int]], *, num_samples: int | None = None, greedy: bool = False
    ) -> SampleBatch:
        """Draw responses to prompts with the weights that the engine holds. Collective.

        prompts:     texts, or token ids
        num_samples: responses to each prompt; default: `rollout.num_samples_per_prompt`
        greedy:      take the likeliest token

        Raises: ValueError for a prompt that is too long, or where ranks pass different prompts; StopRun.
        """
        run, session, cfg = self._open.run, self._open.session, self.config
        rows = [self._tokens(n, prompt) for n, prompt in enumerate(prompts)]
        count = cfg.rollout.num_samples_per_prompt if num_samples is None else num_samples
        if not rows or count < 1:
            raise ValueError(f"generate got {len(rows)} prompts and num_samples = {count}; give one or more of each")
        require_same_items("prompts given to loop.generate", [(row, count, greedy) for row in rows], _SAME)
        self._begin_step()
        repeated = [torch.tensor(row) for row in rows for _ in range(count)]
        seeds = [sample_seed(cfg.run.seed, session.step, n, self._calls) for n in range(len(repeated))]
        self._calls += 1
        sampling = replace(run.sampling, greedy=greedy)
        with session.stoppable("rollout"):
            rollouts = run.engine.generate(repeated, seeds, sampling, should_stop=session.asked_to_stop)
            run.phases.count("rollout_tokens_per_second", float(rollouts.responses.num_tokens))
        groups_N = torch.arange(len(rows)).repeat_interleave(count)
        experience = Experience(prompts=tuple(repeated), groups_N=groups_N, rollouts=rollouts)
        texts = [
            prompt if isinstance(prompt, str) else self.tokenizer.decode(list(prompt))
            for prompt in prompts
            for _ in range(count)
        ]
        return SampleBatch(response_texts(rollouts, self.tokenizer), texts, experience)

    def train(
        self,
        samples: SampleBatch,
        advantages: Tensor | Sequence[float] | Sequence[Tensor],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> dict[str, Metric]:
        """Train the actor on samples by the policy's loss of `algo`, and end the step. Collective.

        The step's metrics are logged, and a resume point and an export are written where they are due.

        advantages: one number for each sample; or one for each token, as a tensor for each sample or as one tensor
            with all of them end to end
        metrics:    numbers of your own to log, such as the mean reward

        Returns: the metrics of the step
        Raises: ValueError for values that do not fit or differ between ranks; StopRun after saving, if the loop was
        asked to stop.
        """
        run, session, cfg = self._open.run, self._open.session, self.config
        self._require_trainable(samples)
        own = plain_metrics(metrics or {}, "loop.train(metrics=...)", self._known)
        self._state.state_dict()  # refuses what a resume point could not hold, before anything is trained
        rows = _rows_of(samples, advantages)
        tokens = zip(samples.prompt_tokens, samples.tokens, strict=True)
        require_same_items("samples given to loop.train", list(tokens), _SAME)
        require_same_items("advantages given to loop.train", [row.tolist() for row in rows], _SAME)
        self._begin_step()
        step, last = session.step, session.step + 1 == cfg.train.num_steps
        plan = plan_step(samples.experience, cfg.train, cfg.run.seed, step)
        experience = add_logprobs_and_values(run, session, samples.experience, plan, step)
        column = Ragged.from_rows(rows, torch.float32)
        values_T = column.values_T.to(session.runtime.device)
        experience = experience.with_columns({"advantages": experience.held(Ragged(values_T, column.lengths_N))})
        state = StepState(experience, plan, run.kl.metrics())
        if "old_logprobs" in experience.columns:
            state.compare_with_rollout(cfg, step)
            run.gap_guard.watch(state.metrics)
        trained = train_on(run, state, step)
        logged = {**state.metrics, **_describe(state.experience, column, cfg), **trained}
        run.kl.update(logged["kl"], len(samples))
        self._known = {*logged}
        self._in_step, self._calls = False, 0
        session.keep_lengths(experience.prompt_lengths_N.tolist(), experience.response_lengths_N.tolist())
        session.end_step(logged, run.exported, last=last or run.gap_guard.failed(last=last), own=own)
        run.gap_guard.raise_if_failed(last=last)
        return {**logged, **own}

    def update_weights(self) -> None:
        """Give the engine the actor's weights. Collective."""
        number = self.step
        due = number == 1 or is_due(number, self.config.rollout.verify_weights_every)
        update_weights(self._open.run, number, verify=due)

    def save(self) -> None:
        """Write a resume point of the last step, and wait until it is complete. Collective."""
        self._open.session.save_boundary()

    def export(self) -> Path:
        """Write the actor as a Hugging Face directory, and return it. Collective. The last step is exported anyway."""
        session = self._open.session
        directory = session.run_dir / "checkpoints" / f"step_{session.step:06d}"
        if not from_first_rank(directory.is_dir()):
            session.export(session.step, self._open.run.exported, last=True)
        return directory / self._open.run.actor.export_names[0]

    @property
    def _open(self) -> OpenLoop:
        if self._open_loop is None:
            raise ValueError("this Loop is not open; use it inside `with megarlhf.Loop(...) as loop:`")
        return self._open_loop

    def _begin_step(self) -> None:
        if not self._in_step and self.step < self.num_steps:
            self._open.session.begin_step()
            self._in_step = True

    def _tokens(self, n: int, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt. Raises: ValueError."""
        tokens = text_tokens(prompt, self.tokenizer) if isinstance(prompt, str) else [int(token) for token in prompt]
        limit, vocab = self.config.data.max_prompt_tokens, self._open.run.actor.shard.arch.vocab_size
        if not 0 < len(tokens) <= limit:
            raise ValueError(f"prompt {n} has {len(tokens)} tokens; give 1 to data.max_prompt_tokens = {limit}")
        if outside := [token for token in tokens if not 0 <= token < vocab]:
            raise ValueError(f"prompt {n} has the token id {outside[0]}; the model has ids from 0 to {vocab - 1}")
        return tokens

    def _require_trainable(self, samples: SampleBatch) -> None:
        """Raises: ValueError."""
        cfg = self.config
        if self.step >= self.num_steps:
            raise ValueError(f"all {self.num_steps} steps of this loop are done (train.num_steps); raise it to go on")
        most = cfg.train.prompts_per_step * cfg.rollout.num_samples_per_prompt
        if len(samples) > most:
            raise ValueError(
                f"train got {len(samples)} samples; a step has at most train.prompts_per_step x "
                f"rollout.num_samples_per_prompt = {most}, from which the learning rate's schedule is computed"
            )
        if cfg.train.micro_batch_samples is not None and len(samples) % cfg.train.mini_batch_samples:
            raise ValueError(
                f"train got {len(samples)} samples, which padded micro-batches cannot divide; give a multiple of "
                f"train.mini_batch_samples = {cfg.train.mini_batch_samples}, or set train.max_tokens_per_micro_batch"
            )
        drawn_by = set(samples.experience.rollouts.versions.versions.values_T.tolist())
        if drawn_by != {self.step}:
            raise ValueError(
                f"train got samples that were drawn after {', '.join(map(str, sorted(drawn_by)))} steps, and "
                f"{self.step} are done: the loss takes samples of the present weights. Call loop.update_weights() "
                "after loop.train(...), and generate anew"
            )


def _rows_of(samples: SampleBatch, advantages: Tensor | Sequence[float] | Sequence[Tensor]) -> list[Tensor]:
    """Advantages of each sample's tokens. Raises: ValueError."""
    lengths = samples.experience.response_lengths_N.tolist()
    if isinstance(advantages, Tensor) and advantages.shape == (sum(lengths),) and len(advantages) != len(lengths):
        advantages = advantages.split(lengths)
    given = [torch.as_tensor(value, dtype=torch.float32).cpu() for value in advantages]
    if len(given) != len(lengths):
        raise ValueError(f"advantages are of {len(given)} samples, expected one for each of the {len(lengths)} samples")
    rows = [value.expand(length) if value.ndim == 0 else value for value, length in zip(given, lengths, strict=True)]
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.shape != (length,):
            raise ValueError(
                f"advantages of sample {n} have shape {list(row.shape)}, expected [{length}] or one number"
            )
        if not bool(row.isfinite().all()):
            raise ValueError(f"advantages of sample {n} are not finite; a sample without a reward can be left out")
    return rows


def _describe(experience: Experience, advantages: Ragged, cfg: LoopConfig) -> dict[str, Metric]:
    """Metrics of the samples. Collective."""
    lengths_N = experience.response_lengths_N
    return {
        **kl_metrics(experience, cfg.algo.kl),
        "advantage_mean": float(advantages.values_T.mean()),
        "response_length_mean": float(lengths_N.float().mean()),
        "finished_fraction": float(experience.rollouts.finished_N.float().mean()),
        "tokens": int(lengths_N.sum()),
    }
