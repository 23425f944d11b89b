"""Prompts of a run with generation, and the table of experience that begins with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megarlhf.config import PromptDataConfig, RewardConfig, describe_sources
from megarlhf.config.environment import EnvironmentConfig
from megarlhf.data.sample_types import PromptSample
from megarlhf.data.samples.dataset import Samples, by_record
from megarlhf.data.tokenize.load import SetLoader
from megarlhf.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megarlhf.experience import Experience
from megarlhf.planning.data.encoders import prompt_encoder
from megarlhf.rollout.rewards.accuracy import find_accuracy
from megarlhf.rollout.rewards.rules import field_check
from megarlhf.rollout.tools.described import require_same_on_all_ranks
from megarlhf.rollouts import Rollouts


@dataclass(frozen=True)
class PromptData:
    """Training and held-out prompts, on every rank."""

    train: Samples[PromptSample]
    validation: Sequence[PromptSample]
    tokenizer: Tokenizer
    notes: list[str]
    """Sentences about records that were skipped."""
    test: Sequence[PromptSample] = ()
    """Prompts of `data.test`, on which only metrics are computed."""

    def prompt_tokens(self, number: int) -> Tensor:
        """Tokens of a training prompt by its position in `train`."""
        return torch.tensor(self.train[number].tokens)

    @cached_property
    def prompt_of(self) -> Callable[[int], PromptSample]:
        """Function from the number of a record to its training prompt."""
        return by_record(self.train)


def load_prompts(
    data: PromptDataConfig,
    tokenizer_place: Path,
    rewards: Sequence[RewardConfig] = (),
    max_validation: int | None = None,
    accuracy: str | None = None,
    run_dir: Path | None = None,
    environment: EnvironmentConfig | None = None,
) -> PromptData:
    """Read and tokenize the prompts. Collective.

    environment: its tools are described in every prompt
    run_dir: where `data.cache: none` keeps them

    Raises: ValueError for a record without a field that the rules of `rewards` need, or a held-out record without one
    that `eval.accuracy` needs.
    """
    encoder = prompt_encoder(data, tokenizer_place, rewards, environment)
    if encoder.tools:
        require_same_on_all_ranks(encoder.tools)
    loader = SetLoader(data, encoder, PromptSample, run_dir=run_dir)
    tokenizer = load_tokenizer(tokenizer_place)
    train, validation, notes = loader.train_and_validation("rl")
    validation = validation[:max_validation]
    require_fields_of_accuracy(accuracy, rewards, validation, describe_sources(data.validation or data.train))
    test: Sequence[PromptSample] = ()
    if data.test is not None:
        test, test_notes = loader.test(train)
        notes += test_notes
        require_fields_of_accuracy(accuracy, rewards, test, describe_sources(data.test))
    return PromptData(train, validation, tokenizer, notes, test)


def require_fields_of_accuracy(
    accuracy: str | None, rewards: Sequence[RewardConfig], validation: Sequence[PromptSample], source: str
) -> None:
    """Raises: ValueError for a held-out record that the rule named by `eval.accuracy` cannot judge."""
    judge = find_accuracy(accuracy, rewards).judge
    if judge is None or judge.rule is None:
        return
    check = field_check(judge.rule)
    for prompt in validation:
        try:
            check(prompt.fields)
        except ValueError as error:
            raise ValueError(f"eval.accuracy, {source}, record {prompt.index + 1}: {error}") from error


def make_experience(prompts: Sequence[PromptSample], rollouts: Rollouts, num_samples_per_prompt: int) -> Experience:
    """Table of experience without columns: sample n answers prompt n // num_samples_per_prompt."""
    repeated = repeat_prompts(prompts, num_samples_per_prompt)
    groups_N = torch.arange(len(prompts)).repeat_interleave(num_samples_per_prompt)
    given = rollouts.openings
    rows = [
        torch.tensor(prompt.tokens) if opening is None else opening
        for prompt, opening in zip(repeated, given, strict=True)
    ]
    experience = Experience(prompts=tuple(rows), groups_N=groups_N, rollouts=rollouts)
    if all(opening is None for opening in given):
        return experience
    # Environments may have extended the prompt of each sample in a group in another way.
    numbers: dict[tuple[int, bytes], int] = {}
    keys = [(group, row.numpy().tobytes()) for group, row in zip(groups_N.tolist(), rows, strict=True)]
    prompt_numbers_N = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
    return replace(experience, given_prompt_numbers_N=prompt_numbers_N)


def repeat_prompts(prompts: Sequence[PromptSample], times: int) -> list[PromptSample]:
    """List with each prompt once for each of its samples."""
    return [prompt for prompt in prompts for _ in range(times)]
