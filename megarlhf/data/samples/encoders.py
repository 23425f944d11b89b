"""Encoders make samples, with token ids, from records. A record that cannot be used is skipped, with a reason.

Nothing is cut: a record over a limit is skipped. Lengths are in tokens. A response's length includes the token that
ends it, as in rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from megarlhf.config import ConversationConfig
from megarlhf.data.records.conversations import (
    CONVERSATION_COLUMNS,
    EmptyText,
    PairOfConversations,
    PairOfTexts,
    RawText,
    example_of,
    pair_of,
    prompt_of,
    read_lists,
)
from megarlhf.data.sample_types import (
    Changed,
    Encode,
    FieldCheck,
    PairSample,
    PromptSample,
    SFTSample,
    Unusable,
    changed,
    sample_of,
)
from megarlhf.data.samples.limits import Limit, require_at_most
from megarlhf.data.text.assistant_mask import LossOn, learnt_turns
from megarlhf.data.text.omissions import Kind
from megarlhf.data.text.templates import ChatTemplate, Conversation, Template, chat_template, has_template
from megarlhf.data.text.writer import TokenWriter, response_tokens, text_tokens
from megarlhf.data.tokenizers.files import tokenizer_digest, writes_the_date
from megarlhf.data.tokenizers.tokenizer import Tokenizer, load_tokenizer

VERSION = 6
"""Version of reading and tokenizing records. It is part of the cache's keys."""

NO_TEMPLATE_FOR_TOOLS = (
    "environment.tools needs a chat template, which describes the tools to the model, and prompts are plain texts "
    "here; set data.template: chat, or give a template (data.chat_template)"
)
"""Message about prompts that cannot describe tools."""

Form = Literal["texts", "conversations", "raw texts"]
Read = TypeVar("Read")


