"""The rollout of a step: responses from the engine, or from the bank if an earlier process finished them.

Without slices a step draws its own samples. With slices it draws a slice of the samples of each of some steps, after
which its own are whole. The further responses of dynamic sampling and the greedy responses of ReMax are drawn here too.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from megarlhf.config import RLConfig
from megarlhf.data.sample_types import PromptSample
from megarlhf.data.samples.dataset import Samples, record_numbers
from megarlhf.experience import Experience
from megarlhf.observe.terminal.activity import Part
from megarlhf.resume.claim.config_changes import mathematics_of
from megarlhf.resume.points.point import shown_step
from megarlhf.rollout.conversations import draw_samples
from megarlhf.rollout.in_flight import Requests
from megarlhf.rollout.responses import sample_seed
from megarlhf.rollout.slices import describe_rounds
from megarlhf.rollouts import Rollouts
from megarlhf.trainers.experience.prompts import make_experience, repeat_prompts
from megarlhf.trainers.experience.reward_outputs import RewardOutput
from megarlhf.trainers.experience.rewards import PendingRewards
from megarlhf.trainers.rl.build import RLRun
from megarlhf.trainers.rl.dynamic_sampling import ScoredRollout, select
from megarlhf.trainers.rl.own_sampler import PromptOrder
from megarlhf.trainers.run.session import Session


@dataclass(frozen=True)
class StepRollout:
    """Samples of a step as they were drawn. Their rewards are pending, or known because they chose the samples."""

    prompts: Sequence[PromptSample]
    """One for each group; the samples of a group stand together."""
    experience: Experience
    pending: PendingRewards | None
    rewards: Sequence[RewardOutput] | None = None
    """Outputs of the rewards, where nothing is pending."""
    greedy: PendingRewards | None = None
    """Rewards of one greedy response to each prompt, for an advantage that compares with them."""
    drawn: tuple[Requests, Rollouts] | None = None
    """Everything that the present weights have drawn, where responses are drawn in slices."""
    metrics: Mapping[str, float] = field(default_factory=dict)


def generate(run: RLRun, session: Session, order: PromptOrder, step: int) -> StepRollout:
    """Draw what the weights after `step` steps have to draw, and start the rewards of the step's samples. Collective.

    Raises: StopRun, on every rank, when the run is asked to stop meanwhile.
    """
    begin_samples(run, session, order, step)
    flight = run.in_flight
    requests = flight.requests(step, run.data.prompt_tokens, partial(sample_seed, run.cfg.run.seed))
    samples = [run.data.train[n] for n in requests.numbers] if run.environment else []
    rollouts = draw_requests(run, session, requests, samples, step)
    flight.extend(requests, rollouts)
    taken = flight.take(step)
    prompts = [run.data.train[n] for n in taken.prompts]
    responses = taken.rollouts.to(session.runtime.device)
    experience = make_experience(prompts, responses, run.cfg.rollout.num_samples_per_prompt)
    rollout = complete(run, session, prompts, experience, step)
    if not run.cfg.rollout.is_stale:
        return rollout
    metrics = {**rollout.metrics, "tokens_in_flight": flight.num_tokens}
    return replace(rollout, drawn=(requests, rollouts), metrics=metrics)


def slice_notes(run: RLRun, world_size: int) -> list[str]:
    """Sentence for the start about what a step draws, where responses are drawn in slices."""
    cfg, engine = run.cfg, run.engine
    if not cfg.rollout.is_stale:
        return []
    samples = cfg.prompts_drawn * cfg.rollout.num_samples_per_prompt
    num_engines = 1 if engine.cache_tokens is None else world_size // cfg.rollout.tp(cfg.actor)
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens
    return [describe_rounds(run.in_flight.rule, samples, num_engines, engine.cache_tokens, longest)]


def begin_samples(run: RLRun, session: Session, order: PromptOrder, step: int) -> None:
    """Choose the prompts of steps whose samples the present weights begin, and drop samples of steps that the run no
    longer has."""
    flight, greedy, num_steps = run.in_flight, run.greedy_in_flight, run.cfg.train.num_steps
    late = []
    for begun in flight.rule.steps(step, num_steps):
        if begun not in flight:
            prompts = with_surplus(run, order.take(begun), begun)
            late += [begun] * flight.begin(begun, prompts, run.cfg.rollout.num_samples_per_prompt, step)
        if greedy is not None and begun not in greedy:
            greedy.begin(begun, flight.prompts_of(begun), 1, step)
    if dropped := flight.drop_from(num_steps):
        session.note(f"{dropped:,} tokens of samples after step {num_steps}, where the run ends now, are thrown away")
    if greedy is not None:
        greedy.drop_from(num_steps)
    if late:
        session.note(
            f"step {session.number} begins the samples of steps {shown_step(late[0])} to {shown_step(late[-1])}, which "
            "older weights would have begun if train.num_steps had been as large then"
        )


def with_surplus(run: RLRun, own: Sequence[int], step: int) -> list[int]:
    """Numbers of a step's own prompts, and of those that are drawn beside them for dynamic sampling."""
    surplus, seed = run.cfg.algo.dynamic_sampling.surplus, sample_seed(run.cfg.run.seed, step, -1)
    return [*own, *other_numbers(len(run.data.train), surplus, own, seed)]


