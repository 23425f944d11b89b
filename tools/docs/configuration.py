"""The configuration reference, made from the models in megarlhf/config: section, key, type, default, description.

`python -m tools.docs.configuration` prints it; with `--write` it replaces that of docs/configuration.md, which a test
compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarlhf.commands.cli import COMMANDS
from megarlhf.config import FrozenModel, SourceConfig
from megarlhf.config.serve import ServeRewardConfig

Schema = Mapping[str, Any]

SET = "SET"
"""What the keys of a set of records stand below in the reference, wherever it is read."""
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MARKER = "<!-- made by `python -m tools.docs.configuration --write` -->\n\n"
"""In the page, ahead of the reference."""


@dataclass(frozen=True)
class Key:
    """One key that a configuration file may have."""

    path: str
    """Below its section: `parallel.tp`; empty for a key that stands outside any section."""
    kind: str
    """Type and choices, in words."""
    default: str
    description: str


@dataclass(frozen=True)
class Section:
    """One section as one command reads it."""

    name: str
    """`actor`; for a list of sections `rewards[]`."""
    description: str
    keys: tuple[Key, ...]


def sections(model: type[FrozenModel]) -> list[Section]:
    """The sections of a command's configuration in their order."""
    schema = model.model_json_schema()
    result = []
    for name, field in schema["properties"].items():
        required = name in schema.get("required", ())
        inner, suffix = _section(field, schema["$defs"])
        if inner is None:
            result.append(Section(name, "", (_key("", field, required),)))
        else:
            words = _sentence(field) or _sentence(inner)
            result.append(Section(name + suffix, words, tuple(_keys(inner, schema["$defs"]))))
    return result


def _section(field: Schema, definitions: Mapping[str, Schema]) -> tuple[Schema | None, str]:
    """The section that a field holds (None: a plain value), and `[]` where it is a list of them."""
    for choice in (field, *field.get("anyOf", ())):
        if "$ref" in choice:
            return definitions[choice["$ref"].rsplit("/", 1)[1]], ""
        if "$ref" in choice.get("items", {}):
            return definitions[choice["items"]["$ref"].rsplit("/", 1)[1]], "[]"
    return None, ""


def _keys(schema: Schema, definitions: Mapping[str, Schema], prefix: str = "") -> Iterator[Key]:
    for name, field in schema["properties"].items():
        inner, suffix = _section(field, definitions)
        if inner is None:
            yield _key(prefix + name, field, name in schema.get("required", ()))
        else:
            if _is_set(field):
                yield _key(prefix + name, field, name in schema.get("required", ()))
                continue
            yield from _keys(inner, definitions, f"{prefix}{name}{suffix}.")


def _is_set(field: Schema) -> bool:
    """Whether it is a set of records in any of its forms, whose keys stand in a section of their own."""
    choices = field.get("anyOf", ())
    return any(_is_set(choice) or (choice.get("format") == "path" and len(choices) > 2) for choice in choices)


def _key(path: str, field: Schema, required: bool) -> Key:
    value = field.get("default")
    default = "required" if required else f"`{value if isinstance(value, str) else json.dumps(value)}`"
    return Key(path, _kind(field), default, _sentence(field))


def _sentence(schema: Schema) -> str:
    return " ".join(schema.get("description", "").split())


_NAMES = {"integer": "whole number", "number": "number", "string": "text", "object": "mapping", "null": "`null`"}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}


def _kind(field: Schema) -> str:
    """The type in words: `whole number, at least 0`."""
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
    words = "path" if field.get("format") == "path" else _NAMES.get(kind, "anything")
    bounds = [f"{word} {field[key]:g}" for key, word in _BOUNDS.items() if key in field]
    return ", ".join([words, *bounds])


# --- as a page --------------------------------------------------------------------------------------


def reference(commands: Mapping[str, type[FrozenModel]] | None = None) -> str:
    """Markdown: a heading for each section, a table row for each key.

    A role (`actor`, `critic`, ...) is the same section under several names: its keys are written `ROLE.model.path`.
    """
    if commands is None:
        commands = {name: command.config for name, command in COMMANDS.items()}
        commands["serve-reward"] = ServeRewardConfig
    users: dict[tuple[Key, ...], dict[tuple[str, str], list[str]]] = {}
    for command, model in commands.items():
        for section in sections(model):
            said = (section.name, section.description)
            users.setdefault(section.keys, {}).setdefault(said, []).append(command)
    blocks = []
    for keys, used in users.items():
        names = list(dict.fromkeys(name for name, _ in used))
        prefix, title = ("ROLE", "ROLE") if len(names) > 1 else (names[0], names[0].removesuffix("[]"))
        readers = ", ".join(dict.fromkeys(command for given in used.values() for command in given))
        lines = [f"## {title}" + f" ({readers})" * (len(names) == 1), ""]
        for (name, words), given in used.items():
            if words or len(used) > 1:
                lines.append(f"- `{name}` in {_list(given)}. {words}".rstrip())
        lines += [""] * (lines[-1] != "") + ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            path = ".".join(filter(None, [prefix, key.path]))
            lines.append(f"| `{path}` | {_cell(key.kind)} | {_cell(key.default)} | {_cell(key.description)} |")
        blocks.append("\n".join(lines))
    blocks.append(_of_sets())
    return "\n\n".join(blocks) + "\n"


def _of_sets() -> str:
    schema = SourceConfig.model_json_schema()
    lines = [f"## {SET}", "", _SETS, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key in _keys(schema, schema.get("$defs", {})):
        lines.append(f"| `{SET}.{key.path}` | {_cell(key.kind)} | {_cell(key.default)} | {_cell(key.description)} |")
    return "\n".join(lines)


_SETS = (
    "A set of records, as `data.train`, `data.validation`, `data.test` and `ptx.data` name them: a path, a mapping of "
    "these keys, or a list of paths and mappings. On the command line: `data.train.split=test`."
)


def _list(commands: list[str]) -> str:
    return ", ".join(f"`{command}`" for command in commands)


def _cell(text: str) -> str:
    """A bar ends a cell, but not inside a code span."""
    return re.sub(r"(`[^`]*`)|\|", lambda match: match[1] or "\\|", text)


def page_with_reference(page: str) -> str:
    """The page with the reference behind its marker, in place of what stands there."""
    introduction, marker, _ = page.partition(MARKER)
    assert marker, f"no line {MARKER.strip()} in the page"
    return introduction + marker + reference()


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page_with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(reference(), end="")
