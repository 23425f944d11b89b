"""The rollout of a step: responses from the engine, or from the cache where an earlier process has left them.

Dynamic sampling draws further responses and ReMax draws greedy ones; both happen here too.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megarlhf.config import RLConfig
from megarlhf.data.sample_types import PromptSample
from megarlhf.data.samples.dataset import record_numbers
from megarlhf.experience import Experience
from megarlhf.resume.claim.config_changes import mathematics_of
from megarlhf.rollout.engine import FinishedResponses, RolloutEngine, Sampling, sample_seed
from megarlhf.trainers.experience.prompts import make_experience
from megarlhf.trainers.experience.rewards import PendingRewards, RewardOutput
from megarlhf.trainers.rl.advantages import ADVANTAGES
from megarlhf.trainers.rl.build import RLRun
from megarlhf.trainers.rl.dynamic_sampling import ScoredRollout, select
from megarlhf.trainers.run.session import Session


@dataclass(frozen=True)
class StepRollout:
    """Samples of a step as they were drawn. Their rewards are being computed, or were needed to choose the samples."""

    prompts: Sequence[PromptSample]
    """One for each group; the samples of a group stand together."""
    experience: Experience
    pending: PendingRewards | None
    rewards: Sequence[RewardOutput] | None = None
    """Where nothing is pending."""
    greedy: PendingRewards | None = None
    """Rewards of one greedy response to each prompt, where the advantage compares with them."""
    metrics: Mapping[str, float] = field(default_factory=dict)


def generate(run: RLRun, session: Session, prompts: Sequence[PromptSample], step: int) -> StepRollout:
    """Draw the samples of a step and begin with their rewards. Collective.

    Raises: StopRun, on every rank, when the run is asked to stop meanwhile.
    """
    return complete(run, session, prompts, draw(run, session, prompts, step), step)


def complete(
    run: RLRun, session: Session, prompts: Sequence[PromptSample], experience: Experience, step: int
) -> StepRollout:
    """Begin with the rewards of samples that are drawn, and draw what else the step needs. Collective."""
    rollout = StepRollout(prompts, experience, start_rewards(run, prompts, experience))
    if run.cfg.algo.dynamic_sampling.max_refills:
        rollout = draw_until_useful(run, session, rollout, step)
    if "greedy_rewards" in ADVANTAGES[run.cfg.algo.advantage].reads:
        rollout = replace(rollout, greedy=draw_greedy(run, session, rollout.prompts))
    return rollout


def draw(run: RLRun, session: Session, prompts: Sequence[PromptSample], step: int, refill: int = 0) -> Experience:
    """num_samples_per_prompt responses to each prompt, each kept in the rollout cache as it is finished.

    refill: number of the round of dynamic sampling; 0 is the step's first
    """
    cfg, phases = run.cfg, run.phases
    rows, seeds = _requests(cfg, prompts, step, refill)
    fingerprint = session.history.fingerprint(mathematics_of(cfg), session.began_with)
    with (
        session.stoppable("rollout"),
        run.cache.open(
            step, fingerprint=fingerprint, sampling=run.sampling, prompts=rows, seeds=seeds, refill=refill
        ) as kept,
    ):
        if kept.num_taken_over:
            session.note(f"step {step + 1}: {kept.num_taken_over} of {len(rows)} responses are in the rollout bank")
        experience = sample(
            cfg, run.engine, prompts, run.sampling, step, refill=refill, bank=kept, should_stop=session.asked_to_stop
        )
        phases.add_local(run.engine.local_seconds)
        drawn = math.nan if kept.num_taken_over else float(experience.response_lengths_N.sum())
        phases.count("rollout_tokens_per_second", drawn)
        phases.count("rollout_idle_fraction", experience.rollouts.idle_seconds)
        return experience


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
    rollouts.versions.require(step)  # what the configuration promises: the weights after `step` steps
    return make_experience(prompts, rollouts, cfg.rollout.num_samples_per_prompt)


def draw_until_useful(run: RLRun, session: Session, first: StepRollout, step: int) -> StepRollout:
    """Replace groups without signal by responses to other prompts: dynamic sampling. Collective."""
    assert first.pending is not None
    counts: Counter[str] = Counter()

    def draw_more(refill: int, count: int, used: Sequence[PromptSample]) -> ScoredRollout | None:
        prompts = other_prompts(run, step, count, used, refill)
        if not prompts:
            return None
        experience = draw(run, session, prompts, step, refill)
        return ScoredRollout(prompts, experience, wait(start_rewards(run, prompts, experience)))

    def wait(pending: PendingRewards) -> list[RewardOutput]:
        outputs = wait_for_rewards(pending, session)
        counts.update(run.rewarder.counts(outputs))
        return outputs

    drawn = ScoredRollout(first.prompts, first.experience, wait(first.pending))
    chosen, metrics = select(drawn, draw_more, run.rewarder.rewards, run.cfg.algo.dynamic_sampling)
    return StepRollout(chosen.prompts, chosen.experience, None, chosen.rewards, metrics={**metrics, **counts})


def draw_greedy(run: RLRun, session: Session, prompts: Sequence[PromptSample]) -> PendingRewards:
    """Draw the greedy response to each prompt by the weights that drew the samples, and begin with its rewards."""
    rows = [torch.tensor(prompt.tokens) for prompt in prompts]
    greedy = replace(run.sampling, greedy=True)
    with session.stoppable("rollout"):
        rollouts = run.engine.generate(rows, [0] * len(rows), greedy, should_stop=session.asked_to_stop)
        run.phases.count("rollout_tokens_per_second", float(rollouts.responses.num_tokens))
        run.phases.count("rollout_idle_fraction", rollouts.idle_seconds)
    return run.rewarder.start(make_experience(prompts, rollouts, 1), prompts)


def start_rewards(run: RLRun, prompts: Sequence[PromptSample], experience: Experience) -> PendingRewards:
    """Begin with the rewards of samples; `prompts` are one for each group. Nothing is waited for."""
    return run.rewarder.start(experience, repeated(prompts, run.cfg.rollout.num_samples_per_prompt))


def wait_for_rewards(pending: PendingRewards, session: Session) -> list[RewardOutput]:
    """The outputs of each reward for all samples that were drawn together. Collective."""
    with session.stoppable("reward"):
        outputs = pending.said(session.asked_to_stop)
        pending.rewarder.require_rewards(pending.prompts, outputs)
    return outputs


def repeated(prompts: Sequence[PromptSample], times: int) -> list[PromptSample]:
    """Each prompt once for each of its samples."""
    return [prompt for prompt in prompts for _ in range(times)]


def other_prompts(run: RLRun, step: int, count: int, used: Sequence[PromptSample], refill: int) -> list[PromptSample]:
    """Up to `count` prompts that are not among those used, in an order that follows from seed, step and round.

    It leaves the order of the steps' own prompts alone, in which each of these still comes once an epoch.
    """
    train = run.data.train
    is_used = np.isin(record_numbers(train), [prompt.index for prompt in used])
    others = np.flatnonzero(~is_used)
    seed = sample_seed(run.cfg.run.seed, step, -1, refill)
    chosen = random.Random(seed).sample(range(len(others)), min(count, len(others)))
    return [train[int(others[n])] for n in chosen]


def _requests(cfg: RLConfig, prompts: Sequence[PromptSample], step: int, refill: int) -> tuple[list[Tensor], list[int]]:
    """Prompts and seeds, a row for each sample."""
    rows = [torch.tensor(prompt.tokens) for prompt in prompts for _ in range(cfg.rollout.num_samples_per_prompt)]
    return rows, [sample_seed(cfg.run.seed, step, n, refill) for n in range(len(rows))]
