"""Reference of all configuration keys with type, default and description, read from the models and their docstrings.

Used by `megarlhf COMMAND --help`, `megarlhf keys`, shell completion, and the reference in the documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megarlhf.config.data import SourceConfig
from megarlhf.config.frozen import FrozenModel

Schema = Mapping[str, Any]

SET = "SET"
"""Prefix of the keys of a set of records, in place of `data.train` and others."""
SETS_IN_WORDS = (
    "A set of records, as `data.train`, `data.validation`, `data.test` and `ptx.data` name them: a path, a mapping of "
    "these keys, or a list of paths and mappings. On the command line: `data.train.split=test`."
)


@dataclass(frozen=True)
class ConfigKey:
    """One key that a configuration file may have."""

    path: str
    """Path within its section, such as `parallel.tp`; empty for a key outside any section."""
    kind: str
    """Description of type and choices."""
    default: str
    description: str
    choices: tuple[str, ...] = ()
    """Allowed values, if they are few."""


@dataclass(frozen=True)
class Section:
    """One section of one command."""

    name: str
    """Name, such as `actor`, or `rewards[]` for a list of sections."""
    description: str
    keys: tuple[ConfigKey, ...]


@cache
def sections(model: type[FrozenModel]) -> tuple[Section, ...]:
    """Sections of a command's configuration, in order."""
    schema = model.model_json_schema()
    result = []
    for name, field in schema["properties"].items():
        required = name in schema.get("required", ())
        inner, suffix = _section(field, schema["$defs"])
        if inner is None:
            result.append(Section(name, "", (_key("", field, required),)))
        else:
            description = _sentence(field) or _sentence(inner)
            keys = (key for key in _keys(inner, schema["$defs"]) if f"{name}.{key.path}" not in model.refused)
            result.append(Section(name + suffix, description, tuple(keys)))
    return tuple(result)


def _section(field: Schema, definitions: Mapping[str, Schema]) -> tuple[Schema | None, str]:
    """Section of a field (None: a plain value), and `[]` if the field is a list of sections."""
    for choice in (field, *field.get("anyOf", ())):
        if "$ref" in choice:
            return definitions[choice["$ref"].rsplit("/", 1)[1]], ""
        if "$ref" in choice.get("items", {}):
            return definitions[choice["items"]["$ref"].rsplit("/", 1)[1]], "[]"
    return None, ""


def _keys(schema: Schema, definitions: Mapping[str, Schema], prefix: str = "") -> Iterator[ConfigKey]:
    for name, field in schema["properties"].items():
        inner, suffix = _section(field, definitions)
        if inner is None or _is_set(field):
            yield _key(prefix + name, field, name in schema.get("required", ()))
        else:
            yield from _keys(inner, definitions, f"{prefix}{name}{suffix}.")


def _is_set(field: Schema) -> bool:
    """Whether a field is a set of records, whose keys are listed in a section of their own."""
    choices = field.get("anyOf", ())
    return any(_is_set(choice) or (choice.get("format") == "path" and len(choices) > 2) for choice in choices)


@cache
def set_keys() -> tuple[ConfigKey, ...]:
    """Keys of a set of records: `SET.path` and others."""
    schema = SourceConfig.model_json_schema()
    return tuple(_keys(schema, schema.get("$defs", {}), f"{SET}."))


def all_paths(config: type[FrozenModel]) -> dict[str, ConfigKey]:
    """Every key by its whole path, such as `actor.model.path`, `rewards[].kind` or `data.train.split`."""
    keys = {}
    for section in sections(config):
        for key in section.keys:
            path = ".".join(filter(None, [section.name, key.path]))
            keys[path] = key
            if SET in key.kind:
                keys |= {path + set_key.path.removeprefix(SET): set_key for set_key in set_keys()}
    return keys


def _key(path: str, field: Schema, required: bool) -> ConfigKey:
    value = field.get("default")
    default = "required" if required else f"`{value if isinstance(value, str) else json.dumps(value)}`"
    return ConfigKey(path, _kind(field), default, _sentence(field), tuple(_choices(field)))


def _choices(field: Schema) -> list[str]:
    if "anyOf" in field:
        return [choice for option in field["anyOf"] for choice in _choices(option)]
    if field.get("type") == "boolean":
        return ["true", "false"]
    return [str(choice) for choice in field.get("enum", [field["const"]] if "const" in field else [])]


def _sentence(schema: Schema) -> str:
    return " ".join(schema.get("description", "").split())


_NAMES = {"integer": "whole number", "number": "number", "string": "text", "object": "mapping", "null": "`null`"}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}


def _kind(field: Schema) -> str:
    """Description of a type, such as `whole number, at least 0`."""
    if "anyOf" in field:
        return " or ".join(_kind(choice) for choice in field["anyOf"])
    if choices := field.get("enum", [field["const"]] if "const" in field else []):
        return " or ".join(f"`{choice}`" for choice in choices)
    if field.get("$ref", "").endswith(f"/{SourceConfig.__name__}"):
        return SET
    kind = field.get("type", "")
    if kind == "boolean":
        return "`true` or `false`"
    if "prefixItems" in field:
        return "list of " + ", ".join(_kind(item) for item in field["prefixItems"])
    if kind == "array":
        return f"list of ({_kind(field.get('items', {}))})"
    if field.get("format") == "own":
        return "`package.module:name`"
    name = "path" if field.get("format") == "path" else _NAMES.get(kind, "anything")
    bounds = [f"{word} {field[key]:g}" for key, word in _BOUNDS.items() if key in field]
    return ", ".join([name, *bounds])
