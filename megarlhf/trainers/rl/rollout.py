"""The rollout of a step of rl: responses from the engine, or from the bank where an earlier process has left them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarlhf.config import RLConfig
from megarlhf.data.samples.dataset import record_numbers
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.experience import Experience
from megarlhf.resume.claim.config_changes import mathematics_of
from megarlhf.rollout.engine import FinishedResponses, RolloutEngine, Sampling, sample_seed
from megarlhf.rollout.response_cache import RolloutCache
from megarlhf.trainers.experience.prompts import make_experience
from megarlhf.trainers.rl.build import Components
from megarlhf.trainers.run.session import Session


def sample(
    cfg: RLConfig,
    engine: RolloutEngine,
    prompts: Sequence[PromptSample],
    sampling: Sampling,
    step: int,
    *,
    refill: int = 0,
    bank: FinishedResponses | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Experience:
    """Draw num_samples_per_prompt responses to each prompt, but for those that `bank` has.

    Raises: RolloutInterrupted, on every rank, when `should_stop` says so on one.
    """
    rows, seeds = _requests(cfg, prompts, step, refill)
    rollouts = engine.generate(rows, seeds, sampling, bank=bank, should_stop=should_stop)
    assert rollouts.weight_version == step, "the engine sampled with other weights than this step's"
    return make_experience(prompts, rollouts, cfg.rollout.num_samples_per_prompt)


@dataclass(frozen=True)
class Drawing:
    """Draws the samples of a step, and keeps each in the bank as it is finished."""

    cfg: RLConfig
    components: Components
    data: Sequence[PromptSample]
    """All prompts of the training data."""
    bank: RolloutCache
    session: Session
    step: int

    def responses_to(self, prompts: Sequence[PromptSample], refill: int = 0) -> Experience:
        """num_samples_per_prompt responses to each prompt. Collective.

        refill: number of the round of dynamic sampling; 0 is the step's first

        Raises: RolloutInterrupted, on every rank, when the run is asked to stop meanwhile.
        """
        cfg, session, step = self.cfg, self.session, self.step
        engine, sampling = self.components.engine, self.components.sampling
        rows, seeds = _requests(cfg, prompts, step, refill)
        fingerprint = session.history.fingerprint(mathematics_of(cfg), session.began_with)
        with (
            session.stoppable("rollout"),
            self.bank.open(
                step, fingerprint=fingerprint, sampling=sampling, prompts=rows, seeds=seeds, refill=refill
            ) as kept,
        ):
            if kept.num_taken_over:
                session.note(f"step {step + 1}: {kept.num_taken_over} of {len(rows)} responses are in the rollout bank")
            experience = sample(
                cfg, engine, prompts, sampling, step, refill=refill, bank=kept, should_stop=session.asked_to_stop
            )
            self.components.phases.add_local(engine.local_seconds)
            drawn = math.nan if kept.num_taken_over else float(experience.response_lengths_N.sum())
            self.components.phases.count("rollout_tokens_per_second", drawn)
            self.components.phases.count("rollout_idle_fraction", experience.rollouts.idle_seconds)
            return experience

    def other_prompts(self, count: int, used: Sequence[PromptSample], refill: int) -> list[PromptSample]:
        """Up to so many prompts that are not among those used, in an order that follows from seed, step and round: it
        leaves the order of the steps' own prompts alone, in which each of these still comes once an epoch."""
        taken = np.isin(record_numbers(self.data), [prompt.index for prompt in used])
        others = np.flatnonzero(~taken)
        seed = sample_seed(self.cfg.run.seed, self.step, -1, refill)
        chosen = random.Random(seed).sample(range(len(others)), min(count, len(others)))
        return [self.data[int(others[n])] for n in chosen]


def _requests(cfg: RLConfig, prompts: Sequence[PromptSample], step: int, refill: int) -> tuple[list[Tensor], list[int]]:
    """Prompts and seeds, a row for each sample."""
    rows = [torch.tensor(prompt.tokens) for prompt in prompts for _ in range(cfg.rollout.num_samples_per_prompt)]
    return rows, [sample_seed(cfg.run.seed, step, n, refill) for n in range(len(rows))]
