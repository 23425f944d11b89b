"""Rollouts become experience: rewards, selection of samples, then log-probs of both policies, and values.

Legend: B rows, S positions, N samples of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megarlhf.algo.length_shaping import missing_end_penalty, overlong_penalty
from megarlhf.config import MicroBatchConfig, RLConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.experience import Experience, Ragged
from megarlhf.kernels import packed_sums
from megarlhf.models.role import Role
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.vocab import batch_logprobs
from megarlhf.rollout.engine import sample_seed
from megarlhf.trainers.experience.batches import forward_per_token, holding_of
from megarlhf.trainers.experience.prompts import make_experience
from megarlhf.trainers.experience.rewards import CombinedRewards, PendingRewards, RewardOutput
from megarlhf.trainers.rl.advantages import ADVANTAGES, TOKEN_REWARDS
from megarlhf.trainers.rl.build import Components
from megarlhf.trainers.rl.dynamic_sampling import ScoredRollout, select
from megarlhf.trainers.rl.rollout import Drawing
from megarlhf.trainers.rl.update import mini_batches_of_pass
from megarlhf.trainers.run.session import Session


def score(
    drawing: Drawing, experience: Experience, prompts: Sequence[PromptSample]
) -> tuple[Experience, dict[str, float]]:
    """With rewards, old and reference log-probs, and values; and what the rewards were like.

    Rewards begin first and are waited for last: functions and servers work while the roles compute. Where samples are
    chosen by their rewards, these are waited for before the roles compute.
    """
    cfg, components, session, step = drawing.cfg, drawing.components, drawing.session, drawing.step
    rewarder, per_prompt = components.rewarder, cfg.rollout.num_samples_per_prompt
    found: dict[str, float] = {}
    under_way = rewarder.start(experience, repeated(prompts, per_prompt))
    said: Sequence[RewardOutput] | None = None
    if cfg.algo.dynamic_sampling.max_refills:
        counts: Counter[str] = Counter()
        first = ScoredRollout(prompts, experience, wait_for_rewards(under_way, session, counts))
        chosen, found = select(first, partial(drawn_more, drawing, counts), rewarder.rewards, cfg.algo.dynamic_sampling)
        prompts, experience, said = chosen.prompts, chosen.experience, chosen.said
        found |= counts
    experience = experience.with_per_sample({"records": records_of(prompts).repeat_interleave(per_prompt)})
    experience = add_logprobs_and_values(cfg, components, experience, step, session)
    if said is None:
        said = wait_for_rewards(under_way, session)
    rewarded = rewarder.combined(experience, repeated(prompts, per_prompt), said)
    if "greedy_rewards" in ADVANTAGES[cfg.algo.advantage].reads:
        greedy_N = greedy_rewards(cfg, components, prompts, session).repeat_interleave(per_prompt)
        experience = experience.with_per_sample({"greedy_rewards": greedy_N})
    return with_rewards(experience, rewarded, cfg, step), {**rewarded.metrics, **found}


def records_of(prompts: Sequence[PromptSample]) -> Tensor:
    """[prompts] on the CPU: which records of the data they are, for whoever shows the samples later."""
    return torch.tensor([prompt.index for prompt in prompts])


def repeated(prompts: Sequence[PromptSample], times: int) -> list[PromptSample]:
    """Each prompt once for each of its samples."""
    return [prompt for prompt in prompts for _ in range(times)]


def wait_for_rewards(
    under_way: PendingRewards, session: Session, counts: Counter[str] | None = None
) -> list[RewardOutput]:
    """What each reward said of all samples that were drawn together; what was missing is added to the counts."""
    with session.stoppable("reward"):
        said = under_way.said(session.asked_to_stop)
        under_way.rewarder.require_rewards(under_way.prompts, said)
    if counts is not None:
        counts.update(under_way.rewarder.counts(said))
    return said


def drawn_more(
    drawing: Drawing, counts: Counter[str], refill: int, count: int, used: Sequence[PromptSample]
) -> ScoredRollout | None:
    """A further round of dynamic sampling: responses to other prompts, with what the rewards say of them."""
    prompts = drawing.other_prompts(count, used, refill)
    if not prompts:
        return None
    experience, session = drawing.responses_to(prompts, refill), drawing.session
    under_way = drawing.components.rewarder.start(
        experience, repeated(prompts, drawing.cfg.rollout.num_samples_per_prompt)
    )
    return ScoredRollout(prompts, experience, wait_for_rewards(under_way, session, counts))


def with_rewards(experience: Experience, rewarded: CombinedRewards, cfg: RLConfig, step: int) -> Experience:
    """The rewards as columns, with what the length of a response adds. Samples without a reward are left out of the
    losses, and are no group's; those that are only masked, or have no baseline, stay in their group."""
    rewards_N, of_tokens, kept_N = rewarded.rewards_N, rewarded.token_rewards, rewarded.kept_N
    if cfg.algo.shuffle_rewards:
        rewards_N, of_tokens = rewarded.totals_N, None
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
    if of_tokens is not None:
        sums_N = packed_sums(of_tokens.values_T, of_tokens.cu_seqlens)
        experience = experience.with_columns({"token_rewards": experience.held(of_tokens)})
        experience = experience.with_per_sample({TOKEN_REWARDS: sums_N})
    if bool(trained_N.all()):
        return experience.with_per_sample(columns)
    groups_N, prompt_numbers_N = experience.groups_N.clone(), experience.prompt_numbers_N
    lost = (~kept_N.cpu()).nonzero().flatten()
    groups_N[lost] = int(groups_N.max()) + 1 + torch.arange(len(lost))
    experience = replace(experience, groups_N=groups_N, given_prompt_numbers_N=prompt_numbers_N)
    return experience.with_per_sample({**columns, "trained": trained_N, "rewarded": kept_N})