def complete(
    run: RLRun, session: Session, prompts: Sequence[PromptSample], experience: Experience, step: int
) -> StepRollout:
    """Start the rewards of the samples, choose among them, and draw further responses that the step needs.
    Collective."""
    rollout = StepRollout(prompts, experience, start_rewards(run, prompts, experience))
    if run.cfg.algo.dynamic_sampling.is_on:
        rollout = draw_until_useful(run, session, rollout, step)
    if "greedy_rewards" in run.cfg.algo.traits.reads:
        rollout = replace(rollout, greedy=draw_baselines(run, session, rollout.prompts, step))
    return rollout


def draw_requests(
    run: RLRun, session: Session, requests: Requests, samples: Sequence[PromptSample], step: int, refill: int = 0
) -> Rollouts:
    """Draw responses, or parts of them; each finished one is kept in the rollout bank. Collective.

    samples: prompt of each request; only read where there is an environment
    refill: number of the round of dynamic sampling; 0 is the step's first
    """
    if not requests.prompts:  # all responses of these steps are finished
        return Rollouts.empty(0)
    phases = run.phases
    fingerprint = session.history.fingerprint(mathematics_of(run.cfg), session.began_with)
    rows, seeds, parts, sampling = requests.prompts, requests.seeds, requests.parts, run.sampling
    with (
        session.stoppable("rollout"),
        run.bank.open(
            step, fingerprint=fingerprint, sampling=sampling, prompts=rows, seeds=seeds, parts=parts, refill=refill
        ) as kept,
        session.activity.counting(
            len(rows),
            "responses",
            lambda: Part(len(kept.held), kept.num_tokens),
            share=1 / session.runtime.world_size,
        ),
    ):
        if kept.num_taken_over:
            held = f"{kept.num_taken_over} of {len(rows)} responses are in the rollout bank"
            session.note(f"step {session.number}: {held}")
        rollouts = draw_samples(
            run.engine,
            run.environment,
            samples,
            requests,
            sampling,
            bank=kept,
            should_stop=session.asked_to_stop,
        )
        if not rollouts.dialogues:  # the whole conversations, earlier slices included, are checked when they are taken
            rollouts.versions.require(step)
        phases.add_local(run.engine.local_seconds)
        drawn = math.nan if kept.num_taken_over else float(rollouts.responses.num_tokens)
        phases.count("rollout_tokens_per_second", drawn)
        phases.count("rollout_idle_fraction", rollouts.idle_seconds)
        return rollouts


def draw(run: RLRun, session: Session, prompts: Sequence[PromptSample], step: int, refill: int) -> Experience:
    """Draw num_samples_per_prompt whole responses to each prompt of a round of dynamic sampling. Collective."""
    requests = whole_requests(run.cfg, prompts, step, refill)
    samples = repeat_prompts(prompts, run.cfg.rollout.num_samples_per_prompt)
    rollouts = draw_requests(run, session, requests, samples, step, refill)
    return make_experience(prompts, rollouts, run.cfg.rollout.num_samples_per_prompt)


def draw_until_useful(run: RLRun, session: Session, first: StepRollout, step: int) -> StepRollout:
    """Dynamic sampling: replace groups without signal by responses to other prompts. Collective."""
    assert first.pending is not None
    cfg = run.cfg.algo.dynamic_sampling
    counts: Counter[str] = Counter()

    def draw_more(refill: int, count: int, used: Sequence[PromptSample]) -> ScoredRollout | None:
        prompts = other_prompts(run.data.train, count, used, sample_seed(run.cfg.run.seed, step, -1, refill))
        if not prompts:
            return None
        experience = draw(run, session, prompts, step, refill)
        return ScoredRollout(prompts, experience, wait(start_rewards(run, prompts, experience)))

    def wait(pending: PendingRewards) -> list[RewardOutput]:
        outputs = wait_for_rewards(pending, session)
        counts.update(run.rewarder.counts(outputs))
        return outputs

    drawn = ScoredRollout(first.prompts, first.experience, wait(first.pending))
    chosen, metrics = select(drawn, draw_more, run.rewarder.rewards, cfg, run.groups_with_signal)
    return StepRollout(chosen.prompts, chosen.experience, None, chosen.rewards, metrics={**metrics, **counts})


