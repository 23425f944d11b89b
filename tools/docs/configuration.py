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
from megarlhf.config.reference import SET, SETS_IN_WORDS, ConfigKey, sections, set_keys
from megarlhf.config.serve import ServeRewardConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MARKER = "<!-- made by `python -m tools.docs.configuration --write` -->\n\n"
"""In the page, ahead of the reference."""


# --- as a page --------------------------------------------------------------------------------------


def reference(commands: Mapping[str, type[FrozenModel]] | None = None) -> str:
    """Markdown: a heading for each section, a table row for each key.

    A role (`actor`, `critic`, ...) is the same section under several names: its keys are written `ROLE.model.path`.
    """
    if commands is None:
        commands = {name: command.config for name, command in COMMANDS.items()}
        commands["serve-reward"] = ServeRewardConfig
    users: dict[tuple[ConfigKey, ...], dict[tuple[str, str], list[str]]] = {}
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
