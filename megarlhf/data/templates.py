"""From a record to texts. `plain` takes fields as they are, `chat` goes through the model's chat template.

`chat` takes the conversation from `messages` where a record has them, else from `prompt` as one user message.
The template ends where the assistant's answer begins, so the answer itself is the plain text and then eos.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megarlhf.data.tokenizer import HuggingFaceTokenizer, Tokenizer

Template = Literal["plain", "chat"]
_TEMPLATES = ("plain", "chat")


def text_field(record: Mapping[str, Any], name: str) -> str:
    """A field that has to be there, for records that `load_records` did not check."""
    if not isinstance(record.get(name), str):
        field_names = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"a record has no field {name!r}, found {field_names}; name its text {name!r}")
    return str(record[name])


def prompt_text(record: Mapping[str, Any], template: Template, tokenizer: Tokenizer) -> str:
    """The text that the response follows."""
    if template == "plain":
        return text_field(record, "prompt")
    if template != "chat":
        raise ValueError(f"unknown template {template!r}; the known ones are {', '.join(_TEMPLATES)}")
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise ValueError(
            "the template 'chat' needs a Hugging Face tokenizer (tokenizer.json) with a chat template, got "
            f"{type(tokenizer).__name__}; use the template 'plain'"
        )
    messages = record.get("messages")
    if messages is None:
        messages = [{"role": "user", "content": text_field(record, "prompt")}]
    return tokenizer.render_chat(messages)


def prompt_and_response(record: Mapping[str, Any], template: Template, tokenizer: Tokenizer) -> tuple[str, str]:
    """For fine-tuning: `prompt` and `response`, or `messages`, the last of which is the assistant's."""
    if template == "plain" or record.get("messages") is None:
        return prompt_text(record, template, tokenizer), text_field(record, "response")
    *before, last = record["messages"] or [{"role": "none"}]
    if last["role"] != "assistant":
        raise ValueError(
            f"fine-tuning on messages expects the last one from 'assistant', got {last['role']!r}; "
            "cut the conversation after an answer"
        )
    return prompt_text({**record, "messages": before}, template, tokenizer), str(last["content"])
