"""Check of a call's arguments against the description of the tool. The package jsonschema does the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST = 3
"""Problems that are named."""


class ArgumentCheck:
    """Check for one tool."""

    def __init__(self, schema: Mapping[str, Any], *, closed: bool) -> None:
        """
        schema: JSON schema of the arguments
        closed: whether arguments that the schema does not name are wrong, even if the schema does not say so
        """
        from jsonschema import Draft202012Validator
        from jsonschema.validators import validator_for
        from referencing import Registry

        self._schema = _with_nulls(schema)
        if closed:
            self._schema = {"additionalProperties": False, **self._schema}
        validator = validator_for(self._schema, default=Draft202012Validator)
        self._validator = validator(self._schema, registry=Registry())  # fetches no schema of others

    def problems(self, arguments: Mapping[str, Any]) -> str:
        """Reasons why the arguments are wrong, in words for the model; empty if they are right."""
        try:
            errors = list(self._validator.iter_errors(dict(arguments)))
        except Exception as error:  # noqa: BLE001 - a reference that leads nowhere, a number that is too large
            return f"they cannot be compared with the tool's schema ({type(error).__name__})"
        words = [f"{'.'.join(map(str, error.absolute_path))}: {error.message}".removeprefix(": ") for error in errors]
        return "; ".join(word if len(word) < 300 else f"{word[:297]}..." for word in words[:_MOST])

    def whole(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with whole numbers such as 3.0 as int where the schema asks for integers."""
        whole: dict[str, Any] = _whole(dict(arguments), self._schema)
        return whole


def _whole(value: Any, schema: Any) -> Any:
    """The value with int for float where the schema asks for integers."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, float):
        return int(value) if _is_integer(schema) and value.is_integer() else value
    if isinstance(value, list):
        return [_whole(part, schema.get("items")) for part in value]
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        return {
            key: _whole(part, properties.get(key, schema.get("additionalProperties"))) for key, part in value.items()
        }
    return value


def _is_integer(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind)


def _with_nulls(schema: Any) -> Any:
    """The schema with `nullable`, which transformers writes for `X | None`, as a type of JSON schema."""
    if isinstance(schema, list):
        return [_with_nulls(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {key: _with_nulls(part) for key, part in schema.items()}
    if parts.get("nullable") is True:
        del parts["nullable"]
        if isinstance(kind := parts.get("type"), str):
            parts["type"] = [kind, "null"]
        if isinstance(values := parts.get("enum"), list):
            parts["enum"] = [*values, None]
        if isinstance(either := parts.get("anyOf"), list):
            parts["anyOf"] = [*either, {"type": "null"}]
    return parts
