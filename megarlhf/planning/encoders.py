"""How the records of a configuration become samples: what is tokenized in a run, and what a check before it tries."""

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
)
from megarlhf.data.megatron_indexed import IndexedOptions, learnt_whole
from megarlhf.data.samples import PairEncoder, PromptEncoder, SFTEncoder, writing_options
from megarlhf.data.texts import Text
from megarlhf.planning.policies import AnyConfig
from megarlhf.rollout.rewards.rules import RuleFields


def encoders_of(cfg: AnyConfig) -> list[SFTEncoder | PairEncoder | PromptEncoder | None]:
    """Of everything that the configuration makes of a record; None: a plain text. Raises: as `encoder_of`."""
    if not isinstance(cfg, EvaluateConfig):
        return [encoder_of(cfg)]
    limits: dict[str, Any] = {"max_prompt_tokens": cfg.data.max_prompt_tokens, **writing_options(cfg.data)}
    limits["max_response_tokens"] = cfg.data.max_response_tokens
    found: list[SFTEncoder | PairEncoder | PromptEncoder | None] = []
    for task in cfg.tasks():
        role = cfg.reward_model if task == "pairs" else cfg.actor
        assert role is not None, "checked with the configuration"
        tokenizer = role.model.tokenizer_place()
        if task == "pairs":
            found.append(PairEncoder(tokenizer=tokenizer, **limits))
        elif task != "perplexity":
            found.append(prompt_encoder(cfg.data, tokenizer, cfg.rewards))
        else:
            response = cfg.eval.perplexity_of == "response"
            found.append(SFTEncoder(tokenizer=tokenizer, loss_on=cfg.data.loss_on, **limits) if response else None)
    return found


def encoder_of(cfg: AnyConfig) -> SFTEncoder | PairEncoder | PromptEncoder:
    """Raises: ValueError for a tokenizer or a template that is not there."""
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
    return prompt_encoder(cfg.data, cfg.actor.model.tokenizer_place(), cfg.rewards)


def prompt_encoder(data: PromptDataConfig, tokenizer: Path, rewards: Sequence[RewardConfig] = ()) -> PromptEncoder:
    """How records become prompts, which have what the rules of the rewards need."""
    rules = tuple(reward.rule for reward in rewards if reward.rule is not None)
    return PromptEncoder(
        tokenizer=tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        check_fields=RuleFields(rules),
        **writing_options(data),
    )


def indexed_options(cfg: SFTConfig | RLConfig) -> IndexedOptions[Any]:
    """How Megatron's indexed data is read: by `sft` as its data, by `rl` as that of `ptx`."""
    vocab_size = architecture_from_hf(cfg.actor.model.hf_directory()).vocab_size
    if isinstance(cfg, SFTConfig):
        return IndexedOptions(cfg.data.indexed_length, cfg.run.seed, learnt_whole, vocab_size)
    return IndexedOptions(cfg.ptx_max_tokens - 1, cfg.run.seed, Text, vocab_size)
