"""The configuration reference, made from the models in megarlhf/config: section, key, type, default, description.

`python -m tools.docs.configuration` prints it; with `--write` it replaces that of docs/configuration.md, which a test
compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from megarlhf.commands.cli import COMMANDS
from megarlhf.config import FrozenModel
from megarlhf.config.reference import SET, SETS_IN_WORDS, ConfigKey, Section, sections, set_keys
from megarlhf.config.serve import ServeRewardConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MARKER = "<!-- made by `python -m tools.docs.configuration --write` -->\n\n"
"""In the page, ahead of the reference."""
ROLE = "ROLE"
"""Title and prefix of the section that every role is."""
SINGLE = "Keys outside sections"
"""Title of the table of keys such as `beta`."""


# --- as a page --------------------------------------------------------------------------------------


def reference(commands: Mapping[str, type[FrozenModel]] | None = None) -> str:
    """Markdown: a heading for each section, with the commands that read it, and a table row for each key.

    A role (`actor`, `critic`, ...) is the same section under several names: its keys are written `ROLE.model.path`.
    A row that only some of a section's commands have, or have so, names them: `data.loss_on` (sft).
    """
    if commands is None:
        commands = {name: command.config for name, command in COMMANDS.items()}
        commands["serve-reward"] = ServeRewardConfig
    names_of: dict[tuple[ConfigKey, ...], dict[str, None]] = {}
    for model in commands.values():
        for section in sections(model):
            names_of.setdefault(section.keys, {})[section.name] = None
    tables: dict[str, list[tuple[str, Section]]] = {}
    for command, model in commands.items():
        for section in sections(model):
            is_role, is_single = len(names_of[section.keys]) > 1, not section.keys[0].path
            title = ROLE if is_role else SINGLE if is_single else section.name.removesuffix("[]")
            tables.setdefault(title, []).append((command, section))
    blocks = [_table(title, tables[title]) for title in tables if title != SINGLE]
    return "\n\n".join([*blocks, _table(SINGLE, tables[SINGLE]), _of_sets()]) + "\n"


def _table(title: str, readers: list[tuple[str, Section]]) -> str:
    """One section. `readers`: the commands that read it, each with the section as it reads it."""
    all_commands = list(dict.fromkeys(command for command, _ in readers))
    lines = [f"## {title}" + f" ({', '.join(all_commands)})" * (title != ROLE), ""]
    introductions: dict[tuple[str, str], list[str]] = {}
    rows: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for command, section in readers:
        introductions.setdefault((section.name, section.description), []).append(command)
        for key in section.keys:
            path = ".".join(filter(None, [ROLE if title == ROLE else section.name, key.path]))
            of = rows.setdefault(path, {}).setdefault((key.kind, key.default, key.description), [])
            if command not in of:
                of.append(command)
    for (name, words), of in introductions.items():
        if title == ROLE or (words and title != SINGLE):
            lines.append(f"- `{name}` in {_list(of)}. {words}".rstrip())
    lines += [""] * (lines[-1] != "") + ["| key | type | default | meaning |", "|---|---|---|---|"]
    for path, variants in rows.items():
        for cells, of in variants.items():
            note = "" if title == ROLE or of == all_commands else f" ({', '.join(of)})"
            lines.append(f"| `{path}`{note} | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def _of_sets() -> str:
    lines = [f"## {SET}", "", SETS_IN_WORDS, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key in set_keys():
        lines.append(f"| `{key.path}` | {_cell(key.kind)} | {_cell(key.default)} | {_cell(key.description)} |")
    return "\n".join(lines)


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
