"""The ready environment of a list of tools: calls in a turn are executed, and their results follow as messages.

The model's text is only read. What it has sampled stays in the context as it is, and no call is written anew. Only the
standard library is imported at the top.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarlhf.rollout.environments.answer import Answer, Turn
from megarlhf.rollout.environments.tools.toolbox import ToolBox
from megarlhf.rollout.tools.call import Call, ToolError, Unreadable
from megarlhf.rollout.tools.forms import parse
from megarlhf.rollout.tools.start import ToolsStart

MAX_CALLS = 16
"""Most calls of one turn that are executed."""
_KEY = 200
"""Most characters of the name and of the id that the model gave a call."""

Parse = Callable[[str], list[Call | Unreadable]]


class ToolEnvironment:
    """Tools in a conversation.

    - A turn without a call ends the conversation: it is the model's answer.
    - A turn that was cut is never read for calls.
    - Calls are executed one after the other, in the order of the text. Each gets one message with the role `tool`: its
      result, or `error: ...` for a call that cannot be read, an unknown tool, wrong arguments, or a call that failed.
    - The calls of the last turn that the limits allow are not executed, since nobody would read their results.
    """

    def __init__(self, box: ToolBox, parse: Parse, start: ToolsStart) -> None:
        self._box, self._parse, self._start = box, parse, start
        self._special = _pattern(start.special)

    def reset(self, fields: Mapping[str, Any], seed: int) -> None:
        """Begin a conversation: nothing follows the prompt, which has the descriptions of the tools."""

    async def step(self, turn: Turn) -> Answer:
        """Results of the calls in a turn."""
        if not turn.finished:
            return Answer()
        calls = self._parse(turn.opened + turn.text)
        if turn.last:
            return Answer([self._message("error: no turn is left for a result")] if calls else ())
        return Answer([await self._result(call, number) for number, call in enumerate(calls)])

    async def _result(self, call: Call | Unreadable, number: int) -> dict[str, Any]:
        """Message with the result of a call."""
        if isinstance(call, Unreadable):
            return self._message(f"error: this call cannot be read: {call.why}")
        try:
            if number >= MAX_CALLS:
                raise ToolError(f"not executed: a turn has at most {MAX_CALLS} calls")
            text = await self._box.call(call)
        except ToolError as error:
            text = f"error: {error}"
        return self._message(text, call)

    def _message(self, text: str, call: Call | None = None) -> dict[str, Any]:
        known = {} if call is None else {"name": call.name, "tool_call_id": call.id}
        keys = {key: self._harmless(str(known[key]), _KEY) for key in self._start.keys if known.get(key)}
        return {"role": "tool", **keys, "content": self._harmless(text, self._start.max_characters) or "(empty)"}

    def _harmless(self, text: str, most: int) -> str:
        """A text as the model may read it: no half characters, not too long, and nothing that the tokenizer would take
        for a special token: that gets a space behind its first character."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        if len(text) > most:
            text = f"{text[:most]}... (the first {most:,} of {len(text):,} characters)"
        if self._special is not None:
            text = self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        return text


def _pattern(special: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern of the special tokens that a text could contain by itself."""
    texts = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def parser_of(start: ToolsStart) -> Parse:
    """The parser of turns. Raises: ValueError for a parser that vLLM does not know."""
    descriptions = start.descriptions
    if start.form.startswith("vllm:"):
        from megarlhf.rollout.tools.forms.vllm_parser import load_vllm_parser

        read = load_vllm_parser(start.form.removeprefix("vllm:"), start.tokenizer)
        return lambda text: read(text, descriptions)
    return lambda text: parse(start.form, text, descriptions)
