"""A step's samples in the tokens of a reward model that does not read the actor's."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.config import MicroBatchConfig, RewardConfig
from megarlhf.data.retokenize import Retokenized, Retokenizer
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.errors import RewardError
from megarlhf.experience import Experience, Ragged
from megarlhf.models.role import Role
from megarlhf.rollout.rewards.batch import RewardBatch, short


def retokenizer_of(reward_model: Role, reward: RewardConfig, micro: MicroBatchConfig) -> Retokenizer:
    """With the reward model's tokenizer. A text is as long at most as the model can read, as a packed micro-batch can
    hold, and as `max_tokens` says."""
    limits = (reward_model.shard.arch.longest_sequence, micro.max_tokens_per_micro_batch, reward.max_tokens)
    return Retokenizer(
        tokenizer=load_tokenizer(reward_model.section.model.tokenizer_place()),
        max_tokens=min(limit for limit in limits if limit is not None),
        cuts=reward.too_long == "cut",
    )


def retokenized(
    name: str, experience: Experience, mine: RewardBatch, retokenizer: Retokenizer
) -> tuple[Experience, Tensor]:
    """The samples for the reward model, without any column, and which were cut, [N] bool on the CPU. Collective.

    Where prompt and response meet is not kept: a score is read at a sample's last token.

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
    # A prompt has at least one token: the first one stands for it.
    responses = Ragged.from_rows([row[1:] for row in rows], torch.int64)
    rollouts = replace(
        experience.rollouts,
        responses=Ragged(responses.values_T.to(experience.rollouts.responses.values_T.device), responses.lengths_N),
        logprobs=Ragged(torch.zeros(responses.num_tokens), responses.lengths_N),
    )
    prompts = tuple(row[:1] for row in rows)
    return Experience(prompts, experience.groups_N, rollouts), torch.tensor([sample.truncated for sample in every])


def _retokenized(name: str, batch: RewardBatch, row: int, retokenizer: Retokenizer) -> Retokenized:
    prompt, response = batch.prompts[row], batch.responses[row]
    try:
        return retokenizer(
            prompt, batch.messages[row], response, finished=batch.finished[row], fields=batch.fields[row]
        )
    except ValueError as error:
        where = f"sample {batch.samples[row]} (prompt {short(prompt)}, response {short(response)})"
        raise RewardError(f"reward {name!r} on {where}: {error}") from error
