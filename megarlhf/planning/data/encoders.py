"""Encoders of a configuration: for tokenization in a run, and for checks before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import (
    DPOConfig,
    EvaluateConfig,
    GenerateConfig,
    PromptDataConfig,
    RewardConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    SourceConfig,
)
from megarlhf.config.environment import EnvironmentConfig
from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder, writing_options
from megarlhf.data.samples.megatron_indexed import IndexedOptions, learnt_whole
from megarlhf.data.samples.texts import Text, TextEncoder
from megarlhf.planning.machine.capabilities import AnyConfig
from megarlhf.rollout.rewards.rules import RuleFields
from megarlhf.rollout.tools.described import tool_descriptions

RecordEncoder = SFTEncoder | PairEncoder | PromptEncoder
AnyEncoder = RecordEncoder | TextEncoder


def sets_of(cfg: AnyConfig) -> list[tuple[str, tuple[SourceConfig, ...], AnyEncoder]]:
    """All sets of records by key, each with its encoder. Raises: as `encoder_of`."""
    encoders = encoders_of(cfg)
    sets = [(key, sources, encoder) for key, sources in cfg.data.sources().items() for encoder in encoders]
    if isinstance(cfg, RLConfig) and cfg.ptx is not None:
        sets.append(("ptx.data", cfg.ptx.data, text_encoder(cfg)))
    return sets


def encoders_of(cfg: AnyConfig) -> list[AnyEncoder]:
    """All encoders of the configuration: `eval` may have several. Raises: as `encoder_of`."""
    if not isinstance(cfg, EvaluateConfig):
        return [encoder_of(cfg)]
    limits: dict[str, Any] = {"max_prompt_tokens": cfg.data.max_prompt_tokens, **writing_options(cfg.data)}
    limits["max_response_tokens"] = cfg.data.max_response_tokens
    made: list[AnyEncoder] = []
    for task in cfg.tasks():
        role = cfg.reward_model if task == "pairs" else cfg.actor
        assert role is not None, "checked with the configuration"
        tokenizer = role.model.tokenizer_place()
        if task == "pairs":
            made.append(PairEncoder(tokenizer=tokenizer, **limits))
        elif task != "perplexity":
            made.append(prompt_encoder(cfg.data, tokenizer, cfg.rewards, cfg.environment))
        else:
            response = cfg.eval.perplexity_of == "response"
            of_response = SFTEncoder(tokenizer=tokenizer, loss_on=cfg.data.loss_on, **limits)
            made.append(of_response if response else text_encoder(cfg))
    return made


def encoder_of(cfg: AnyConfig) -> RecordEncoder:
    """The encoder of a command with a single one. Raises: ValueError for a missing tokenizer or template."""
    if isinstance(cfg, SFTConfig | RMConfig | DPOConfig):
        role = cfg.reward_model if isinstance(cfg, RMConfig) else cfg.actor
        options: dict[str, Any] = {
            "tokenizer": role.model.tokenizer_place(),
            "max_prompt_tokens": cfg.data.max_prompt_tokens,
            "max_response_tokens": cfg.data.max_response_tokens,
            **writing_options(cfg.data),
        }
        if isinstance(cfg, SFTConfig):
            return SFTEncoder(loss_on=cfg.data.loss_on, **options)
        return PairEncoder(with_margin=isinstance(cfg, RMConfig) and cfg.margin, **options)
    assert isinstance(cfg, RLConfig | GenerateConfig), "eval has several: encoders_of"
    return prompt_encoder(cfg.data, cfg.actor.model.tokenizer_place(), cfg.rewards, cfg.environment)


def text_encoder(cfg: EvaluateConfig | RLConfig) -> TextEncoder:
    """The encoder of plain texts, for the perplexity of `eval` or the pretraining mix of `rl`."""
    if isinstance(cfg, RLConfig):
        return TextEncoder(tokenizer=cfg.actor.model.tokenizer_place(), longest=cfg.ptx_max_tokens)
    assert cfg.actor is not None, "checked with the configuration"
    longest = cfg.data.max_prompt_tokens + cfg.data.max_response_tokens
    return TextEncoder(tokenizer=cfg.actor.model.tokenizer_place(), longest=longest, end=False)


def prompt_encoder(
    data: PromptDataConfig,
    tokenizer: Path,
    rewards: Sequence[RewardConfig] = (),
    environment: EnvironmentConfig | None = None,
) -> PromptEncoder:
    """The encoder of prompts, which checks the columns that the rewards' rules need and writes the tools of the
    environment. Raises: ValueError for tools that cannot be described."""
    rules = tuple(reward.rule for reward in rewards if reward.rule is not None)
    return PromptEncoder(
        tokenizer=tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        check_fields=RuleFields(rules),
        tools=tool_descriptions(environment),
        **writing_options(data),
    )


def indexed_options(cfg: SFTConfig | RLConfig) -> IndexedOptions[Any]:
    """Options for Megatron's indexed data: the data of `sft`, or of `ptx` in `rl`."""
    vocab_size = architecture_from_hf(cfg.actor.model.hf_directory()).vocab_size
    if isinstance(cfg, SFTConfig):
        return IndexedOptions(cfg.data.indexed_length, cfg.run.seed, learnt_whole, vocab_size)
    return IndexedOptions(cfg.ptx_max_tokens - 1, cfg.run.seed, Text, vocab_size)
