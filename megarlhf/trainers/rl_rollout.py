"""The rollout of a step of rl: responses from the engine, or from the bank where an earlier process has left them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarlhf.config import RLConfig
from megarlhf.data.samples import PromptSample
from megarlhf.experience import Experience, Rollouts
from megarlhf.resume.changes import mathematics_of
from megarlhf.rollout.bank import Bank
from megarlhf.rollout.engine import KeptResponses, RolloutEngine, Sampling, sample_seed
from megarlhf.trainers.rl_components import Components
from megarlhf.trainers.session import Session


def sample(
    cfg: RLConfig,
    engine: RolloutEngine,
    prompts: Sequence[PromptSample],
    sampling: Sampling,
    step: int,
    *,
    bank: KeptResponses | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Experience:
    """Draw num_samples_per_prompt responses to each prompt, but for those that `bank` has.

    Raises: RolloutInterrupted, on every rank, when `should_stop` says so on one.
    """
    rows, seeds = _requests(cfg, prompts, step)
    rollouts = engine.generate(rows, seeds, sampling, bank=bank, should_stop=should_stop)
    assert rollouts.weight_version == step, "the engine sampled with other weights than this step's"
    return make_experience(prompts, rollouts, cfg.rollout.num_samples_per_prompt)


def sample_or_keep(
    cfg: RLConfig, components: Components, prompts: Sequence[PromptSample], step: int, bank: Bank, session: Session
) -> Experience:
    """The same, kept in the bank as it is finished.

    Raises: RolloutInterrupted, on every rank, when the run is asked to stop meanwhile.
    """
    engine, sampling = components.engine, components.sampling
    rows, seeds = _requests(cfg, prompts, step)
    fingerprint = session.history.fingerprint(mathematics_of(cfg), session.began_with)
    with bank.open(step, fingerprint=fingerprint, sampling=sampling, prompts=rows, seeds=seeds) as kept:
        if kept.num_taken_over:
            session.note(f"step {step + 1}: {kept.num_taken_over} of {len(rows)} responses are in the rollout bank")
        experience = sample(cfg, engine, prompts, sampling, step, bank=kept, should_stop=session.asked_to_stop)
        components.phases.add_local(engine.local_seconds)
        drawn = math.nan if kept.num_taken_over else float(experience.response_lengths_N.sum())
        components.phases.count("rollout_tokens_per_second", drawn)
        return experience


def _requests(cfg: RLConfig, prompts: Sequence[PromptSample], step: int) -> tuple[list[Tensor], list[int]]:
    """Prompts and seeds, a row for each sample."""
    rows = [torch.tensor(prompt.tokens) for prompt in prompts for _ in range(cfg.rollout.num_samples_per_prompt)]
    return rows, [sample_seed(cfg.run.seed, step, n) for n in range(len(rows))]


def make_experience(prompts: Sequence[PromptSample], rollouts: Rollouts, num_samples_per_prompt: int) -> Experience:
    """The table's index: sample n answers prompt n // num_samples_per_prompt."""
    repeated = [prompt for prompt in prompts for _ in range(num_samples_per_prompt)]
    return Experience(
        prompts=tuple(torch.tensor(prompt.tokens) for prompt in repeated),
        groups_N=torch.arange(len(prompts)).repeat_interleave(num_samples_per_prompt),
        rollouts=rollouts,
    )
