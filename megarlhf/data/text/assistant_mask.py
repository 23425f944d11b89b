"""Tokens of the assistant's answers in a conversation: by the template's marks, or by exact differences of prefixes.

An answer starts after the ids of the conversation before it, as `rl` and `generate` ask for it. So the model learns to
continue exactly what it will be given. The answer ends with the token that ends a turn in the template, at which a
generated response ends too. If the template writes no such token, the end of sequence is added.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarlhf.data.text.omissions import Kind, require_written
from megarlhf.data.text.templates import ChatTemplate, Conversation
from megarlhf.data.text.written import Places, WrittenPart

LossOn = Literal["last", "all"]


class Inexact(ValueError):
    """The answer's tokens cannot be determined exactly."""


@dataclass(frozen=True)
class Answered:
    """A conversation up to the end of its last answer."""

    tokens: list[int]
    stretches: list[int]
    """Stretches of the answers: see `SFTSample`."""
    omissions: tuple[str, ...] = ()
    """Descriptions of what the template was allowed to leave out."""


def learnt_turns(conversation: Conversation, loss_on: LossOn) -> list[int]:
    """Indices of the learnt messages, without those that are marked as not to be learnt."""
    turns = _turns(conversation)
    chosen = turns[-1:] if loss_on == "last" else turns
    return [turn for turn in chosen if turn not in conversation.unlearnt]


def _turns(conversation: Conversation) -> list[int]:
    return [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def answered(
    template: ChatTemplate, conversation: Conversation, loss_on: LossOn, may_drop: Collection[Kind] = ()
) -> Answered:
    """Tokens of a conversation up to its last learnt answer, with the stretches of the learnt answers.

    conversation: has an answer to learn (`learnt_turns`)
    may_drop: parts that the template may leave out of the messages

    Raises: Inexact; NotWritten; ValueError for messages that the template refuses.
    """
    turns = learnt_turns(conversation, loss_on)
    assert turns, "asked only where something is learnt"
    conversation = conversation.before(turns[-1] + 1)
    if template.turn_end is None and len(turns) > 1 and not template.has_marks:
        raise Inexact(
            "the chat template writes no token that ends a turn, so that of several answers only the last can be "
            "learnt: the others would be taught not to end; set data.loss_on to last, or give a template that ends "
            "turns (data.chat_template)"
        )
    whole = template.text(conversation)
    written = template.written(conversation, whole)
    omissions = require_written(written.omissions, conversation.roles, may_drop, turns)
    if template.has_marks:
        _require_in_marks(template, conversation, turns, written)
        answers = _by_marks(template, conversation, turns, loss_on)
    else:
        answers = _by_prefixes(template, conversation, turns, whole, written.places)
    return replace(answers, omissions=omissions)


def _by_prefixes(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], text: str, places: Places
) -> Answered:
    """Find the answers as the text behind the prompts that ask for them.

    turns: indices of the learnt messages, the last message among them
    text: the whole conversation; the messages are at `places` in it
    """
    whole = Whole(template, text)
    ids, stretches = whole.ids, list[int]()
    for turn in turns:
        if turn == 0:
            raise Inexact(
                "message 1 is the assistant's, and no text leads to it that a model could be asked with; cut it off, "
                "or set data.loss_on to last"
            )
        asked = template.text(conversation.before(turn), reply=True)
        if not text.startswith(asked):
            raise Inexact(_otherwise(asked, text, turn))
        before, last = whole.ids_of(asked), turn + 1 == len(conversation.messages)
        so_far = text if last else template.text(conversation.before(turn + 1))
        first, behind = places.get(turn, (len(asked), len(asked)))
        # A content may begin with what the template asks with, such as <think>. That part is not learnt.
        if first < len(asked) >= behind or behind > len(so_far):
            raise Inexact(_elsewhere(turn))
        if ids[: len(before)] != before:
            end_so_far = stretches[-1] if stretches else 0
            if not last or ids[:end_so_far] != before[:end_so_far]:
                raise Inexact(_merged(turn, "begins", "the text before it", "start the answer with another character"))
            # A model is given the ids before the answer and continues them, so no merge crosses the border.
            ids = [*before, *_closed(template, text[len(asked) :], continuation=True)]
        ids_so_far = ids if last else whole.ids_of(so_far)
        end = _end(template, ids_so_far, len(before), turn, conversation)
        if ids[:end] != ids_so_far[:end]:
            is_prefix = text.startswith(so_far)
            advice = "set data.loss_on to last"
            raise Inexact(
                _merged(turn, "ends", "the text behind it", advice) if is_prefix else _changes(so_far, text, turn)
            )
        stretches += [len(before), end]
    return Answered(ids[: stretches[-1]], stretches)


