"""Finds what a chat template leaves out of a conversation, or changes in it.

The conversation is rendered a second time, with every text (a message, a thought, an argument of a call) replaced by a
text of the same length: a run of one character that stands for this text alone. The two renderings must agree up to
these runs, and each run must be complete. So a text counts as written only if the output really depends on it. A plain
search for the text would not show that: two texts may be equal, or one may be "4".

White space around a text becomes other white space. The template's own strings in a text, such as `</think>`, stay,
since the template may look for them. So the template takes the same path in both renderings.
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
"""Renders messages and tools by the template."""
Stretches = list[tuple[int, int, RequiredText]]
"""Start and end (exclusive) in the rendered text of a stretch that belongs to a part."""
Places = dict[int, tuple[int, int]]
"""Start and end (exclusive) in the rendered text of each message that is written, at least in part."""


@dataclass(frozen=True)
class WrittenPart:
    """The parts of a conversation that a rendered text contains, and the omissions."""

    omissions: list[Omission]
    stretches: Stretches

    @property
    def spans(self) -> Stretches:
        """The stretches. Those of a part that is written once are joined, from its first to its last character."""
        by_part: dict[int, Stretches] = {}
        for stretch in self.stretches:
            by_part.setdefault(id(stretch[2]), []).append(stretch)
        spans = Stretches()
        for stretches in by_part.values():
            firsts, ends, parts = zip(*stretches, strict=True)
            is_written_once = len(stretches) == len(parts[0].runs)
            spans += [(min(firsts), max(ends), parts[0])] if is_written_once else stretches
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
    """Find the messages in `text`, which `render` has written. `kept`: see `kept_strings`. Raises: errors of the
    template."""
    first: WrittenPart | ValueError
    try:
        first = _compared(text, render, messages, tools, Replaced(kept))
        if not any(omission.kind in ("tool_calls", "tools") for omission in first.omissions):
            return first
    except ValueError as error:  # of a template that looks up the name of a tool
        first = error
    bare = [{key: part for key, part in message.items() if key != "tool_calls"} for message in messages]
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
    second = render([replaced.message(index, message) for index, message in enumerate(messages)], replaced.tools(tools))
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
    """Tell whether the template writes a system message except commands that change something else, such as SmolLM3's
    `/no_think`."""
    if _squeezed(part.without_commands(part.replaced)) not in squeezed:
        return False
    changed = [dict(message) for message in messages]
    assert part.message is not None, "descriptions of tools have no commands"
    changed[part.message][part.key] = part.without_commands(part.text)
    return render(changed, tools) != text


def _compare_without_white_space(text: str, second: str, replaced: Replaced) -> WrittenPart:
    """Compare renderings that also differ outside of the runs."""
    squeezed = _squeezed(second)
    aligned, wrong = _aligned(_squeezed(text), squeezed, replaced.runs, spell=_squeezed_spellings)
    if aligned is None:
        part = replaced.runs[wrong].part if wrong else replaced.parts[0]
        return WrittenPart([part.omission()], [])
    positions = [position for position, character in enumerate(text) if not character.isspace()]
    moved = {
        key: [(positions[first], positions[end - 1] + 1) for first, end in places] for key, places in aligned.items()
    }
    incomplete = [part for part in replaced.parts if not _is_whole(part, second, aligned)]
    omissions = [_omission(part, squeezed) for part in incomplete]
    if not omissions:  # white space within a text
        wrong = _aligned(text, second, replaced.runs)[1]
        omissions = [(replaced.runs[wrong].part if wrong else replaced.parts[0]).omission("white_space")]
    return WrittenPart(omissions, _stretches(moved, replaced.runs))


_Aligned = dict[str, list[tuple[int, int]]]
"""Start and end in the first rendering of what each run stands for, by the run's key."""


def _aligned(
    text: str, second: str, runs: Mapping[str, CharacterRun], spell: Callable[[Any], Iterator[str]] | None = None
) -> tuple[_Aligned | None, str]:
    """Align two renderings. None where they differ outside of whole runs, with the key of the run before the difference
    (or of the first run)."""
    places, spell = _Aligned(), spell or _spellings
    occurrences = [(key, match) for match in RUN.finditer(second) if (key := match.group(1) or match.group()) in runs]
    if not occurrences:
        return ({} if text == second else None), ""
    last, start = occurrences[0][0], occurrences[0][1].start()
    if not text.startswith(second[:start]):
        return None, last
    ends = [*(match.start() for _, match in occurrences[1:]), len(second)]
    for (key, match), end in zip(occurrences, ends, strict=True):
        run, last = runs[key], key
        times, rest = divmod(len(match.group()), run.size)
        for repetition in range(times):
            behind = second[match.end() : end] if repetition + 1 == times else ""
            spelled = next(
                (spelling for spelling in spell(run.value) if text.startswith(spelling + behind, start)), None
            )
            if spelled is None:
                return None, last
            places.setdefault(key, []).append((start, start + len(spelled)))
            start += len(spelled) + len(behind)
        if rest:
            return None, last
    return (places if start == len(text) else None), last


def _spellings(value: Any) -> Iterator[str]:
    """Forms in which a template may write a value: as it is, JSON, Python's, JSON within JSON, in apostrophes."""
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
    """The omission of an incomplete part. `squeezed`: the second rendering without white space."""
    if any(_squeezed(spelled) in squeezed for spelled in _spellings(part.replaced)):
        return part.omission("white_space")
    answer = None if part.answer_from is None else part.replaced[part.answer_from :]
    if part.kind == "messages" and part.role == "assistant" and answer is not None and _squeezed(answer) in squeezed:
        return part.omission("thoughts")
    return part.omission()


def _squeezed(text: str) -> str:
    """Remove all white space."""
    return "".join(text.split())


def _stretches(aligned: _Aligned, runs: Mapping[str, CharacterRun]) -> Stretches:
    return [(first, end, runs[key].part) for key, places in aligned.items() for first, end in places]
