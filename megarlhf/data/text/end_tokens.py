"""The token that ends an answer of a conversation, by configuration and tokenizer."""

from __future__ import annotations

from megarlhf.config import ConversationConfig
from megarlhf.data.text.templates import chat_template, has_template
from megarlhf.data.tokenizers.tokenizer import Tokenizer


def turn_end_of(data: ConversationConfig, tokenizer: Tokenizer) -> int | None:
    """The token with which the chat template ends an answer. None where it writes none, or no template is used.

    With `auto` the data may have no conversations: a template that cannot be used is reported with the first one.

    Raises: ValueError for a template that `chat` needs and that is missing or fails.
    """
    mode = data.template_mode
    if mode == "plain" or (mode == "auto" and not has_template(tokenizer)):
        return None
    try:
        return chat_template(tokenizer, data.chat_template_text(), data.template_args).turn_end
    except ValueError:
        if mode == "chat":
            raise
        return None
