"""From a record to texts. `plain` takes fields as they are, `chat` goes through the model's chat template.

The command says which field is read, whatever else a record has: with `chat`, `sft` and `rl` read `messages`, `rm`
reads `prompt` as one message of the user. The template ends where the assistant's answer begins, so the answer itself
is the plain text and then eos. Records are those of `load_records`, which checks their fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megarlhf.data.tokenizer import HuggingFaceTokenizer, Tokenizer

Template = Literal["plain", "chat"]


def require_template(template: Template, tokenizer: Tokenizer) -> None:
    """Raises: ValueError for an unknown template, and for `chat` where the tokenizer has no chat template."""
    if template == "plain":
        return
    if template != "chat":
        raise ValueError(f"unknown template {template!r}; the known ones are plain, chat")
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise ValueError(
            "the template 'chat' needs a Hugging Face tokenizer (tokenizer.json) with a chat template, got "
            f"{type(tokenizer).__name__}; use the template 'plain'"
        )
    tokenizer.require_chat_template()


def _render(messages: list[Mapping[str, str]], tokenizer: Tokenizer) -> str:
    assert isinstance(tokenizer, HuggingFaceTokenizer), "see require_template"
    return tokenizer.render_chat(messages)


def question(record: Mapping[str, Any], template: Template, tokenizer: Tokenizer) -> str:
    """For pairs: `prompt`, with `chat` as one message of the user."""
    prompt = str(record["prompt"])
    return prompt if template == "plain" else _render([{"role": "user", "content": prompt}], tokenizer)


def prompt_text(record: Mapping[str, Any], template: Template, tokenizer: Tokenizer) -> str:
    """For prompts: `prompt`, or the conversation in `messages`, which the assistant has to answer."""
    if template == "plain":
        return str(record["prompt"])
    if record["messages"][-1]["role"] == "assistant":
        raise ValueError(
            "the conversation in 'messages' ends with a message of 'assistant', which would become part of the prompt; "
            "expected a message of the user, the system or a tool as the last one: drop the last message, or train "
            "on it with `megarlhf sft`"
        )
    return _render(record["messages"], tokenizer)


def prompt_and_response(record: Mapping[str, Any], template: Template, tokenizer: Tokenizer) -> tuple[str, str]:
    """For fine-tuning: `prompt` and `response`, or `messages`, the last of which is the assistant's."""
    if template == "plain":
        return str(record["prompt"]), str(record["response"])
    *before, last = record["messages"]
    if last["role"] != "assistant":
        raise ValueError(
            f"fine-tuning on messages expects the last one from 'assistant', got {last['role']!r}; "
            "cut the conversation after an answer"
        )
    return _render(before, tokenizer), str(last["content"])
