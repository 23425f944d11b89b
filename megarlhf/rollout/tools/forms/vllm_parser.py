"""vLLM's parsers of calls, by their names. vLLM is imported when one is loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megarlhf.rollout.tools.forms.scan import Broken, Found, Tool, made_call, unreadable, whole_json, without_thoughts

_ATTRIBUTE = re.compile(r"(?:tool_calls?_start_token|tool_start_token|bot_token|bot_string|tc_start)$")
_CONSTANT = re.compile(r"_?(?:TOOL_CALLS?_(?:START|PREFIX)|FUNCTION_CALLS_OPEN)$")
_OTHER_FORM = {"openai": "gptoss"}
"""Names that stand for something else than a parser of texts, and the form of ours that reads them."""


def load_vllm_parser(name: str, tokenizer_directory: str | Path) -> Callable[[str, Sequence[Tool]], Found]:
    """A parser of vLLM as a function like `parse`: text of a turn and descriptions of tools -> calls.

    Thoughts are cut out first. A turn that has the mark of a call, in which vLLM finds none, is `Unreadable`.

    Raises: ValueError for a name that vLLM does not know, and a tokenizer that lacks the tokens of the form.
    """
    from vllm.tokenizers import get_tokenizer
    from vllm.tool_parsers import ToolParserManager

    known = ToolParserManager.list_registered()
    if name in _OTHER_FORM or name not in known:
        hint = f"use the form {_OTHER_FORM[name]}" if name in _OTHER_FORM else f"the known ones are {', '.join(known)}"
        raise ValueError(f"vLLM has no parser of texts that is called {name!r}; {hint}")
    kind = ToolParserManager.get_tool_parser(name)
    tokenizer = get_tokenizer(str(tokenizer_directory))

    try:
        marks = sorted(set(_marks(kind(tokenizer, None))))
    except Exception as error:  # each parser raises what it likes
        raise ValueError(
            f"vLLM's parser {name} cannot be used with the tokenizer of {tokenizer_directory}: {error}; choose the "
            "parser of this model"
        ) from error

    def read(text: str, tools: Sequence[Tool]) -> Found:
        shown = without_thoughts(text)
        try:
            found = _calls(kind, tokenizer, shown, tools)
        except Exception as error:  # noqa: BLE001 - as above; a text must not end the worker
            return [unreadable(shown, f"vLLM's parser {name} cannot read it: {error}")]
        mark = next((mark for mark in marks if mark in shown), None)
        if found or mark is None:
            return found
        return [unreadable(shown[shown.index(mark) :], f"{mark} is there, but no call that the parser {name} can read")]

    return read


def _calls(kind: Any, tokenizer: Any, text: str, tools: Sequence[Tool]) -> Found:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    messages = [{"role": "user", "content": ""}]
    request = ChatCompletionRequest(messages=messages, tools=[dict(tool) for tool in tools] or None)
    parser = kind(tokenizer, request.tools)  # a new one for each text: some keep what they have read
    extracted = parser.extract_tool_calls(text, request)
    found: Found = []
    for call in extracted.tool_calls:
        written = call.function.arguments or "{}"
        try:
            id_written = call.id if call.id and call.id in text else None  # vLLM makes one up where there is none
            found.append(made_call(call.function.name, whole_json(written), id_written))
        except Broken as broken:
            found.append(unreadable(written, broken.why))
    return found


def _marks(parser: Any) -> Iterator[str]:
    """Texts that open a call, as far as the parser names them."""
    module = sys.modules[type(parser).__module__]
    for owner, pattern in ((parser, _ATTRIBUTE), (module, _CONSTANT)):
        for name in filter(pattern.match, dir(owner)):
            if isinstance(mark := getattr(owner, name), str) and mark:
                yield mark
    if config := getattr(getattr(parser, "_parser_engine", None), "parser_engine_config", None):
        for (state, terminal), transition in config.transitions.items():
            opens = state.name == "CONTENT" and transition.next_state.name.startswith("TOOL")
            if opens and (mark := config.terminal_literal(terminal)):
                yield mark
