"""Forms in which models write calls of tools, and their parsers. Only the standard library is imported.

    >>> parse("hermes", '<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>', [])
    [Call(name='add', arguments={'a': 1}, id=None)]

Thoughts are never read. A call that was begun and cannot be read is `Unreadable`, with a reason for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarlhf.rollout.tools.call import Call, Unreadable
from megarlhf.rollout.tools.forms import json_forms, literal_forms, text_forms
from megarlhf.rollout.tools.forms.scan import Found, Tool

FORMS: Mapping[str, Callable[[str, Sequence[Tool]], Found]] = {
    "hermes": json_forms.hermes,
    "qwen3_xml": text_forms.qwen3_xml,
    "glm": text_forms.glm,
    "llama3_json": json_forms.llama3_json,
    "pythonic": literal_forms.pythonic,
    "mistral": json_forms.mistral,
    "deepseek_v3": json_forms.deepseek_v3,
    "gptoss": json_forms.gptoss,
    "gemma4": literal_forms.gemma4,
    "kimi_k2": json_forms.kimi_k2,
    "granite": json_forms.granite,
    "phi4": json_forms.phi4,
}
"""Parsers by the name of the form."""


def parse(form: str, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call | Unreadable]:
    """Calls in the text of a turn, in their order; [] where there is none.

    form: a key of `FORMS`
    text: the turn, with the texts of its special tokens. The token that ended it may be left out. Where the prompt has
        opened a thought, put its mark (`<think>`) before the text, or a turn that was cut in its thought might call.
    tools: descriptions `{"type": "function", "function": {"name", "parameters", ...}}`, which give the arguments of
        forms without types (qwen3_xml, glm) their types

    Raises: ValueError for an unknown form; never for a text.
    """
    if form not in FORMS:
        raise ValueError(f"the form of calls is {form!r}; the known ones are {', '.join(FORMS)}, or vllm:NAME")
    return FORMS[form](text, tools)
