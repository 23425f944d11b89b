"""Scoring of rollouts: rewards, log-probs of both policies, and values.

Legend: B rows, S positions, N samples of the step.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarlhf.algo.length_shaping import missing_end_penalty, overlong_penalty
from megarlhf.columns import Ragged
from megarlhf.config import ROLES, RLConfig
from megarlhf.experience import Experience
from megarlhf.kernels import packed_sums
from megarlhf.models.role import Role
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.vocab import batch_logprobs
from megarlhf.rollout.in_flight import Requests
from megarlhf.rollout.responses import drawn_by, responses_of, rollouts_of, sample_seed
from megarlhf.rollouts import Rollouts
from megarlhf.trainers.experience.batches import forward_per_token
from megarlhf.trainers.experience.plan import StepPlan
from megarlhf.trainers.experience.prompts import repeat_prompts
from megarlhf.trainers.experience.rewards import CombinedRewards, PendingRewards
from megarlhf.trainers.rl.advantages import TOKEN_REWARDS
from megarlhf.trainers.rl.build import RLRun
from megarlhf.trainers.rl.logprob_gap import logprob_gap
from megarlhf.trainers.rl.rollout import StepRollout, wait_for_rewards
from megarlhf.trainers.rl.update import plan_step
from megarlhf.trainers.run.session import Session

_PROBE = -1_000_000
"""Number by which the seed of the probe's choice differs from those of samples and passes."""


def score(
    run: RLRun, session: Session, rollout: StepRollout, step: int
) -> tuple[Experience, StepPlan, dict[str, float]]:
    """Add rewards, old and reference log-probs, and values; returns the step's plan and metrics of the rewards too.

    Rewards are waited for last, since functions and servers compute them while the roles compute.
    """
    cfg, per_prompt = run.cfg, run.cfg.rollout.num_samples_per_prompt
    records = torch.tensor([prompt.index for prompt in rollout.prompts])  # read by the tables of samples
    experience = rollout.experience.with_per_sample({"records": records.repeat_interleave(per_prompt)})
    plan = plan_step(experience, cfg.train, cfg.run.seed, step)
    gap = {} if rollout.drawn is None else probe_gap(run, session, *rollout.drawn, step)
    experience = add_logprobs_and_values(run, session, experience, plan, step)
    outputs = rollout.rewards
    if outputs is None:
        assert rollout.pending is not None
        outputs = wait_for_rewards(rollout.pending, session)
    rewards = run.rewarder.combined(experience, repeat_prompts(rollout.prompts, per_prompt), outputs)
    if rollout.greedy is not None:
        greedy_N = greedy_rewards(cfg, session, rollout.greedy).repeat_interleave(per_prompt)
        experience = experience.with_per_sample({"greedy_rewards": greedy_N})
    return with_rewards(experience, rewards, cfg, step), plan, {**rewards.metrics, **rollout.metrics, **gap}


def with_rewards(experience: Experience, rewarded: CombinedRewards, cfg: RLConfig, step: int) -> Experience:
    """Add the rewards as columns, with the penalties for length and missing end.

    Samples without a reward are left out of the losses and of their group. Samples that are masked, or have no
    baseline, are left out of the losses only.
    """
    rewards_N, token_rewards, kept_N = rewarded.rewards_N, rewarded.token_rewards, rewarded.kept_N
    if cfg.algo.shuffle_rewards:
        rewards_N, token_rewards = rewarded.totals_N, None
    rewards_N = rewards_N + shaping_of(experience, cfg).to(rewards_N)
    if cfg.algo.shuffle_rewards:
        generator = torch.Generator().manual_seed(sample_seed(cfg.run.seed, step, -1))
        order_N = torch.randperm(len(rewards_N), generator=generator).to(rewards_N.device)
        rewards_N, kept_N = rewards_N[order_N], kept_N[order_N]
    trained_N = kept_N
    if cfg.algo.overlong.mask:
        trained_N = kept_N & experience.rollouts.finished_N.to(kept_N.device)
    if (greedy_N := experience.per_sample.get("greedy_rewards")) is not None:
        trained_N = trained_N & ~greedy_N.isnan()
        experience = experience.with_per_sample({"greedy_rewards": greedy_N.nan_to_num(0.0)})
    columns = {"rewards": rewards_N, **rewarded.per_sample}
    if token_rewards is not None:
        columns[TOKEN_REWARDS] = packed_sums(token_rewards.values_T, token_rewards.cu_seqlens)
        experience = experience.with_columns({"token_rewards": experience.held(token_rewards)})
    if bool(trained_N.all()):
        return experience.with_per_sample(columns)
    groups_N, prompt_numbers_N = experience.groups_N.clone(), experience.prompt_numbers_N
    left_out = (~kept_N.cpu()).nonzero().flatten()
    groups_N[left_out] = int(groups_N.max()) + 1 + torch.arange(len(left_out))
    experience = replace(experience, groups_N=groups_N, given_prompt_numbers_N=prompt_numbers_N)
    return experience.with_per_sample({**columns, "trained": trained_N, "rewarded": kept_N})