class Whole:
    """Ids of a whole conversation, and of texts that begin as it does. Those are tokenized anew only from the last
    special token that both have."""

    def __init__(self, template: ChatTemplate, text: str) -> None:
        self._template, self._text = template, text
        self.ids = _closed(template, text)
        divides = template.tokenizer.divides
        matches = [] if divides is None else list(divides.finditer(text))
        written = self.ids if template.turn_end is not None else self.ids[:-1]
        positions = [position for position, token in enumerate(written) if token in template.tokenizer.special_ids]
        # With different counts, ids cannot be assigned to special tokens in the text.
        self._marks = list(zip(matches, positions, strict=True)) if len(matches) == len(positions) else []

    def ids_of(self, text: str) -> list[int]:
        """The ids of a text."""
        shared = len(text) if self._text.startswith(text) else _common(text, self._text)
        for match, position in reversed(self._marks):
            same = match.re.match(text, match.start()) if match.end() <= shared else None
            if same is not None and same.group() == match.group():
                return self.ids[:position] + self._template.ids(text[match.start() :])
        return self._template.ids(text)


def _closed(template: ChatTemplate, whole: str, *, continuation: bool = False) -> list[int]:
    """Ids of a conversation or of its end, with an end of sequence if the template writes no end of a turn."""
    if template.turn_end is not None:
        return template.ids(whole, continuation=continuation)
    behind = template.behind_an_answer
    text = whole.removesuffix(behind) + behind.rstrip() if behind else whole
    return [*template.ids(text, continuation=continuation), template.tokenizer.eos_id]


def _end(template: ChatTemplate, ids: Sequence[int], start: int, turn: int, conversation: Conversation) -> int:
    """End (exclusive) of an answer that begins at `start`: after the last token that ends a turn. Only white space may
    follow. A turn that calls tools may end with another token. Raises: Inexact."""
    usual = len(ids) - len(template.behind_turn_end)
    if usual > start and ids[usual - 1] == template.end and list(ids[usual:]) == template.behind_turn_end:
        return usual
    calls = conversation.messages[turn].get("tool_calls")
    ends = {template.end, template.end_of_calls} if calls else {template.end}
    for end in range(len(ids), start, -1):
        token = ids[end - 1]
        if token in ends:
            return end
        if template.tokenizer.decode([token]).strip() or (calls and token in template.tokenizer.special_ids):
            break
    known = " or ".join(str(token) for token in sorted(ends))
    raise Inexact(
        f"message {turn + 1} ('assistant') does not end with token {known}, by which the chat template ends answers "
        f"elsewhere, but with {_shown(template.tokenizer.decode(ids[start:])[-30:])}; correct the template, or give "
        "another one (data.chat_template)"
    )


def _require_in_marks(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], written: WrittenPart
) -> None:
    """Raises: Inexact where a part of a learnt answer is written outside the template's marks, or another message
    inside."""
    marked = template.marked_places(conversation)
    for first, behind, part in written.spans:
        role = "assistant" if part.message is None else conversation.roles[part.message]
        if role != "assistant" and any(start < behind and first < end for start, end in marked):
            raise Inexact(
                f"message {(part.message or 0) + 1} ({role!r}) is written inside the marks {{% generation %}} of the "
                "chat template, and would be learnt; put them around nothing but what the assistant says"
            )
    for turn in turns:
        first, behind = written.places.get(turn, (0, 0))
        if behind and marked and not any(start <= first and behind <= end for start, end in marked):
            raise Inexact(
                f"a part of message {turn + 1} ('assistant') is written outside the marks {{% generation %}} of the "
                "chat template, and would not be learnt; put them around all that the assistant says"
            )


