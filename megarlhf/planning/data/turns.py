"""Trial of the chat template before a run in which an environment answers the model's turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarlhf.config import EvaluateConfig, GenerateConfig, RLConfig
from megarlhf.data.records.conversations import prompt_of
from megarlhf.data.samples.encoders import PromptEncoder
from megarlhf.data.text.templates import Conversation
from megarlhf.data.tokenizers.tokenizer import load_tokenizer


def turn_notes(cfg: Any, encoder: Any, record: Mapping[str, Any]) -> list[str]:
    """Sentences on how the template writes turns behind the first record, if an environment answers them. Raises:
    ValueError."""
    if not isinstance(cfg, RLConfig | GenerateConfig | EvaluateConfig) or not isinstance(encoder, PromptEncoder):
        return []
    asked, environment, actor = prompt_of(record, cfg.data.template_mode), cfg.environment, cfg.actor
    if environment is None or actor is None or not isinstance(asked, Conversation):
        return []
    # Imported where they are needed: they import torch and Megatron-Core.
    from megarlhf.rollout.environments.environment import rendering_of
    from megarlhf.rollout.environments.template_trial import describe_trials, try_template
    from megarlhf.rollout.factory import sampling_of

    tokenizer = load_tokenizer(actor.model.tokenizer_place())
    chat = rendering_of(environment, cfg.data, tokenizer)
    assert chat is not None, "a conversation was read without a template"
    end_ids = sampling_of(cfg.rollout, actor, tokenizer, data=cfg.data).end_ids
    trials = try_template(chat.template, asked, end_ids=end_ids)
    return [f"environment: {sentence}" for sentence in describe_trials(trials, environment.history)]