def shaping_of(experience: Experience, cfg: RLConfig) -> Tensor:
    """[N] on the CPU: what is added to the rewards for a response's length, and for its missing end."""
    overlong, longest = cfg.algo.overlong, cfg.rollout.max_response_tokens
    shaping_N = missing_end_penalty(experience.rollouts.finished_N, penalty=cfg.algo.missing_end_penalty)
    if overlong.buffer_tokens is not None:
        lengths_N = experience.response_lengths_N
        shaping_N = shaping_N + overlong_penalty(
            lengths_N, longest=longest, buffer=overlong.buffer_tokens, penalty=overlong.penalty
        )
    return shaping_N


def add_logprobs_and_values(
    cfg: RLConfig, components: Components, experience: Experience, step: int, session: Session
) -> Experience:
    """Old and reference log-probs, and values where there is a critic; nothing where nobody reads it. Each sample's are
    with the ranks that will train on it.

    On the micro-batches that the first pass will train on, so that its first ratio is 1. The reference, which is not
    trained, takes all samples together: a prompt is computed once also where its samples are in several mini-batches.
    """
    micro, temperature = cfg.train, cfg.rollout.temperature
    passes = [mini_batches_of_pass(cfg, experience, step, number) for number in range(cfg.train.epochs_per_step)]
    mini_batches = passes[0]
    experience = replace(experience, holding=holding_of(components.trained, experience, passes, micro))
    columns: dict[str, Ragged] = {}
    actor = None if cfg.old_logprobs_in_training(step) else components.actor
    for name, role in (("old_logprobs", actor), ("ref_logprobs", components.reference)):
        if role is None:
            continue
        together = role is components.reference and role.batching(micro).shares
        batches = [range(experience.num_samples)] if together else mini_batches
        with session.stoppable(f"score/{role.name}"):
            columns[name] = policy_logprobs(role, experience, batches, micro, temperature=temperature)
    if components.critic is not None:
        with session.stoppable("score/critic"):
            columns["values"] = values_of(components.critic, experience, mini_batches, micro)
    return experience.with_columns(columns)


def greedy_rewards(cfg: RLConfig, components: Components, prompts: Sequence[PromptSample], session: Session) -> Tensor:
    """What the greedy response to each prompt earns, by the same weights as the step's samples and with the same
    penalties for its length: [prompts], NaN where it has no reward."""
    rows = [torch.tensor(prompt.tokens) for prompt in prompts]
    greedy = replace(components.sampling, greedy=True)
    with session.stoppable("rollout"):
        rollouts = components.engine.generate(rows, [0] * len(rows), greedy, should_stop=session.asked_to_stop)
        components.phases.count("rollout_tokens_per_second", float(rollouts.responses.num_tokens))
        components.phases.count("rollout_idle_fraction", rollouts.idle_seconds)
    with session.stoppable("reward"):
        experience = make_experience(prompts, rollouts, 1)
        rewarded = components.rewarder.start(experience, prompts).finish(session.asked_to_stop, learn=False)
    totals_N = rewarded.totals_N + shaping_of(experience, cfg).to(rewarded.rewards_N)
    return totals_N.masked_fill(~rewarded.kept_N, torch.nan)


def policy_logprobs(
    role: Role,
    experience: Experience,
    mini_batches: Sequence[Sequence[int]],
    micro: MicroBatchConfig,
    *,
    temperature: float,
) -> Ragged:
    """Log-probs of the sampled tokens under actor or reference, at the sampling temperature."""

    vocabulary = role.shard.vocabulary()

    def score(hidden_SBH: Tensor, batch: MicroBatch) -> Tensor:
        mask_BS = batch.columns["response_mask"]
        return batch_logprobs(vocabulary, hidden_SBH, batch, mask_BS, temperature=temperature, return_entropy=False)[0]

    return forward_per_token(role, experience, mini_batches, micro, score)


def values_of(
    critic: Role, experience: Experience, mini_batches: Sequence[Sequence[int]], micro: MicroBatchConfig
) -> Ragged:
    """The critic's value of the state before each response token."""
    return forward_per_token(
        critic, experience, mini_batches, micro, lambda values_BS1, batch: batch.before(values_BS1[..., 0])
    )
