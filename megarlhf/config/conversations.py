"""Configuration of the text of a conversation: the same keys in every command's `data`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from megarlhf.config.frozen import FrozenModel

_OF_THE_COMMAND = "the command sets it; leave it out"
RESERVED_VARIABLES: Mapping[str, str] = {
    "messages": "the conversation is given in the column 'messages'",
    "conversation": "the conversation is given in the column 'messages'",
    "tools": "descriptions of tools are given in the column 'tools'",
    "chat_template": "a template is given for all records, as data.chat_template",
    **dict.fromkeys(
        ("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        _OF_THE_COMMAND,
    ),
    **dict.fromkeys(
        ("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"), _OF_THE_COMMAND
    ),
}
"""Arguments of transformers' `apply_chat_template` that are no variables of a template, with what to do instead."""


class ConversationConfig(FrozenModel):
    template: Literal["auto", "plain", "chat"] = "auto"
    """`plain`: texts without a template (`prompt`, `response`, `chosen`, `rejected`). `chat`: the chat template over
    `messages` or `conversations`, or over `prompt` as one message of the user. `auto`: chosen by each record's columns,
    `plain` for texts and `chat` for lists of messages; a record with both is refused. With `chat_template` or
    `template_args` `auto` is `chat`."""
    chat_template: str | None = None
    """A chat template of your own in place of the tokenizer's: the path of a jinja file, or the template itself (a text
    with braces). It is written into exports, so that the next stage reads it from the model."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template, such as `{enable_thinking: false}` or `{date_string: 26 Nov 2026}`."""
    template_may_drop: tuple[Literal["white_space", "thoughts", "messages", "tool_calls", "tools"], ...] = ()
    """Parts of a conversation that the chat template may leave out or change; such records are counted. Everything else
    must appear in the text as it is given. `white_space`: around and inside texts. `thoughts`: in answers that are not
    learnt, as many templates drop those of earlier turns. `messages`: of roles that the template does not write. In an
    answer that is learnt only white space may be missing."""
    inexact: Literal["refuse", "skip"] = "refuse"
    """Handling of a conversation that the template changes in another way, or whose answers cannot be separated from
    the rest token by token: the template writes the text before an answer differently than when it asks for one, or an
    answer's first characters merge with that text. `skip` skips and counts such conversations."""

    other_writing: Literal["refuse", "allow"] = "refuse"
    """Handling of a model of an earlier run that was trained on text in another format than here: plain texts in place
    of conversations, another chat template, other `template_args`, another end of answers. `allow` trains it anyway."""

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        unread = [key for key in ("chat_template", "template_args", "template_may_drop") if getattr(self, key)]
        if self.template == "plain" and unread:
            raise ValueError(f"{unread[0]} is given, and template = plain reads no template; set template to chat")
        if reserved := [name for name in self.template_args if name in RESERVED_VARIABLES]:
            raise ValueError(
                f"template_args has {reserved[0]!r}, which is no variable of a template: "
                f"{RESERVED_VARIABLES[reserved[0]]}"
            )
        return self

    @property
    def template_mode(self) -> Literal["auto", "plain", "chat"]:
        """`template`, with `auto` as `chat` if a template is given."""
        return "chat" if self.chat_template or self.template_args else self.template

    def chat_template_text(self) -> str | None:
        """The template in place of the tokenizer's. Raises: ValueError for a file that cannot be read."""
        given = self.chat_template
        if given is None or "{" in given:
            return given
        path = Path(given).expanduser()
        if not path.is_file():
            raise ValueError(
                f"data.chat_template = {given} is no file (working directory: {Path.cwd()}), and as a template it "
                "would be no more than this text; correct the path"
            )
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"data.chat_template = {given}: not UTF-8 ({error.reason}); convert the file") from error
