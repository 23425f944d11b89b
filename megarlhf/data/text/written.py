"""Finds what a chat template leaves out of a conversation, or changes in it.

The conversation is rendered once more with every text of it (a message, a thought, an argument of a call) replaced by
another one of the same length: a run of one character that stands for this text alone. Both renderings have to be the
same up to those runs, and each run has to be there whole. So a text counts as written only if it decides what stands
in its place, which a search for it would not show where two texts are equal or one is "4".

White space around a text becomes other white space. Strings of the template's own in it, such as `</think>`, stay as
they are, for the template may look for them. So it takes the same way through both.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarlhf.data.text.omissions import Omission
from megarlhf.data.text.replaced import RUN, CharacterRun, Message, Replaced, RequiredText, Tools

Render = Callable[[list[dict[str, Any]], Tools | None], str]
"""The text of messages and tools, as the template writes them."""
Stretches = list[tuple[int, int, RequiredText]]
"""Where something of a part stands in the rendered text: its first character, and the one behind its last."""
Places = dict[int, tuple[int, int]]
"""Of each message of which something is written: its first character in the rendered text, and the one behind its
last."""


@dataclass(frozen=True)
class WrittenPart:
    """The part of a conversation that a rendered text has."""

    omissions: list[Omission]
    stretches: Stretches

    @property
    def spans(self) -> Stretches:
        """The stretches; of a part that is written once, all from its first to its last character as one."""
        by_part: dict[int, Stretches] = {}
        for stretch in self.stretches:
            by_part.setdefault(id(stretch[2]), []).append(stretch)
        spans = Stretches()
        for found in by_part.values():
            part = found[0][2]
            once = len(found) == len(part.runs)
            spans += [(min(first for first, _, _ in found), max(end for _, end, _ in found), part)] if once else found
        return spans

    @functools.cached_property
    def places(self) -> Places:
        """Places of the messages."""
        places: Places = {}
        for first, end, part in self.stretches:
            if part.message is not None:
                before = places.get(part.message, (first, end))
                places[part.message] = (min(before[0], first), max(before[1], end))
        return places


def compare(
    text: str,
    render: Render,
    messages: Sequence[Message],
    tools: Tools | None,
    kept: re.Pattern[str] | None,
) -> WrittenPart:
    """Find the messages in `text`, as `render` has written them. `kept`: see `kept_strings`. Raises: what the
    template raises."""
    first: WrittenPart | ValueError
    try:
        first = _compared(text, render, messages, tools, Replaced(kept))
        if not any(omission.kind in ("tool_calls", "tools") for omission in first.omissions):
            return first
    except ValueError as error:  # a template that looks up the name of a tool
        first = error
    bare = [{key: part for key, part in each.items() if key != "tool_calls"} for each in messages]
    with contextlib.suppress(ValueError):
        again = _compared(text, render, messages, tools, Replaced(kept, literal=True))
        if not again.omissions and (bare == list(messages) or render(bare, tools) != text):
            return again
    if isinstance(first, ValueError):
        raise first
    return first


def _compared(
    text: str, render: Render, messages: Sequence[Message], tools: Tools | None, replaced: Replaced
) -> WrittenPart:
    second = render([replaced.message(n, each) for n, each in enumerate(messages)], replaced.tools(tools))
    aligned, _ = _aligned(text, second, replaced.runs)
    if aligned is None:
        return _compare_without_white_space(text, second, replaced)
    incomplete = [part for part in replaced.parts if not _is_whole(part, second, aligned)]
    squeezed = _squeezed(second) if incomplete else ""
    omissions = [
        _omission(part, squeezed)
        for part in incomplete
        if not (part.commands and _obeys(text, render, messages, tools, part, squeezed))
    ]
    return WrittenPart(omissions, _stretches(aligned, replaced.runs))


def _obeys(
    text: str, render: Render, messages: Sequence[Message], tools: Tools | None, part: RequiredText, squeezed: str
) -> bool:
    """Tell whether the template writes all of a system message but commands that change something else: SmolLM3's
    `/no_think`."""
    if _squeezed(part.without_commands(part.replaced)) not in squeezed:
        return False
    changed = [dict(message) for message in messages]
    assert part.message is not None, "descriptions of tools have no commands"
    changed[part.message][part.key] = part.without_commands(part.text)
    return render(changed, tools) != text


def _compare_without_white_space(text: str, second: str, replaced: Replaced) -> WrittenPart:
    """Compare renderings that differ elsewhere than in the runs."""
    squeezed = _squeezed(second)
    aligned, wrong = _aligned(_squeezed(text), squeezed, replaced.runs, spell=_squeezed_spellings)
    if aligned is None:
        part = replaced.runs[wrong].part if wrong else replaced.parts[0]
        return WrittenPart([part.omission()], [])
    numbers = [number for number, character in enumerate(text) if not character.isspace()]
    moved = {key: [(numbers[first], numbers[end - 1] + 1) for first, end in found] for key, found in aligned.items()}
    incomplete = [part for part in replaced.parts if not _is_whole(part, second, aligned)]
    omissions = [_omission(part, squeezed) for part in incomplete]
    if not omissions:  # white space within a text
        wrong = _aligned(text, second, replaced.runs)[1]
        omissions = [(replaced.runs[wrong].part if wrong else replaced.parts[0]).omission("white_space")]
    return WrittenPart(omissions, _stretches(moved, replaced.runs))


_Aligned = dict[str, list[tuple[int, int]]]
"""Where the first rendering has what each run stands for."""


def _aligned(
    text: str, second: str, runs: Mapping[str, CharacterRun], spell: Callable[[Any], Iterator[str]] | None = None
) -> tuple[_Aligned | None, str]:
    """None where the renderings differ elsewhere than in whole runs, with the key of the run before that place, or
    where it is the first, of that one."""
    places, spell = _Aligned(), spell or _spellings
    found = [(key, match) for match in RUN.finditer(second) if (key := match.group(1) or match.group()) in runs]
    if not found:
        return ({} if text == second else None), ""
    last, start = found[0][0], found[0][1].start()
    if not text.startswith(second[:start]):
        return None, last
    ends = [*(match.start() for _, match in found[1:]), len(second)]
    for (key, match), end in zip(found, ends, strict=True):
        run, last = runs[key], key
        times, rest = divmod(len(match.group()), run.size)
        for number in range(times):
            behind = second[match.end() : end] if number + 1 == times else ""
            spelled = next((each for each in spell(run.value) if text.startswith(each + behind, start)), None)
            if spelled is None:
                return None, last
            places.setdefault(key, []).append((start, start + len(spelled)))
            start += len(spelled) + len(behind)
        if rest:
            return None, last
    return (places if start == len(text) else None), last


def _spellings(value: Any) -> Iterator[str]:
    """How a template may write a value: as it is, as JSON, as Python writes it, as JSON within JSON, in apostrophes."""
    if not isinstance(value, str):
        yield from (json.dumps(value), str(value))
        return
    yield value
    if value.isascii() and value.isprintable() and not any(mark in value for mark in "\"'\\"):
        return
    quoted = json.dumps(value, ensure_ascii=False)[1:-1]
    yield from (quoted, json.dumps(value)[1:-1], repr(value)[1:-1], json.dumps(quoted, ensure_ascii=False)[1:-1])
    yield quoted.replace('\\"', '"').replace("'", "\\'")


def _squeezed_spellings(value: Any) -> Iterator[str]:
    return map(_squeezed, _spellings(value))


def _is_whole(part: RequiredText, second: str, aligned: _Aligned) -> bool:
    if any(run not in aligned for run in part.runs):
        return False
    is_one_run = len(part.runs) == 1 and part.replaced.strip(part.runs[0]) == ""
    return is_one_run or any(spelled in second for spelled in _spellings(part.replaced))


def _omission(part: RequiredText, squeezed: str) -> Omission:
    """The omission of a part that is not whole; `squeezed`: the second rendering without white space."""
    if any(_squeezed(spelled) in squeezed for spelled in _spellings(part.replaced)):
        return part.omission("white_space")
    answer = None if part.answer_from is None else part.replaced[part.answer_from :]
    if part.kind == "messages" and part.role == "assistant" and answer is not None and _squeezed(answer) in squeezed:
        return part.omission("thoughts")
    return part.omission()


def _squeezed(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


def _stretches(aligned: _Aligned, runs: Mapping[str, CharacterRun]) -> Stretches:
    return [(first, end, runs[key].part) for key, found in aligned.items() for first, end in found]