def writing_options(data: ConversationConfig) -> dict[str, Any]:
    """Options of an encoder for writing conversations. Raises: ValueError for a file of `data.chat_template` that
    cannot be read."""
    return {
        "template": data.template_mode,
        "chat_template": data.chat_template_text(),
        "template_args": data.template_args,
        "template_may_drop": data.template_may_drop,
        "inexact": data.inexact,
    }


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of all encoders, which implement `Encoder`."""

    tokenizer: Path
    """The directory of the tokenizer."""
    max_prompt_tokens: int
    template: Template = "auto"
    chat_template: str | None = None
    """Replaces the tokenizer's own template."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    template_may_drop: tuple[Kind, ...] = ()
    """Parts of a conversation that the template may leave out."""
    inexact: Literal["refuse", "skip"] = "refuse"
    """Treatment of a conversation of which the template leaves out something else, or whose answers cannot be
    separated from the rest."""
    form: Form | None = None
    """Form of the set's first record. With `auto` all others must have it. Not in the key: the content implies it."""

    def key(self) -> dict[str, Any]:
        values = {option.name: getattr(self, option.name) for option in fields(self) if option.name != "form"}
        values |= {"samples": type(self).__name__, "version": VERSION, "tokenizer": tokenizer_digest(self.tokenizer)}
        if self.template != "plain" and writes_the_date(self.tokenizer, self.chat_template):
            values["date"] = date.today().isoformat()
        return {**values, "template_args": dict(self.template_args), "template_may_drop": list(self.template_may_drop)}

    def load(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer)

    def by(self, loaded: Tokenizer) -> Encode[Any]:
        raise NotImplementedError

    def open(self) -> Encode[Any]:
        """Load the tokenizer for this process. Raises: ValueError as `load` and `by`."""
        return self.by(self.load())

    def chat(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template for conversations. None where there is none; the first conversation is then refused.

        Raises: ValueError where a template is needed in any case, and there is none."""
        if self.template not in get_args(Template):
            raise ValueError(f"unknown template {self.template!r}; the known ones are {', '.join(get_args(Template))}")
        if self.template == "plain":
            return None
        if self.template == "chat" or self.chat_template is not None or has_template(tokenizer):
            return chat_template(tokenizer, self.chat_template, self.template_args)
        return None

    def writer(self, tokenizer: Tokenizer) -> TokenWriter:
        """The writer for this tokenizer. Raises: ValueError as `chat`."""
        return TokenWriter(tokenizer, self.chat(tokenizer), self.template_may_drop, skips=self.inexact == "skip")


def _is_cut(record: Mapping[str, Any]) -> bool:
    """Tell whether the response was cut off, by the column `finished` of `generate`, also as CSV text."""
    finished = record.get("finished")
    return finished is not None and str(finished).strip().lower() in ("false", "0", "0.0")


_BEHIND_THE_ANSWERS = "with messages behind the last answer, which nobody learns"


def _skipping(read: Callable[..., Read], record: Mapping[str, Any], options: _Options) -> Read:
    """Read a record. Raises: Unusable; ValueError, also for a record of another form than the first of its set."""
    try:
        parts = read(record, options.template)
    except EmptyText as reason:
        raise Unusable(str(reason)) from reason
    if options.template == "auto" and options.form is not None and _form(parts) != options.form:
        raise ValueError(
            f"this record is read as {_form(parts)}, and the first of its set as {options.form}: data.template = auto "
            "reads one form in a set; set it to chat, which writes prompts and responses as messages too, or make two "
            "sets of it"
        )
    return parts


def _form(read: Any) -> Form:
    if isinstance(read, RawText):
        return "raw texts"
    return "conversations" if isinstance(read, Conversation | PairOfConversations) else "texts"


@dataclass(frozen=True, kw_only=True)
class SFTEncoder(_Options):
    """Samples from a prompt and its response, a conversation, or raw text (`conversations.example_of`). A response that
    was cut off (`finished: false`) gets no end token."""

    max_response_tokens: int
    loss_on: LossOn = "last"
    """Learnt messages of the assistant: the last one or all."""

    def by(self, loaded: Tokenizer) -> Encode[SFTSample]:
        encode = self.of_any_length(loaded)

        def sample(index: int, record: Mapping[str, Any]) -> SFTSample | Changed:
            encoded, limit = encode(index, record)
            if len(sample_of(encoded).tokens) > limit.end:
                raise Unusable(limit.over)
            return encoded

        return sample

    def of_any_length(self, loaded: Tokenizer) -> Callable[[int, Mapping[str, Any]], tuple[SFTSample | Changed, Limit]]:
        """The encoding function for records of any length. It also returns the limit that applies to the sample."""
        writer = self.writer(loaded)
        most = self.max_prompt_tokens + self.max_response_tokens

        def sample(index: int, record: Mapping[str, Any]) -> tuple[SFTSample | Changed, Limit]:
            example = _skipping(example_of, record, self)
            if isinstance(example, RawText):
                tokens = [*text_tokens(example.text, loaded), loaded.eos_id]
                return SFTSample.of_response(tokens, 1), Limit("text", most, most)
            if isinstance(example, Conversation):
                self._require_all_learnt(read_lists(record, self.template), example)
                whole = writer.answered(example, self.loss_on)
                conversation = SFTSample(whole.tokens, whole.stretches)
                if _is_cut(record) and learnt_turns(example, "last"):
                    conversation = _without_end(conversation)
                learnt, limit = self._limited(conversation)
                behind = [_BEHIND_THE_ANSWERS] * (example.roles[-1] != "assistant")
                return changed(learnt, (*whole.omissions, *behind)), limit
            prompt_tokens = text_tokens(example[0], loaded)
            answer_tokens = response_tokens(example[1], loaded)
            if _is_cut(record):
                answer_tokens.pop()
            return self._limited(SFTSample.of_response(prompt_tokens + answer_tokens, len(prompt_tokens)))

        return sample

    def _require_all_learnt(self, record: Mapping[str, Any], example: Conversation) -> None:
        """Raises: ValueError for a `response` of several answers, of which only the last would be learnt."""
        several = isinstance(record.get("response"), list) and len(learnt_turns(example, "all")) > 1
        if self.loss_on == "last" and several:
            raise ValueError(
                f"'response' has {len(learnt_turns(example, 'all'))} answers, and data.loss_on = last learns the last "
                "one only; set it to all, by which each answer of the response is learnt"
            )

    def _limited(self, sample: SFTSample) -> tuple[SFTSample, Limit]:
        """The sample and the limit of its response, or of the whole with `loss_on: all`. Raises: Unusable for a prompt
        that is too long."""
        if self.loss_on == "all":
            most = self.max_prompt_tokens + self.max_response_tokens
            return sample, Limit("conversation", most, most)
        require_at_most(sample.prompt_length, self.max_prompt_tokens, "prompt")
        return sample, Limit("response", self.max_response_tokens, sample.prompt_length + self.max_response_tokens)


@dataclass(frozen=True, kw_only=True)
class PairEncoder(_Options):
    """Samples from a prompt and two answers, texts or messages (`conversations.pair_of`), with `margin` if wanted."""

    max_response_tokens: int
    with_margin: bool = False

    def by(self, loaded: Tokenizer) -> Encode[PairSample]:
        writer = self.writer(loaded)

        def sample(index: int, record: Mapping[str, Any]) -> PairSample | Changed:
            (prompt_tokens, chosen_tokens, rejected_tokens), omissions = self._parts(record, writer)
            require_at_most(len(prompt_tokens), self.max_prompt_tokens, "prompt")
            for tokens in (chosen_tokens, rejected_tokens):
                require_at_most(len(tokens), self.max_response_tokens, "response")
            if chosen_tokens == rejected_tokens:
                raise Unusable("chosen equals rejected")
            margin = _margin(record) if self.with_margin else 0.0
            if not self.with_margin and record.get("margin") is not None:
                omissions = (*omissions, "with a column 'margin', which `rm` reads with margin: true")
            return changed(PairSample(prompt_tokens, chosen_tokens, rejected_tokens, margin), omissions)

        return sample

    def _parts(
        self, record: Mapping[str, Any], writer: TokenWriter
    ) -> tuple[tuple[list[int], list[int], list[int]], Sequence[str]]:
        """Tokens of the prompt, the chosen and the rejected answer, and descriptions of what is left out."""
        pair = _skipping(pair_of, record, self)
        if isinstance(pair, PairOfTexts):
            prompt_tokens = text_tokens(pair.prompt, writer.tokenizer)
            chosen, rejected = (response_tokens(side, writer.tokenizer) for side in (pair.chosen, pair.rejected))
            return (prompt_tokens, chosen, rejected), ()
        sides = [writer.answered(side, "last") for side in (pair.chosen, pair.rejected)]
        prompts = [side.tokens[: side.stretches[0]] for side in sides]
        if prompts[0] != prompts[1]:
            raise ValueError(
                "the chat template writes another prompt before the chosen answer than before the rejected one; give a "
                "template that does not look at the answer (data.chat_template)"
            )
        chosen, rejected = (side.tokens[len(prompts[0]) :] for side in sides)
        return (prompts[0], chosen, rejected), list(
            dict.fromkeys(omission for side in sides for omission in side.omissions)
        )


@dataclass(frozen=True, kw_only=True)
class PromptEncoder(_Options):
    """Samples of prompts to answer (`conversations.prompt_of`)."""

    check_fields: FieldCheck | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """Descriptions of the run's tools, which become the column `tools` of every record."""

    def key(self) -> dict[str, Any]:
        checked = [] if self.check_fields is None else self.check_fields.key()
        return {**super().key(), "check_fields": checked, "tools": list(self.tools)}

    def by(self, loaded: Tokenizer) -> Encode[PromptSample]:
        writer = self.writer(loaded)

        def sample(index: int, record: Mapping[str, Any]) -> PromptSample | Changed:
            asked = _skipping(prompt_of, record, self)
            if self.tools:
                asked, record = self._with_tools(asked, record)
            others = {key: value for key, value in record.items() if key not in CONVERSATION_COLUMNS}
            text, tokens, omissions = writer.asked(asked)
            require_at_most(len(tokens), self.max_prompt_tokens, "prompt")
            if self.check_fields is not None:
                self.check_fields(others)
            messages = asked.messages if isinstance(asked, Conversation) else None
            return changed(PromptSample(tokens, text, others, index, messages), omissions)

        return sample

    def _with_tools(
        self, asked: str | Conversation, record: Mapping[str, Any]
    ) -> tuple[Conversation, Mapping[str, Any]]:
        """The prompt and its record with the run's tools. Raises: ValueError for a text, and for a record with tools of
        its own."""
        if not isinstance(asked, Conversation):
            raise ValueError(NO_TEMPLATE_FOR_TOOLS)
        if asked.tools:
            raise ValueError(
                "the record has a column 'tools', and the run has environment.tools: the model would be told of tools "
                "that nothing executes; leave one of them out (columns: {not_read: tools})"
            )
        tools = [dict(tool) for tool in self.tools]
        return replace(asked, tools=tools), {**record, "tools": tools}


_READERS: Mapping[type[_Options], Callable[[Mapping[str, Any], Template], Any]] = {
    SFTEncoder: example_of,
    PairEncoder: pair_of,
    PromptEncoder: prompt_of,
}


def form_of_record(encoder: _Options, record: Mapping[str, Any]) -> Form | None:
    """The form that a record is read as. None for a skipped record. Raises: ValueError for a refused one."""
    try:
        return _form(_READERS[type(encoder)](record, encoder.template))
    except EmptyText:
        return None


def describe_reading(encoder: _Options, record: Mapping[str, Any]) -> str:
    """Describe how a record is read, for the start of a run. "" for a skipped record. Raises: ValueError for a refused
    one."""
    form = form_of_record(encoder, record)
    if form is None:
        return ""
    if form == "conversations":
        by = "the chat template of data.chat_template" if encoder.chat_template else "the tokenizer's chat template"
        learnt = ""
        if isinstance(encoder, SFTEncoder):
            learnt = "; learnt: " + ("every answer" if encoder.loss_on == "all" else "the last answer")
        if writes_the_date(encoder.tokenizer, encoder.chat_template):
            learnt += (
                "; the template writes today's date, so that a run that goes on tomorrow has other data: name the "
                "variable that it takes instead (data.template_args, such as {date_string: 26 Nov 2026})"
            )
        return f"conversations, written by {by}{learnt}"
    if form == "raw texts":
        return "raw texts, of which every token is learnt"
    if encoder.template == "auto" and has_template(load_tokenizer(encoder.tokenizer)):
        return "texts as they stand; the tokenizer has a chat template, which data.template: chat would write them with"
    return "texts as they stand"


def _without_end(sample: SFTSample) -> SFTSample:
    """The sample without its last answer's end token. Raises: Unusable where the answer has no other token."""
    *before, first, end = sample.stretches
    if end - 1 == first:
        raise Unusable("empty response")
    return SFTSample(sample.tokens[:-1], [*before, first, end - 1])


def _margin(record: Mapping[str, Any]) -> float:
    value = record.get("margin")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"margin = {value!r}, expected a number: by how much chosen and rejected should differ")
    return float(value)
