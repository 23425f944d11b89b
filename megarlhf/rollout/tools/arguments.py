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
        from referencing import Registry

        self._schema = _with_nulls(schema)
        if closed:
            self._schema = {"additionalProperties": False, **self._schema}
        self._validator = Draft202012Validator(self._schema, registry=Registry())  # fetches no schema of others

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
        properties = self._schema.get("properties") or {}
        integers = {key for key, part in properties.items() if isinstance(part, Mapping) and _is_integer(part)}
        return {
            key: int(value) if key in integers and isinstance(value, float) and value.is_integer() else value
            for key, value in arguments.items()
        }


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
    if parts.pop("nullable", False) is True:
        if isinstance(kind := parts.get("type"), str):
            parts["type"] = [kind, "null"]
        if isinstance(values := parts.get("enum"), list):
            parts["enum"] = [*values, None]
    return parts
