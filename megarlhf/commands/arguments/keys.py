"""`megarlhf keys`: what a configuration may say, from the docstrings of its sections; also behind `COMMAND --help`."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megarlhf.config.frozen import FrozenModel
from megarlhf.config.reference import SET, SETS_IN_WORDS, ConfigKey, Section, all_paths, sections, set_keys

Configs = Mapping[str, type[FrozenModel]]


@dataclass
class _Entry:
    """A key as it is printed once, however many sections and commands have it."""

    key: ConfigKey
    paths: dict[str, list[str]] = field(default_factory=dict)
    """By path with its section: the commands that read it there."""

    @property
    def title(self) -> str:
        """`actor.optim.lr`, or `ROLE.optim.lr` where several roles have it, or `SET.split`."""
        if len(self.paths) == 1:
            return next(iter(self.paths))
        return self.key.path if self.key.path.startswith(f"{SET}.") else f"ROLE.{self.key.path}"


def print_keys(words: Sequence[str], configs: Configs) -> None:
    """The keys below `rl.algo`, or those that have a word such as `lr` in their name, or else in their sentence.

    Raises: ValueError for a word that there is not, with the nearest that there is.
    """
    chosen = [key for word in words for key in _keys_of(word, configs)] if words else _of_commands(configs)
    entries = _entries(chosen)
    several = len({command for command, _, _ in chosen}) > 1
    for entry in entries:
        print(_in_words(entry, several=several or len(entry.paths) > 1))
    if not words:
        print(f"\n{len(entries)} keys. A part of them: megarlhf keys rl.algo; by name: megarlhf keys lr")


def keys_in_words(config: type[FrozenModel]) -> str:
    """Every key of a configuration, section after section; a section that several roles have alike stands once."""
    blocks: dict[tuple[ConfigKey, ...], list[Section]] = {}
    for section in sections(config):
        blocks.setdefault(section.keys, []).append(section)
    parts = []
    for keys, alike in blocks.items():
        names = [section.name for section in alike]
        words = [f"{section.name}: {section.description}" for section in alike if section.description]
        lines = [", ".join(names) + ("" if len(names) == 1 else " (ROLE below)"), *_wrapped(words, indent=2)]
        prefix = names[0] if len(names) == 1 else "ROLE"
        for key in keys:
            lines.append("")
            lines += _of_key(".".join(filter(None, [prefix, key.path])), key)
        parts.append("\n".join(lines))
    if any(SET in key.kind for keys in blocks for key in keys):
        lines = [SET, *_wrapped([SETS_IN_WORDS.replace("`", "")], indent=2)]
        for key in set_keys():
            lines += ["", *_of_key(key.path, key)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


_Found = tuple[str, str, ConfigKey]
"""Command, path with its section, key."""


def _of_commands(configs: Configs) -> list[_Found]:
    return [(name, path, key) for name, config in configs.items() for path, key in all_paths(config).items()]


def _keys_of(word: str, configs: Configs) -> list[_Found]:
    """Below a command and a section of it; otherwise the first of these ways of finding that finds any."""
    command, _, prefix = word.partition(".")
    if command in configs:
        found = [each for each in _of_commands({command: configs[command]}) if _is_below(each[1], prefix)]
        if found:
            return found
        near = difflib.get_close_matches(prefix, _prefixes(configs[command]), n=1, cutoff=0.5)
        raise ValueError(
            f"{command} has no key or section {prefix!r}"
            + (f"; did you mean {command}.{near[0]}?" if near else f"; all of them: megarlhf keys {command}")
        )
    everything = _of_commands(configs)
    by_name = re.compile(rf"(^|[._\[\]]){re.escape(word)}($|[._\[\]])")
    for fits in (
        lambda path, key: _is_below(path, word),
        lambda path, key: by_name.search(path) is not None,
        lambda path, key: word in path,
        lambda path, key: word.lower() in key.description.lower(),
    ):
        if found := [(name, path, key) for name, path, key in everything if fits(path, key)]:
            return found
    names = {part for config in configs.values() for path in all_paths(config) for part in re.split(r"[.\[\]]+", path)}
    near = difflib.get_close_matches(word, [*configs, *sorted(names)], n=1)
    raise ValueError(
        f"no command, key or sentence has {word!r}"
        + (f"; did you mean {near[0]!r}?" if near else "; see megarlhf keys")
    )


def _is_below(path: str, prefix: str) -> bool:
    path, prefix = (text.replace("[]", "") for text in (path, prefix))
    return not prefix or path == prefix or path.startswith(prefix + ".")


def _prefixes(config: type[FrozenModel]) -> list[str]:
    """Every section and key of a command."""
    found: dict[str, None] = {}
    for path in all_paths(config):
        parts = path.replace("[]", "").split(".")
        found |= dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return list(found)


def _entries(found: Iterable[_Found]) -> list[_Entry]:
    """Each key once: the same one of several commands, or of several roles, is one."""
    entries: dict[object, _Entry] = {}
    for command, path, key in found:
        entry = entries.setdefault((key.path or path, key), _Entry(key))
        commands = entry.paths.setdefault(path, [])
        if command not in commands:
            commands.append(command)
    return list(entries.values())


def _in_words(entry: _Entry, *, several: bool) -> str:
    lines = _of_key(entry.title, entry.key)
    if several:
        by_readers: dict[tuple[str, ...], list[str]] = {}
        for path, commands in entry.paths.items():
            by_readers.setdefault(tuple(commands), []).append(_section(path, entry.key))
        where = [
            ", ".join(commands) + (f" ({', '.join(sections)})" if len(entry.paths) > 1 else "")
            for commands, sections in by_readers.items()
        ]
        lines += _wrapped([f"Read by {'; '.join(where)}."], indent=6)
    return "\n".join(lines)


def _section(path: str, key: ConfigKey) -> str:
    """What stands ahead of the key: a role, or the key of a set of records."""
    return path.removesuffix(key.path.removeprefix(SET) if key.path.startswith(f"{SET}.") else f".{key.path}")


def _of_key(path: str, key: ConfigKey) -> list[str]:
    """Path, type and default in a line, the sentence below."""
    default = key.default.strip("`")
    default = default if default == "required" else f"default {default}"
    kind = key.kind.replace("`", "")
    return [*_wrapped([f"{path}  [{kind}; {default}]"], indent=2, then=6), *_wrapped([key.description], indent=6)]


def _wrapped(paragraphs: Iterable[str], *, indent: int, then: int | None = None) -> list[str]:
    width = max(60, min(110, shutil.get_terminal_size().columns))
    wrapper = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)
    wrapper.initial_indent = " " * indent
    wrapper.subsequent_indent = " " * (indent if then is None else then)
    return [line for paragraph in paragraphs for line in wrapper.wrap(paragraph)]
