"""Trial of the chat template before a run in which an environment answers the model's turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarlhf.config import EvaluateConfig, GenerateConfig, RLConfig
from megarlhf.config.environment import EnvironmentConfig
from megarlhf.data.records.conversations import prompt_of
from megarlhf.data.samples.encoders import PromptEncoder
from megarlhf.data.text.templates import Conversation
from megarlhf.data.tokenizers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from megarlhf.rollout.environments.rendering import ChatRendering


def turn_notes(cfg: Any, encoder: Any, record: Mapping[str, Any]) -> list[str]:
    """Sentences on how the template writes turns behind the first record, if an environment answers them. Raises:
    ValueError."""
    if not isinstance(cfg, RLConfig | GenerateConfig | EvaluateConfig) or not isinstance(encoder, PromptEncoder):
        return []
    environment, actor = cfg.environment, cfg.actor
    if environment is None or actor is None:
        return []
    # Imported where they are needed: they import torch and Megatron-Core.
    from megarlhf.rollout.environments.environment import rendering_of
    from megarlhf.rollout.environments.template_trial import describe_trials, try_template
    from megarlhf.rollout.factory import sampling_of

    asked = prompt_of(record, cfg.data.template_mode)
    if not isinstance(asked, Conversation):
        return []
    tokenizer = load_tokenizer(actor.model.tokenizer_place())
    chat = rendering_of(environment, cfg.data, tokenizer)
    assert chat is not None, "a conversation was read without a template"
    end_ids = sampling_of(cfg.rollout, actor, tokenizer, data=cfg.data).end_ids
    if environment.tools:
        return _tool_notes(
            environment,
            chat,
            replace(asked, tools=[dict(tool) for tool in encoder.tools]),
            end_ids,
            actor.model.tokenizer_place(),
        )
    trials = try_template(chat.template, asked, end_ids=end_ids)
    return [f"environment: {sentence}" for sentence in describe_trials(trials, environment.history)]


def _tool_notes(
    environment: EnvironmentConfig, chat: ChatRendering, asked: Conversation, end_ids: Collection[int], tokenizer: Path
) -> list[str]:
    """Sentences about tools. Raises: ValueError where the template cannot write their results."""
    from megarlhf.rollout.environments.template_trial import describe_trials, try_template
    from megarlhf.rollout.tools.described import form_of_calls, missing_protection

    names = ", ".join(tool["function"]["name"] for tool in asked.tools or ())
    form = form_of_calls(environment.parser, chat.template, tokenizer)
    trials = try_template(chat.template, asked, roles=("tool",), end_ids=end_ids)
    if refused := [trial.reason for trial in trials if trial.outcome == "refused"]:
        raise ValueError(f"environment.tools: the chat template cannot write the result of a tool; {refused[0]}")
    sentences = [f"Tools: {names}; calls are read in the form {form}.", *missing_protection(environment)]
    return [f"environment: {sentence}" for sentence in [*sentences, *describe_trials(trials, environment.history)]]
