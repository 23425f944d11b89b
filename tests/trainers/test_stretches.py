"""Samples of several sampled stretches on their way through micro-batches, and what is computed from their columns.

Not covered: context and pipeline parallelism (tests/distributed/test_environments.py).
"""

import random
from functools import partial

import pytest
import torch

from megarlhf.algo.gae import gae
from megarlhf.columns import Ragged
from megarlhf.experience import Experience
from megarlhf.kernels import packed_gae
from megarlhf.rollout.responses import drawn_by, responses_of, rollouts_of
from megarlhf.rollouts import Dialogue, Rollouts, Stretches, VersionRuns
from megarlhf.trainers.experience.batches import micro_batches, per_token_of
from megarlhf.trainers.experience.plan import StepPlan
from tests.trainers.test_step_plan import PACKED, PADDED, TREES, one_rank, role  # noqa: F401 -- a fixture


def random_rollouts(chance: random.Random, count: int) -> Rollouts:
    """Conversations of up to four turns. Sampled tokens are below 500, observed ones above. Turns may be empty, as
    where a conversation rests, but for the first."""
    lengths, sampled, observed, versions = [], [], [], []
    for _ in range(count):
        row = [chance.randint(1, 3)]
        for _ in range(chance.randint(0, 3)):
            row += [chance.randint(1, 3), chance.randint(0, 2)]
        lengths.append(torch.tensor(row))
        sampled.append(torch.tensor([chance.randrange(500) for _ in range(sum(row[::2]))]))
        observed.append(torch.tensor([500 + chance.randrange(500) for _ in range(sum(row[1::2]))], dtype=torch.int64))
        cut = chance.randint(0, len(sampled[-1]) - 1)
        versions.append([(3, cut), (4, len(sampled[-1]) - cut)] if cut else [(4, len(sampled[-1]))])
    tokens = Ragged.from_rows(sampled, torch.int64)
    return Rollouts(
        responses=tokens,
        logprobs=Ragged(torch.arange(tokens.num_tokens) / 100, tokens.lengths_N),
        finished_N=torch.ones(count, dtype=torch.bool),
        versions=VersionRuns.from_rows(versions),
        stretches=Stretches(Ragged.from_rows(lengths, torch.int64), Ragged.from_rows(observed, torch.int64)),
        dialogues=(Dialogue(observations=([], "a"), rewards=(1.0,)),) * count,
    )


def random_experience(seed: int) -> Experience:
    chance = random.Random(seed)
    rollouts = random_rollouts(chance, 6)
    prompts = [torch.tensor([chance.randrange(500) for _ in range(chance.randint(1, 4))]) for _ in range(3)]
    rows = tuple(prompts[n // 2] for n in range(6))
    values = Ragged(torch.rand(rollouts.responses.num_tokens) + 1, rollouts.responses.lengths_N)
    return Experience(rows, torch.tensor([0, 0, 1, 1, 2, 2]), rollouts, {"values": values})


@pytest.mark.parametrize("micro", [PADDED, PACKED, TREES], ids=["padded", "packed", "trees"])
@pytest.mark.parametrize("seed", range(8))
def test_random_stretches_go_into_rows_and_back(one_rank, micro, seed):  # noqa: F811
    """Sampled tokens and their columns stand together, each behind the token that precedes it in the sequence."""
    experience, actor = random_experience(seed), role()
    micro = micro.model_copy(update={"max_tokens_per_micro_batch": micro.max_tokens_per_micro_batch and 60})
    plan = StepPlan(experience, micro, [[[3, 0, 5], [1, 4, 2]]])
    batches = micro_batches(actor, experience, plan, plan.mini_batches, ["values"])
    grids, before = [], []
    for batch in batches:
        tokens_BS, mask_BS = batch.tokens_BS, batch.columns["response_mask"]
        assert (tokens_BS[mask_BS] < 500).all()
        grids.append(batch.columns["values"])
        before.append(batch.before(tokens_BS).double())
    back = per_token_of(actor, experience, plan, plan.mini_batches, grids)
    assert torch.equal(back.values_T, experience.columns["values"].values_T)
    preceding = per_token_of(actor, experience, plan, plan.mini_batches, before)
    firsts, counts = experience.sampled_stretches
    sequences, spans = experience.sequences.rows(), firsts.split(counts.lengths_N.tolist())
    for sequence, starts, own, found in zip(sequences, spans, counts.rows(), preceding.rows(), strict=True):
        places = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, own, strict=True)])
        assert torch.equal(sequence[places - 1].double(), found), "the value before a turn is read at what was observed"


@pytest.mark.parametrize("seed", range(20))
def test_weaving_is_undone(seed):
    rollouts = random_rollouts(random.Random(seed), 5)
    positions = rollouts.stretches.positions_T.split(rollouts.responses.lengths_N.tolist())
    for written, sampled, observed, places in zip(
        rollouts.written.rows(), rollouts.responses.rows(), rollouts.stretches.observed.rows(), positions, strict=True
    ):
        assert torch.equal(written[places], sampled)
        left = torch.ones(len(written), dtype=torch.bool)
        left[places] = False
        assert torch.equal(written[left], observed)
    again = rollouts_of(responses_of(rollouts))
    assert responses_of(again) == responses_of(rollouts)
    assert responses_of(Rollouts.from_state_dict(rollouts.state_dict())) == responses_of(rollouts)
    for response in responses_of(rollouts):
        before, rest = drawn_by(4, response)
        assert before + rest.written == response.written
        assert rest.tokens == response.tokens[len(response.tokens) - response.versions[-1][1] :]
        assert sum(rest.stretches[::2]) == len(rest.tokens)


@pytest.mark.parametrize("seed", range(10))
def test_gae_is_that_of_a_loop_that_skips_observations(seed):
    """fp64. Observed tokens discount nothing, and the value after a turn is that before the next one."""
    chance = random.Random(seed)
    rollouts, gamma, lam = random_rollouts(chance, 5), 0.9, 0.8
    count, lengths_N = rollouts.responses.num_tokens, rollouts.responses.lengths_N
    generator = torch.Generator().manual_seed(seed)
    rewards_T, values_T = (torch.rand(count, generator=generator, dtype=torch.float64) for _ in range(2))
    columns = Ragged(rewards_T, lengths_N).cu_seqlens
    expected = []
    rows = zip(
        rollouts.stretches.lengths.rows(),
        rewards_T.split(lengths_N.tolist()),
        values_T.split(lengths_N.tolist()),
        strict=True,
    )
    for lengths, rewards, values in rows:
        is_sampled = [place % 2 == 0 for place, length in enumerate(lengths.tolist()) for _ in range(length)]
        number, advantages = len(rewards), []
        advantage = next_value = torch.zeros((), dtype=torch.float64)
        for sampled in reversed(is_sampled):
            if not sampled:
                continue
            number -= 1
            advantage = rewards[number] + gamma * next_value - values[number] + gamma * lam * advantage
            next_value = values[number]
            advantages.append(advantage)
        expected += advantages[::-1]
    packed = partial(packed_gae, rewards_T, None, values_T, torch.zeros(5, dtype=torch.float64), columns, kl_coef=0.0)
    for advantages_T, _ in (
        gae(rewards_T, values_T, columns, gamma=gamma, lam=lam),
        packed(gamma=gamma, lam=lam, token_rewards_T=rewards_T),
    ):
        torch.testing.assert_close(advantages_T, torch.stack(expected), rtol=0, atol=1e-12)
