"""Chat templates as programs: the names that they read, and rendering without transformers for SentencePiece models.

The environment is that of transformers (sandboxed; blocks without line breaks; `raise_exception`, `strftime_now`,
`tojson` without HTML), so a template means the same in both.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

STANDARD_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a template may be given without naming them."""


class GenerationMarks(Extension):
    """Jinja extension for `{% generation %}...{% endgeneration %}`, with which transformers marks the assistant's text.
    Here the block is just its content."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a scope of its own, as transformers has it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatProgram:
    """A chat template, parsed. Raises: ValueError for one that jinja2 cannot read."""

    def __init__(self, text: str) -> None:
        try:
            tree = _environment().parse(text)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is no template: TemplateSyntaxError: {error} (line {error.lineno}); correct it"
            ) from error
        self._text = text
        self.strings = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        """All strings in the code: texts that it looks for, and keys that it reads."""
        self._words = {*self.strings, *(node.attr for node in tree.find_all(nodes.Getattr))}
        self._words |= {node.name for node in tree.find_all(nodes.Name)}
        self.has_marks = next(tree.find_all(nodes.Scope), None) is not None
        """True where the template has `{% generation %}`, the mark of the assistant's text."""

    def names(self, word: str) -> bool:
        """Tell whether the template reads a variable, attribute or key of this name, or compares with this text."""
        return word in self._words

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render the messages. Raises: errors of the template."""
        return _compiled(self._text).render(messages=messages, **variables)


@functools.lru_cache(maxsize=8)
def program_of(text: str) -> ChatProgram:
    """The parsed template, from a cache. Raises: ValueError as `ChatProgram`."""
    return ChatProgram(text)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@functools.lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    return _environment().from_string(text)
