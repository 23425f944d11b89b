"""Token ids that stand between two turns of the model, and those of a conversation's beginning.

What was sampled is never rendered or tokenized again. Between two turns stands a *delta*: what the chat template writes
from the end of the sampled turn to the place where the model continues. Example (ChatML; the model has sampled
`3+4<|im_end|>`, and the environment's answer is a message of `tool` with the content 7):

    \\n<|im_start|>tool\\n7<|im_end|>\\n<|im_start|>assistant\\n

1. The conversation is rendered with a word without meaning in place of the turn. The delta is the text behind the word.
   It begins with a special token, usually the one that ends a turn, so that no merge of the tokenizer crosses the
   border. Where the model has sampled this token itself, the delta begins behind it.
2. The delta contains every message of the environment. Some templates leave out the role `tool`.
3. The conversation is rendered with the real turn. The result should be the text that asked for the turn, the turn, and
   the delta. By induction over the turns, the model then reads what the template writes, but as it was sampled. Many
   templates rewrite the history instead: they leave out thoughts once a user's message follows.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from megarlhf.data.records.messages import messages_of, require_order
from megarlhf.data.text.omissions import Kind, Omission
from megarlhf.data.text.templates import ChatTemplate, Conversation
from megarlhf.data.text.writer import TokenWriter, text_tokens
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.rollout.environments.answer import Messages

Outcome = Literal["exact", "white_space", "rewritten"]
"""`exact`: the template writes the history as it was read and sampled. `white_space`: but for white space.
`rewritten`: it writes something else."""
OnRewriting = Literal["refuse", "as_sampled"]

_WORD = "zqxjkv"
"""A turn that has no meaning in any template."""
_OPENED = re.compile(r"(?:</?[\w:]+>\s*)+$")
"""A beginning of an answer, such as `<think>`, at the end of a text that asks for one."""


class HistoryRewritten(ValueError):
    """A template that rewrites the history. The message says what it writes."""


class NotContinued(ValueError):
    """A template that cannot be continued behind a turn. The message says why."""


@dataclass(frozen=True)
class Opening:
    """The beginning of a conversation, before the model's first turn."""

    ids: list[int]
    """Token ids of the whole prompt."""
    conversation: Conversation | str
    """The prompt with the environment's messages. A text for prompts without a template."""


@dataclass(frozen=True)
class Delta:
    """Tokens between two turns."""

    ids: list[int]
    conversation: Conversation | str
    """The conversation so far, with the turn and the environment's messages. An environment's text does not end the
    turn, and is not in it: the next call gets both as parts of the turn's text."""
    history: Outcome = "exact"
    reason: str = ""
    """Difference between what the template writes and what was sampled. Empty if `exact`."""


class Rendering(Protocol):
    """A way to write what an environment answers. It has no state of its own."""

    def opening(self, prompt: Conversation | str, messages: Messages | str) -> Opening:
        """The beginning of a conversation in which `messages` follow the prompt (`reset` returned them)."""
        ...

    def delta(
        self, conversation: Conversation | str, text: str, observation: Messages | str, *, ended_by: int | None
    ) -> Delta:
        """Tokens that follow a turn.

        conversation: all before the turn: of `Opening` or of the last `Delta`
        text: the turn without the token that ends it, with texts of the environment that stand inside
        observation: the environment's answer; a text continues inside the turn
        ended_by: the end token that the model has sampled last; None where the turn was cut or ended by a stop text

        Raises: ValueError for an answer that cannot be written.
        """
        ...


@dataclass(frozen=True)
class PlainRendering:
    """Texts without a chat template, written as they are."""

    tokenizer: Tokenizer

    def opening(self, prompt: Conversation | str, messages: Messages | str) -> Opening:
        """See `Rendering`. Raises: ValueError for messages; Unusable for an empty prompt."""
        assert isinstance(prompt, str), "a prompt without a template is a text"
        text = prompt + _as_text(messages)
        return Opening(text_tokens(text, self.tokenizer), text)

    def delta(
        self, conversation: Conversation | str, text: str, observation: Messages | str, *, ended_by: int | None
    ) -> Delta:
        """See `Rendering`. Raises: ValueError for messages."""
        assert isinstance(conversation, str), "a prompt without a template is a text"
        return Delta(self.tokenizer.encode(_as_text(observation), continuation=True), conversation)