def draw_baselines(run: RLRun, session: Session, prompts: Sequence[PromptSample], step: int) -> PendingRewards:
    """Draw the greedy response to each prompt, or its last slice, and start its rewards. Collective."""
    flight = run.greedy_in_flight
    if flight is None:
        rows = [torch.tensor(prompt.tokens) for prompt in prompts]
        rollouts = draw_greedy(run, session, Requests.whole(rows, [0] * len(rows), run.sampling.max_tokens), step)
    else:
        requests = flight.requests(step, run.data.prompt_tokens, lambda step, sample: 0)
        flight.extend(requests, draw_greedy(run, session, requests, step))
        taken = flight.take(step)  # also for prompts that dynamic sampling has not chosen
        place = {run.data.train[number].index: n for n, number in enumerate(taken.prompts)}
        chosen = [place[prompt.index] for prompt in prompts]
        rollouts = Rollouts.joined([(taken.rollouts, chosen)]).to(session.runtime.device)
    return run.rewarder.start(make_experience(prompts, rollouts, 1), prompts)


def draw_greedy(run: RLRun, session: Session, requests: Requests, step: int) -> Rollouts:
    """Draw greedy responses, or parts of them, with the weights that draw the samples. Collective."""
    if not requests.prompts:
        return Rollouts.empty(0)
    greedy = replace(run.sampling, greedy=True)
    with session.stoppable("rollout"):
        rollouts = run.engine.generate(
            requests.prompts, requests.seeds, greedy, parts=requests.parts, should_stop=session.asked_to_stop
        )
        rollouts.versions.require(step)
        run.phases.count("rollout_tokens_per_second", float(rollouts.responses.num_tokens))
        run.phases.count("rollout_idle_fraction", rollouts.idle_seconds)
    return rollouts


def start_rewards(run: RLRun, prompts: Sequence[PromptSample], experience: Experience) -> PendingRewards:
    """Start the rewards of samples, without waiting; `prompts` are one for each group."""
    return run.rewarder.start(experience, repeat_prompts(prompts, run.cfg.rollout.num_samples_per_prompt))


def wait_for_rewards(pending: PendingRewards, session: Session) -> list[RewardOutput]:
    """Wait for the outputs of each reward for samples that were drawn together. Collective."""
    with session.stoppable("reward"), pending.counting(session.activity):
        outputs = pending.wait(session.asked_to_stop)
        pending.rewarder.require_rewards(pending.prompts, outputs)
    return outputs


def other_prompts(
    train: Samples[PromptSample], count: int, used: Sequence[PromptSample], seed: int
) -> list[PromptSample]:
    """Up to `count` prompts that are not in `used`, in an order that depends on `seed` only."""
    is_used = np.isin(record_numbers(train), [prompt.index for prompt in used])
    return [train[n] for n in other_numbers(len(train), count, np.flatnonzero(is_used).tolist(), seed)]


def other_numbers(num_prompts: int, count: int, used: Sequence[int], seed: int) -> list[int]:
    """Numbers of up to `count` of all prompts that are not in `used`, in an order that depends on `seed` only.

    The order of the steps' own prompts is not changed: each of them still comes once per epoch.
    """
    if not count:
        return []
    is_other = np.ones(num_prompts, dtype=bool)
    is_other[list(used)] = False
    others = np.flatnonzero(is_other)
    chosen = random.Random(seed).sample(range(len(others)), min(count, len(others)))
    return [int(others[n]) for n in chosen]


def whole_requests(cfg: RLConfig, prompts: Sequence[PromptSample], step: int, refill: int = 0) -> Requests:
    """Requests for num_samples_per_prompt whole responses to each prompt of a step."""
    repeated = repeat_prompts(prompts, cfg.rollout.num_samples_per_prompt)
    rows = [torch.tensor(prompt.tokens) for prompt in repeated]
    seeds = [sample_seed(cfg.run.seed, step, n, refill) for n in range(len(rows))]
    return Requests.whole(rows, seeds, cfg.rollout.max_response_tokens)
