"""Omissions of a chat template, as refusals or as descriptions to count."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["white_space", "thoughts", "messages", "tool_calls", "tools"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Omission:
    """A part of a conversation that is not written as it is given."""

    kind: Kind
    message: int | None
    """Index of the message. None for the descriptions of tools."""
    key: str
    """Key of the message or of a description."""
    text: str
    """The text under the key. A part of it may be written."""


class NotWritten(ValueError):
    """The template leaves out something that it may not."""


_WHAT: Mapping[Kind, str] = {
    "white_space": "white space",
    "thoughts": "a thought",
    "messages": "a message, or a part of one",
    "tool_calls": "a call of a tool, or a part of one",
    "tools": "a description of a tool, or a part of one",
}


def require_written(
    omissions: Sequence[Omission], roles: Sequence[str], may_drop: Collection[Kind], learnt: Collection[int] = ()
) -> tuple[str, ...]:
    """Descriptions of what was left out, to be counted. Empty where everything is written.

    learnt: indices of learnt messages; at most white space may be missing of them

    Raises: NotWritten for a part that may not be left out.
    """
    for omission in omissions:
        is_learnt = omission.message in learnt and omission.kind != "white_space"
        if omission.kind not in may_drop or is_learnt:
            kinds = {omission.kind for omission in omissions}
            raise NotWritten(_refusal(omission, roles, None if is_learnt else sorted({*may_drop, *kinds})))
    left_out = sorted({omission.kind for omission in omissions})
    return tuple(f"without {_WHAT[kind]} that the chat template leaves out or changes" for kind in left_out)


def _refusal(omission: Omission, roles: Sequence[str], would_do: Sequence[Kind] | None) -> str:
    """`would_do`: value of `template_may_drop` that allows the record; None for a learnt answer."""
    where = "tools" if omission.message is None else f"message {omission.message + 1} ({roles[omission.message]!r})"
    shown = repr(omission.text if len(omission.text) <= 80 else omission.text[:77] + "...")
    what = "leaves out or changes white space of" if omission.kind == "white_space" else "does not write all of"
    changed = f"{where}: the chat template {what} its {omission.key} {shown}"
    if would_do is None:
        return (
            f"{changed}, so that the answer would not be learnt as it is given. Give a template that writes it "
            "(data.chat_template), or change the data, or leave such records out (data.inexact: skip)"
        )
    return (
        f"{changed}. Give a template that writes it (data.chat_template), or change the data; or leave it out, "
        f"counted: data.template_may_drop: [{', '.join(would_do)}]; or leave such records out: data.inexact: skip"
    )
