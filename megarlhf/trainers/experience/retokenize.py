"""Samples of a step in the tokens of a reward model whose tokenizer is not the actor's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.columns import Ragged
from megarlhf.config import MicroBatchConfig, RewardConfig
from megarlhf.data.samples.retokenize import Retokenized, Retokenizer
from megarlhf.data.text.omissions import Kind
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.errors import RewardError
from megarlhf.experience import Experience
from megarlhf.models.role import Role
from megarlhf.own_code.failures import short
from megarlhf.rollout.environments.transcript import open_answer
from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollouts import Rollouts, VersionRuns


def retokenizer_of(
    reward_model: Role, reward: RewardConfig, micro: MicroBatchConfig, may_drop: tuple[Kind, ...] = ()
) -> Retokenizer:
    """Retokenizer for the reward model, whose chat template may leave out `may_drop` of a conversation. Texts are
    limited by the model's positions, a packed micro-batch and the reward's `max_tokens`."""
    limits = (reward_model.shard.arch.longest_sequence, micro.max_tokens_per_micro_batch, reward.max_tokens)
    return Retokenizer(
        tokenizer=load_tokenizer(reward_model.section.model.tokenizer_place()),
        max_tokens=min(limit for limit in limits if limit is not None),
        cuts=reward.too_long == "cut",
        may_drop=may_drop,
    )


def retokenized(
    name: str, experience: Experience, batch: RewardBatch, retokenizer: Retokenizer
) -> tuple[Experience, Tensor]:
    """Samples for the reward model without any column, and a mask of those that were cut, [N] bool on the CPU.
    Collective.

    The boundary of prompt and response is lost, and is not needed: a score is read at a sample's last token. The tokens
    with which all samples of a prompt begin take the place of their prompt. A text that was cut may begin differently.

    batch: this rank's share of the samples

    Raises: RewardError, on every rank, for a text that is too long or that the chat template refuses.
    """
    own: list[Retokenized] = []
    with raise_on_all_ranks(lambda reasons: RewardError(reasons[0])):
        own = [_retokenized(name, batch, row, retokenizer) for row in range(len(batch))]
    by_rank: list[list[Retokenized]] = [[]] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    samples = [sample for of_rank in by_rank for sample in of_rank]
    rows = [torch.tensor(sample.tokens) for sample in samples]
    lengths, numbers_N = common_beginnings(rows, experience.prompt_numbers_N)
    responses = Ragged.from_rows([row[length:] for row, length in zip(rows, lengths, strict=True)], torch.int64)
    rollouts = Rollouts(
        responses=Ragged(responses.values_T.to(experience.rollouts.responses.values_T.device), responses.lengths_N),
        logprobs=Ragged(torch.zeros(responses.num_tokens), responses.lengths_N),
        finished_N=experience.rollouts.finished_N,
        versions=VersionRuns.constant(-1, responses.lengths_N),  # no weights drew these tokens
    )
    retokenized_experience = Experience(
        prompts=tuple(row[:length] for row, length in zip(rows, lengths, strict=True)),
        groups_N=experience.groups_N,
        rollouts=rollouts,
        given_prompt_numbers_N=numbers_N,
    )
    return retokenized_experience, torch.tensor([sample.truncated for sample in samples])


def common_beginnings(rows: Sequence[Tensor], prompt_numbers_N: Tensor) -> tuple[list[int], Tensor]:
    """Number of first tokens that a row shares with all rows of its prompt, and the prompt's number, for each row.

    Rows of a prompt that share no token become prompts of their own, of one token: a prompt has at least one.
    """
    members: dict[int, list[int]] = {}
    for n, number in enumerate(prompt_numbers_N.tolist()):
        members.setdefault(number, []).append(n)
    lengths, numbers_N = [1] * len(rows), prompt_numbers_N.clone()
    for group in members.values():
        shortest = min(len(rows[n]) for n in group)
        same_L = torch.stack([rows[n][:shortest] == rows[group[0]][:shortest] for n in group]).all(0)
        common = int(same_L.cumprod(0).sum())
        for n in group:
            lengths[n] = max(common, 1)
            if common == 0:
                numbers_N[n] = int(prompt_numbers_N.max()) + 1 + n
    return lengths, numbers_N


def _retokenized(name: str, batch: RewardBatch, row: int, retokenizer: Retokenizer) -> Retokenized:
    prompt, response = batch.prompts[row], batch.responses[row]
    messages, begun = batch.messages[row], ""
    if messages is not None:
        messages, begun = open_answer(messages)  # an environment's text goes on in the assistant's message
    try:
        return retokenizer(
            prompt,
            messages,
            begun + response,
            finished=batch.finished[row],
            fields=batch.fields[row],
            has_turns=batch.turns is not None,
        )
    except ValueError as error:
        where = f"sample {batch.samples[row]} (prompt {short(prompt)}, response {short(response)})"
        raise RewardError(f"reward {name!r} on {where}: {error}") from error