def _by_marks(template: ChatTemplate, conversation: Conversation, turns: Sequence[int], loss_on: LossOn) -> Answered:
    """Find the answers between {% generation %} and {% endgeneration %}."""
    ids, runs = _marked_runs(template, conversation)
    if not runs:
        raise Inexact(
            "the chat template marks nothing of this conversation with {% generation %}, so that there would be "
            "nothing to learn; put the marks around what the assistant says"
        )
    if template.turn_end is None:
        first, end = runs[-1]
        if len(turns) > 1:
            raise Inexact("the chat template writes no token that ends a turn; set data.loss_on to last")
        return Answered([*ids[:end], template.tokenizer.eos_id], [first, end + 1])
    chosen = runs[-1:] if loss_on == "last" else _runs_of(template, conversation, turns, runs)
    stretches = [edge for run in chosen for edge in (run[0], _end_of_mark(template, ids, run))]
    return Answered(ids[: stretches[-1]], stretches)


def _marked_runs(template: ChatTemplate, conversation: Conversation) -> tuple[list[int], list[tuple[int, int]]]:
    """All ids, and start and end of each marked run."""
    ids, marks = template.marked(conversation)
    runs, start = list[tuple[int, int]](), 0
    for marked, group in itertools.groupby(marks):
        length = len(list(group))
        if marked:
            runs.append((max(start, 1), start + length))
        start += length
    return ids, runs


def _runs_of(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], runs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Runs of the learnt messages. Raises: Inexact where runs cannot be assigned to messages."""
    every = _turns(conversation)
    if len(turns) == len(every):
        return runs
    for count, turn in enumerate(every, 1):
        if len(_marked_runs(template, conversation.before(turn + 1))[1]) != count:
            raise Inexact(
                f"the chat template does not mark message {turn + 1} ('assistant') as one stretch, so that it cannot "
                "be told which marks belong to the messages with weight 0; leave weight out of this record, or give "
                "another template (data.chat_template)"
            )
    return [runs[every.index(turn)] for turn in turns]


def _end_of_mark(template: ChatTemplate, ids: Sequence[int], run: tuple[int, int]) -> int:
    """End of a run: after the token that ends the turn. Raises: Inexact where the mark leaves that token out."""
    start, end = run
    for behind in range(end, start, -1):
        if ids[behind - 1] in template.tokenizer.special_ids:
            return behind
        if template.tokenizer.decode([ids[behind - 1]]).strip():
            break
    raise Inexact(
        f"the mark {{% generation %}} ends with {_shown(template.tokenizer.decode(ids[start:end])[-30:])}, before "
        f"token {template.end} that ends a turn, which the model would never learn to write; put {{% endgeneration "
        "%} behind it in a template of your own (data.chat_template)"
    )


def _otherwise(asked: str, whole: str, turn: int) -> str:
    same = _common(asked, whole)
    return (
        f"where message {turn + 1} ('assistant') is asked for, the chat template writes {_shown(asked[same:])}; in the "
        f"whole conversation it writes {_shown(whole[same:])} there, so that the answer's tokens cannot be told from "
        "the rest. Mark them with {% generation %} in a template of your own (data.chat_template); or choose "
        "variables with which both agree (data.template_args); or leave such records out (data.inexact: skip)"
    )


def _changes(so_far: str, whole: str, turn: int) -> str:
    same = _common(so_far, whole)
    return (
        f"message {turn + 1} ('assistant') is written differently when others follow: {_shown(so_far[same:])} becomes "
        f"{_shown(whole[same:])}, so that it cannot be learnt as it is asked for; set data.loss_on to last, or leave "
        "such records out (data.inexact: skip)"
    )


def _elsewhere(turn: int) -> str:
    return (
        f"a part of message {turn + 1} ('assistant') is written elsewhere than where that answer is asked for, and "
        "would not be learnt with it; give another template (data.chat_template), or leave such records out "
        "(data.inexact: skip)"
    )


def _merged(turn: int, verb: str, what: str, advice: str) -> str:
    return (
        f"message {turn + 1} ('assistant') {verb} with characters that the tokenizer merges with {what}, so that there "
        f"is no border of tokens between; {advice}, or leave such records out (data.inexact: skip)"
    )


def _common(first: str, second: str) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...") if text else "nothing"
