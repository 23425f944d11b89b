"""Forms that write the arguments of a call as text. The descriptions of the tools give them their types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarlhf.rollout.tools.forms.scan import Broken, Found, Read, Tool, expect, made_call, near, scan, whole_json

Schema = Mapping[str, Any]
_DRAFT = re.compile(r"<tool_call>|</tool_call>|</think>")
"""Marks in a value that show that the end of the value was left out, or that it was a draft in a thought."""
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
_NAME = re.compile(r"\s*([^\s<>{}]+)\s*")
_ARGUMENT = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</tool_call>)", re.DOTALL
)


def qwen3_xml(text: str, tools: Sequence[Tool]) -> Found:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, with line breaks between"""

    def read(text: str, position: int) -> tuple[Found, int]:
        if not (head := _FUNCTION.match(text, position)):
            raise Broken(f"expected <function=NAME> {near(text, position)}", position)
        texts, end = _texts_of(text, head.end(), _PARAMETER, "<parameter=", "<parameter=KEY>\nVALUE\n</parameter>")
        values = {key: value.removeprefix("\n").removesuffix("\n") for key, value in texts.items()}
        end = expect(text, expect(text, end, "</function>"), "</tool_call>")
        return [made_call(head[1], _typed_all(values, head[1], tools))], end

    return scan(
        text, r"<tool_call>|(?=<function=[^>\s]+>\s*(?:<parameter=|</function>))", "</tool_call>", _tagged(read)
    )


def _tagged(read: Read) -> Read:
    """A reader that refuses a call without `<tool_call>`."""

    def tagged(text: str, position: int) -> tuple[Found, int]:
        if not text.endswith("<tool_call>", 0, position):
            raise Broken("<tool_call> is missing before <function=", position + 1)
        found: tuple[Found, int] = read(text, position)
        return found

    return tagged


def glm(text: str, tools: Sequence[Tool]) -> Found:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with or without line breaks"""

    def read(text: str, position: int) -> tuple[Found, int]:
        if not (head := _NAME.match(text, position)):
            raise Broken(f"the name of the call is missing {near(text, position)}", position)
        pair = "<arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value>"
        texts, end = _texts_of(text, head.end(), _ARGUMENT, "<arg_key>", pair)
        end = expect(text, end, "</tool_call>")
        return [made_call(head[1], _typed_all(texts, head[1], tools))], end

    return scan(text, "<tool_call>", "</tool_call>", read)


def _texts_of(text: str, position: int, pattern: re.Pattern[str], begin: str, form: str) -> tuple[dict[str, str], int]:
    """Arguments from `position` on as texts, and the position behind them. Raises: Broken."""
    texts: dict[str, str] = {}
    while text.startswith(begin, position):
        match = pattern.match(text, position)
        if match is None or (_DRAFT.search(match[2]) and not _is_balanced(match[2])):
            raise Broken(f"an argument is not closed, expected {form}: {near(text, position)}", position)
        key = match[1].strip()
        if key in texts:
            raise Broken(f"the argument {key!r} is repeated", match.end())
        texts[key] = match[2]
        position = match.end()
    return texts, position


def _is_balanced(value: str) -> bool:
    """Tell whether each mark in a value has its counterpart, as in a text about calls."""
    if re.search(r"</function>\s*</tool_call>\s*<tool_call>|</arg_value>\s*</tool_call>\s*<tool_call>", value):
        return False
    pairs = [("<tool_call>", "</tool_call>"), ("<think>", "</think>")]
    return all(value.count(a) == value.count(b) and value.find(a) <= value.find(b) for a, b in pairs)


def _typed_all(texts: Mapping[str, str], name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    parameters = _parameters_of(name, tools)
    properties = parameters.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    return {key: typed(text, schemas.get(key), parameters) for key, text in texts.items()}


def _parameters_of(name: str, tools: Sequence[Tool]) -> Schema:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def typed(text: str, schema: Any, whole: Schema) -> Any:
    """The value that a text stands for, by a JSON schema; `whole` resolves its references.

    A parameter of type string keeps its text; one of type integer reads "3" as 3. Without a type, the text is read as
    JSON if it is JSON. A text that does not have its type stays a text: the check of arguments tells the model so.
    """
    parts = list(_parts(schema, whole, depth=0))
    if any(text in part["enum"] for part in parts if isinstance(part.get("enum"), list)):
        return text
    types = {kind for part in parts for kind in _types(part)}
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if types and types <= {"string", "null"}:
        return text
    try:
        value = whole_json(text)
    except Broken:
        word = _WORDS.get(text.strip())
        return word if isinstance(word, bool) and "boolean" in types else text
    if not types or any(_has_type(value, kind) for kind in types - {"string"}):
        is_whole = isinstance(value, float) and "integer" in types and "number" not in types
        return int(value) if is_whole else value
    return text if "string" in types else value


def _parts(schema: Any, whole: Schema, depth: int) -> Iterator[Schema]:
    """A schema and those that it consists of."""
    if not isinstance(schema, Mapping) or depth > 4:
        return
    yield schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = whole
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, Mapping) else None
        yield from _parts(target, whole, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            yield from _parts(part, whole, depth + 1)


def _types(schema: Schema) -> Iterator[str]:
    """Types that a schema names, or that its values have."""
    named = schema.get("type")
    if isinstance(named, str | list):
        yield from (str(kind).lower() for kind in ([named] if isinstance(named, str) else named))
    elif isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else []), list):
        kinds = ("null", "boolean", "integer", "number", "string", "array", "object")
        yield from (next(kind for kind in kinds if _has_type(value, kind)) for value in values)
    if schema.get("nullable") is True:
        yield "null"


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    classes = {"null": type(None), "number": int | float, "string": str, "array": list, "object": dict}
    return kind in classes and isinstance(value, classes[kind])