@dataclass(frozen=True)
class ChatRendering:
    """Messages, written by a chat template with the tools and the variables of the prompt's record.

    With `data.template: auto` a prompt may be a text. Its conversation is written as `PlainRendering` writes it.
    """

    template: ChatTemplate
    history: OnRewriting = "refuse"
    """Handling of a turn after which the template rewrites the history. `as_sampled`: later turns read what was
    sampled. So they do after a turn that the model ended with another end token than the template's: such a turn is
    counted as rewritten, and never refused, since no template could write it."""
    may_drop: tuple[Kind, ...] = ()
    """Parts of a prompt that the template may leave out: `data.template_may_drop`. Of an environment's message between
    turns, white space alone may be missing."""

    def opening(self, prompt: Conversation | str, messages: Messages | str) -> Opening:
        """See `Rendering`. Messages are rendered with the prompt's, as the data encoder renders a prompt. A text begins
        the assistant's turn.

        Raises: ValueError for messages that cannot be written.
        """
        if isinstance(prompt, str):
            return self._plain.opening(prompt, messages)
        following = [] if isinstance(messages, str) else _messages(messages)
        whole = replace(prompt, messages=[*prompt.messages, *following])
        require_order(whole.messages, "messages")
        writer = TokenWriter(self.template.tokenizer, self.template, self.may_drop, skips=False)
        _, ids, _ = writer.asked(whole)
        if isinstance(messages, str):
            ids = [*ids, *self.template.ids(messages, continuation=True)]
        return Opening(ids, whole)

    def delta(
        self, conversation: Conversation | str, text: str, observation: Messages | str, *, ended_by: int | None
    ) -> Delta:
        """See `Rendering`.

        Raises: HistoryRewritten, unless `as_sampled`; NotContinued; ValueError for messages that the template refuses.
        """
        if isinstance(conversation, str):
            return self._plain.delta(conversation, text, observation, ended_by=ended_by)
        by_chance = False
        if isinstance(observation, str):
            delta = Delta(self.template.ids(observation, continuation=True), conversation)
            if ended_by is not None:
                delta = replace(delta, history="rewritten", reason=self._text_behind_end(ended_by))
        else:
            turn = _Turn(self.template, conversation, _messages(observation))
            ids, delta = turn.ids(), turn.compared(text)
            if ended_by is not None and ids[0] != ended_by and delta.history != "rewritten":
                reason = turn.other_end(self._name(ids[0]), self._name(ended_by))
                delta = replace(delta, history="rewritten", reason=reason)
                by_chance = ended_by != self.template.end
            # Any end token stands for the template's own. Without one, the first token is the next message's.
            is_ended = ended_by is not None and (ids[0] == ended_by or self.template.turn_end is not None)
            delta = replace(delta, ids=ids[is_ended:])
        if delta.history == "rewritten" and self.history == "refuse" and not by_chance:
            raise HistoryRewritten(
                f"{delta.reason}. The next turn would continue a text that the template never writes. Set "
                "environment.history: as_sampled (what was sampled stays, and is counted), or give a template that "
                "keeps the history (data.chat_template)"
            )
        return delta

    def content(self, conversation: Conversation, text: str) -> str:
        """Content of a message that the template writes as this last turn of a conversation. It has a part more, such
        as `<think>`, if that is how the template asks for the turn."""
        try:
            whole = _Turn(self.template, conversation, []).compared(text).conversation
        except ValueError:  # the template writes the turn otherwise
            return text
        assert isinstance(whole, Conversation)
        return str(whole.messages[-1]["content"])

    def _text_behind_end(self, ended_by: int) -> str:
        return (
            f"the model has ended its turn with {self._name(ended_by)!r}, and the environment answers with a text, "
            "which continues inside a turn: return messages, or end such turns by a text (rollout.stop)"
        )

    @property
    def _plain(self) -> PlainRendering:
        return PlainRendering(self.template.tokenizer)

    def _name(self, token: int) -> str:
        """The text of a token. A model's vocabulary may be larger than the tokenizer's."""
        return self._vocabulary[token] if token < len(self._vocabulary) else f"token {token}"

    @functools.cached_property
    def _vocabulary(self) -> list[str]:
        return self.template.tokenizer.tokens()