def shaping_of(experience: Experience, cfg: RLConfig) -> Tensor:
    """Penalties for the length and the missing end of each response, [N] on the CPU; they are added to the rewards."""
    overlong, longest = cfg.algo.overlong, cfg.rollout.max_response_tokens
    shaping_N = missing_end_penalty(experience.rollouts.finished_N, penalty=cfg.algo.missing_end_penalty)
    if overlong.buffer_tokens is not None:
        lengths_N = experience.rollouts.positions_N  # of a conversation: with all that was observed
        shaping_N = shaping_N + overlong_penalty(
            lengths_N, longest=longest, buffer=overlong.buffer_tokens, penalty=overlong.penalty
        )
    return shaping_N


def add_logprobs_and_values(
    run: RLRun, session: Session, experience: Experience, plan: StepPlan, step: int
) -> Experience:
    """Add the column of each role that has one: old and reference log-probs, values.

    They are computed in the micro-batches of the first training pass, so that its first ratio is 1, and moved to the
    ranks that will train on them. A frozen role may take all samples together: a prompt whose samples are in several
    mini-batches is then computed once.
    """
    experience = replace(experience, holding=plan.sharding(run.trained))
    columns: dict[str, Ragged] = {}
    for name, role in run.roles.items():
        column = ROLES[name].column
        if column is None or (role is run.actor and run.cfg.old_logprobs_in_training(step)):
            continue
        together = name not in run.step_guards and plan.shares_prompts(role)
        mini_batches = [range(experience.num_samples)] if together else plan.mini_batches
        with session.stoppable(f"score/{name}"):
            if ROLES[name].head == "lm":
                temperature = run.cfg.rollout.temperature
                columns[column] = policy_logprobs(role, experience, plan, mini_batches, temperature=temperature)
            else:
                columns[column] = values_of(role, experience, plan, mini_batches)
    return experience.with_columns(columns)


def probe_gap(run: RLRun, session: Session, requests: Requests, drawn: Rollouts, step: int) -> dict[str, float]:
    """Gap between rollout and trainer in a few responses of each slice that the present weights have drawn. Collective.

    The tokens of earlier slices count as part of the prompt. Returns nothing where nothing was drawn.
    """
    cfg, by_step = run.cfg, defaultdict[int, list[int]](list)
    for row, (of_step, _) in enumerate(requests.origins):
        by_step[of_step].append(row)
    chosen: list[int] = []
    for of_step, rows in by_step.items():
        generator = random.Random(sample_seed(cfg.run.seed, step, _PROBE, of_step))
        chosen += sorted(generator.sample(rows, min(cfg.rollout.gap_probe_samples, len(rows))))
    if not chosen:
        return {}
    rollouts, prompts = Rollouts.joined([(drawn, chosen)]), [requests.prompts[row] for row in chosen]
    if rollouts.dialogues:  # whole conversations, with what earlier weights have drawn
        rollouts, prompts = drawn_now(rollouts, [run.data.prompt_tokens(requests.numbers[row]) for row in chosen], step)
    probed = Experience(prompts=tuple(prompts), groups_N=torch.arange(len(prompts)), rollouts=rollouts)
    if not prompts:
        return {}
    plan = StepPlan.whole(probed, cfg.train)
    with session.stoppable("score/actor"):
        temperature = cfg.rollout.temperature
        logprobs = policy_logprobs(run.actor, probed, plan, plan.mini_batches, temperature=temperature)
    return logprob_gap(probed.with_columns({"old_logprobs": logprobs}))


def drawn_now(rollouts: Rollouts, prompts: Sequence[Tensor], version: int) -> tuple[Rollouts, list[Tensor]]:
    """Conversations from the first token on that a version drew, and all tokens before it. Those of which it drew
    nothing are left out."""
    kept, before = [], []
    for response, prompt, opening in zip(responses_of(rollouts), prompts, rollouts.openings, strict=True):
        written, rest = drawn_by(version, response)
        if rest.tokens:
            kept.append(rest)
            before.append(torch.cat([prompt if opening is None else opening, torch.tensor(written, dtype=torch.int64)]))
    return rollouts_of(kept).to(rollouts.responses.values_T.device), before


def greedy_rewards(cfg: RLConfig, session: Session, greedy: PendingRewards) -> Tensor:
    """Rewards of the greedy response to each prompt, with its penalties: [prompts], NaN without a reward."""
    with session.stoppable("reward"):
        rewards = greedy.finish(session.asked_to_stop, learn=False)
    totals_N = rewards.totals_N + shaping_of(greedy.experience, cfg).to(rewards.rewards_N)
    return totals_N.masked_fill(~rewards.kept_N, torch.nan)


def policy_logprobs(
    role: Role,
    experience: Experience,
    plan: StepPlan,
    mini_batches: Sequence[Sequence[int]],
    *,
    temperature: float,
) -> Ragged:
    """Log-probs of the sampled tokens under actor or reference, at the sampling temperature."""
    vocabulary = role.shard.vocabulary()

    def score(hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
        mask_BS = batch.columns["response_mask"]
        return batch_logprobs(vocabulary, hidden_SBH, batch, mask_BS, temperature=temperature, return_entropy=False)[0]

    return forward_per_token(role, experience, plan, mini_batches, score)


def values_of(critic: Role, experience: Experience, plan: StepPlan, mini_batches: Sequence[Sequence[int]]) -> Ragged:
    """The critic's value of the state before each sampled token."""

    def score(values_BS1: Tensor, batch: MicroBatch) -> Tensor:
        return batch.before(values_BS1[..., 0])

    return forward_per_token(critic, experience, plan, mini_batches, score)
