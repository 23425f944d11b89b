"""A step's samples in the tokens of a reward model that does not read the actor's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.config import MicroBatchConfig, RewardConfig
from megarlhf.data.samples.retokenize import Retokenized, Retokenizer
from megarlhf.data.text.omissions import Kind
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.errors import RewardError
from megarlhf.experience import Experience, Ragged
from megarlhf.models.role import Role
from megarlhf.rollout.rewards.batch import RewardBatch, short


def retokenizer_of(
    reward_model: Role, reward: RewardConfig, micro: MicroBatchConfig, may_drop: tuple[Kind, ...] = ()
) -> Retokenizer:
    """With the reward model's tokenizer, whose chat template may leave out `may_drop` of a conversation. A text is as
    long at most as the model can read, as a packed micro-batch can hold, and as `max_tokens` says."""
    limits = (reward_model.shard.arch.longest_sequence, micro.max_tokens_per_micro_batch, reward.max_tokens)
    return Retokenizer(
        tokenizer=load_tokenizer(reward_model.section.model.tokenizer_place()),
        max_tokens=min(limit for limit in limits if limit is not None),
        cuts=reward.too_long == "cut",
        may_drop=may_drop,
    )


def retokenized(
    name: str, experience: Experience, mine: RewardBatch, retokenizer: Retokenizer
) -> tuple[Experience, Tensor]:
    """The samples for the reward model, without any column, and which were cut, [N] bool on the CPU. Collective.

    Where prompt and response meet is not kept: a score is read at a sample's last token. What the samples of a prompt
    begin with in common stands for their prompt: a text that was cut may begin otherwise than the others.

    mine: this rank's share of the samples

    Raises: RewardError, on every rank, for a text that is too long or that the chat template refuses.
    """
    made: list[Retokenized] = []
    with raise_on_all_ranks(lambda reasons: RewardError(reasons[0])):
        made = [_retokenized(name, mine, row, retokenizer) for row in range(len(mine))]
    parts: list[list[Retokenized]] = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, made)
    every = [sample for part in parts for sample in part]
    rows = [torch.tensor(sample.tokens) for sample in every]
    begins, numbers_N = common_beginnings(rows, experience.prompt_numbers_N)
    responses = Ragged.from_rows([row[begin:] for row, begin in zip(rows, begins, strict=True)], torch.int64)
    rollouts = replace(
        experience.rollouts,
        responses=Ragged(responses.values_T.to(experience.rollouts.responses.values_T.device), responses.lengths_N),
        logprobs=Ragged(torch.zeros(responses.num_tokens), responses.lengths_N),
    )
    made_anew = Experience(
        prompts=tuple(row[:begin] for row, begin in zip(rows, begins, strict=True)),
        groups_N=experience.groups_N,
        rollouts=rollouts,
        given_prompt_numbers_N=numbers_N,
    )
    return made_anew, torch.tensor([sample.truncated for sample in every])


def common_beginnings(rows: Sequence[Tensor], prompt_numbers_N: Tensor) -> tuple[list[int], Tensor]:
    """By row how many tokens the rows of its prompt begin with in common, and the prompt's number. Rows that have none
    in common are prompts of their own, of one token: a prompt has at least one."""
    members: dict[int, list[int]] = {}
    for n, number in enumerate(prompt_numbers_N.tolist()):
        members.setdefault(number, []).append(n)
    begins, numbers_N = [1] * len(rows), prompt_numbers_N.clone()
    for group in members.values():
        shortest = min(len(rows[n]) for n in group)
        same_L = torch.stack([rows[n][:shortest] == rows[group[0]][:shortest] for n in group]).all(0)
        common = int(same_L.cumprod(0).sum())
        for n in group:
            begins[n] = max(common, 1)
            if common == 0:
                numbers_N[n] = int(prompt_numbers_N.max()) + 1 + n
    return begins, numbers_N


def _retokenized(name: str, batch: RewardBatch, row: int, retokenizer: Retokenizer) -> Retokenized:
    prompt, response = batch.prompts[row], batch.responses[row]
    try:
        return retokenizer(
            prompt, batch.messages[row], response, finished=batch.finished[row], fields=batch.fields[row]
        )
    except ValueError as error:
        where = f"sample {batch.samples[row]} (prompt {short(prompt)}, response {short(response)})"
        raise RewardError(f"reward {name!r} on {where}: {error}") from error