class _Turn:
    """A turn of the model behind a conversation, and the environment's messages, if any, behind the turn."""

    def __init__(self, template: ChatTemplate, before: Conversation, messages: list[dict[str, Any]]) -> None:
        """Raises: NotContinued; ValueError for messages that the template refuses."""
        template.check(Conversation(messages))
        self._template, self._before, self._messages = template, before, messages
        self._follows = " and ".join(dict.fromkeys(repr(message["role"]) for message in messages))
        self._asked = template.text(before, reply=True)
        others = f"{self._asked}{messages}"
        word = next(word for n in itertools.count() if (word := f"{_WORD}{n or ''}") not in others)
        conversation = self._with(word)
        self._text = template.text(conversation, reply=bool(messages))
        head, is_written, self._behind = self._text.rpartition(word)
        if not is_written:
            raise NotContinued(
                f"the chat template writes nothing of an assistant's message that {self._follows} follows, or changes "
                "it; give another template (data.chat_template)"
            )
        self._first, self._end = len(head), len(head) + len(word)
        self._omissions: list[Omission] = []
        self._require_observed(conversation)

    def _with(self, content: str) -> Conversation:
        turn = {"role": "assistant", "content": content}
        return replace(self._before, messages=[*self._before.messages, turn, *self._messages])

    def _require_observed(self, conversation: Conversation) -> None:
        """Raises: NotContinued where a message of the environment is not written behind the turn."""
        behind_turn = self._indices_behind(conversation)
        for index, message in enumerate(self._messages, len(self._before.messages) + 1):
            content = message["content"]
            is_written = _stands_in(content, self._behind) if behind_turn is None else index in behind_turn
            if content.strip() and not is_written:
                omitted = [o for o in self._omissions if o.message == index and o.key != "content"]
                if omitted:
                    key = "tool_calls" if omitted[0].kind == "tool_calls" else omitted[0].key
                    raise ValueError(
                        f"the environment's message of {message['role']!r} has {key!r}, which the chat template does "
                        "not write there; leave it out"
                    )
                raise NotContinued(
                    f"the chat template does not write the environment's message of {message['role']!r} behind the "
                    f"model's turn (content: {_shown(content)}), but {_shown(self._behind)}; return "
                    "messages of another role, or give another template (data.chat_template)"
                )

    def _indices_behind(self, conversation: Conversation) -> frozenset[int] | None:
        """Indices of the messages that are written completely, but for white space, and behind the turn. None where
        what the model has sampled earlier, which may be anything, keeps them from being determined."""
        try:
            written = self._template.written(conversation, self._text, reply=True)
        except ValueError:
            return None
        self._omissions = [omission for omission in written.omissions if omission.kind != "white_space"]
        omitted = {omission.message for omission in self._omissions}
        places = written.places.items()
        return frozenset(n for n, (start, _) in places if start >= self._end and n not in omitted) if places else None

    def ids(self) -> list[int]:
        """Ids behind the turn. Raises: NotContinued where they depend on the turn's own text."""
        # A text is tokenized from the last special token before the turn: what comes earlier changes nothing.
        divides = self._template.tokenizer.divides
        marks = [0, *(match.start() for match in divides.finditer(self._text, 0, self._first))] if divides else [0]
        before, whole = (self._template.ids(self._text[marks[-1] : end]) for end in (self._end, None))
        ids = whole[len(before) :]
        if whole[: len(before)] == before and ids and ids[0] in self._template.tokenizer.special_ids:
            return ids
        raise NotContinued(
            f"behind a turn that {self._follows} follows, the chat template writes {_shown(self._behind)}, which does "
            "not begin with a special token, so that its tokens could merge with those of the turn; give a template "
            "that ends turns with a special token (data.chat_template)"
        )

    def compared(self, text: str) -> Delta:
        """Compare what the template writes of the real turn with what was sampled. The result has no ids yet.

        text: of the turn

        Raises: ValueError where the template refuses the turn.
        """
        expected, others, refusals = self._asked + text + self._behind, list[Delta](), list[ValueError]()
        for content in self._contents(text):
            conversation = self._with(content)
            try:
                whole = self._template.text(conversation, reply=bool(self._messages))
            except ValueError as error:
                refusals.append(error)
                continue
            if whole == expected:
                return Delta([], conversation)
            is_equal = "".join(whole.split()) == "".join(expected.split())
            outcome: Outcome = "white_space" if is_equal else "rewritten"
            others.append(Delta([], conversation, outcome, self._difference(expected, whole)))
        if not others:
            raise refusals[0]
        return next((delta for delta in others if delta.history == "white_space"), others[0])

    def _contents(self, text: str) -> list[str]:
        """Contents of a message by which the template may write the turn.

        Some templates ask with a part of the answer, such as `<think>`, that belongs to the message's content later.
        Others write something before an answer that the model has to sample, such as a space.
        """
        head, asked, contents = self._text[: self._first], self._asked, [text]
        if asked.startswith(head):
            contents.append(asked[len(head) :] + text)
        elif head.startswith(asked) and text.startswith(head[len(asked) :]):
            contents.append(text[len(head) - len(asked) :])
        if opened := _OPENED.search(asked):
            contents.append(opened.group() + text)
        return list(dict.fromkeys(contents))

    def _difference(self, expected: str, whole: str) -> str:
        pairs = enumerate(zip(expected, whole, strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(expected), len(whole)))
        end = len(expected) - len(self._behind)
        verb = "was read" if same < len(self._asked) else "was sampled" if same < end else "should follow"
        return (
            f"once a message of {self._follows} follows, the chat template writes the history otherwise: where "
            f"{_shown(expected[same:])} {verb}, it writes {_shown(whole[same:])}"
        )

    def other_end(self, written: str, sampled: str) -> str:
        """Reason for `rewritten` where the template ends the turn with another token than the model."""
        return (
            f"the model has ended its turn with {sampled!r}, and the chat template writes {written!r} there once a "
            f"message of {self._follows} follows"
        )


def _messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages in the form of those of a record: a content that is a list of parts becomes a text. Raises:
    ValueError."""
    return messages_of(list(messages), "messages of the environment") if messages else []


def _as_text(messages: Messages | str) -> str:
    """The environment's answer as a text. Raises: ValueError for messages."""
    if isinstance(messages, str):
        return messages
    if not messages:
        return ""
    raise ValueError(
        "the prompts are texts without a chat template, got messages from the environment, expected a text; return a "
        "text, or set data.template to chat"
    )


def _stands_in(text: str, rendered: str) -> bool:
    """Tell whether a text is written, but for white space, as it is or as a text of JSON."""
    squeezed = "".join(rendered.split())
    return any("".join(form.split()) in squeezed for form in (text, json.dumps(text, ensure_ascii=False)[1:-1]))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...") if text else "nothing"
