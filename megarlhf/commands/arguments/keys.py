"""`megarlhf keys`: keys of configurations, read from docstrings; `COMMAND --help` ends with them too."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from megarlhf.config.frozen import FrozenModel
from megarlhf.config.reference import SET, SETS_IN_WORDS, ConfigKey, Section, all_paths, sections, set_keys

Configs = Mapping[str, type[FrozenModel]]
_Match = tuple[str, str, ConfigKey]
"""Command, path with its section, key."""
_Uses = dict[str, list[str]]
"""Commands that read a key, by path with its section."""


def print_keys(words: Sequence[str], configs: Configs) -> None:
    """Print keys below a section such as `rl.algo`, or else keys with a word such as `lr` in their name or sentence.

    Raises: ValueError for an unknown word, with the nearest known one.
    """
    matches = [key for word in words for key in _keys_of(word, configs)] if words else _all_keys(configs)
    entries: dict[object, tuple[ConfigKey, _Uses]] = {}  # a key that several commands or roles share is one entry
    for command, path, key in matches:
        commands = entries.setdefault((key.path or path, key), (key, {}))[1].setdefault(path, [])
        if command not in commands:
            commands.append(command)
    several = len({command for command, _, _ in matches}) > 1
    for key, uses in entries.values():
        print("\n".join(_entry_lines(key, uses, with_readers=several or len(uses) > 1)))
    if not words:
        print(f"\n{len(entries)} keys. A part of them: megarlhf keys rl.algo; by name: megarlhf keys lr")


def help_on_keys(config: type[FrozenModel]) -> str:
    """Every key of a configuration, section after section. Roles with equal keys share one section."""
    by_keys: dict[tuple[ConfigKey, ...], list[Section]] = {}
    for section in sections(config):
        by_keys.setdefault(section.keys, []).append(section)
    blocks = []
    for keys, alike in by_keys.items():
        names = [section.name for section in alike]
        descriptions = [f"{section.name}: {section.description}" for section in alike if section.description]
        prefix, note = (names[0], "") if len(names) == 1 else ("ROLE", " (ROLE below)")
        lines = [", ".join(names) + note, *_wrapped(descriptions, indent=2)]
        for key in keys:
            lines += ["", *_key_lines(".".join(filter(None, [prefix, key.path])), key)]
        blocks.append("\n".join(lines))
    if any(SET in key.kind for keys in by_keys for key in keys):
        lines = [SET, *_wrapped([SETS_IN_WORDS.replace("`", "")], indent=2)]
        for key in set_keys():
            lines += ["", *_key_lines(key.path, key)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _all_keys(configs: Configs) -> list[_Match]:
    return [(name, path, key) for name, config in configs.items() for path, key in all_paths(config).items()]


def _keys_of(word: str, configs: Configs) -> list[_Match]:
    """Keys below a section of a command; for another word, the matches of the first way of searching that has any."""
    command, _, prefix = word.partition(".")
    if command in configs:
        matches = [match for match in _all_keys({command: configs[command]}) if _is_below(match[1], prefix)]
        if matches:
            return matches
        near = difflib.get_close_matches(prefix, _prefixes(configs[command]), n=1, cutoff=0.5)
        raise ValueError(
            f"{command} has no key or section {prefix!r}"
            + (f"; did you mean {command}.{near[0]}?" if near else f"; all of them: megarlhf keys {command}")
        )
    by_name = re.compile(rf"(^|[._\[\]]){re.escape(word)}($|[._\[\]])")
    for is_match in (
        lambda path, key: _is_below(path, word),
        lambda path, key: by_name.search(path) is not None,
        lambda path, key: word in path,
        lambda path, key: word.lower() in key.description.lower(),
    ):
        if matches := [(name, path, key) for name, path, key in _all_keys(configs) if is_match(path, key)]:
            return matches
    names = {part for _, path, _ in _all_keys(configs) for part in re.split(r"[.\[\]]+", path)}
    near = difflib.get_close_matches(word, [*configs, *sorted(names)], n=1)
    suggestion = f"did you mean {near[0]!r}?" if near else "see megarlhf keys"
    raise ValueError(f"no command, key or sentence has {word!r}; {suggestion}")


def _is_below(path: str, prefix: str) -> bool:
    path, prefix = (text.replace("[]", "") for text in (path, prefix))
    return not prefix or path == prefix or path.startswith(prefix + ".")


def _prefixes(config: type[FrozenModel]) -> list[str]:
    """Every section and key of a command."""
    parts = [path.replace("[]", "").split(".") for path in all_paths(config)]
    return list(dict.fromkeys(".".join(names[:n]) for names in parts for n in range(1, len(names) + 1)))


def _entry_lines(key: ConfigKey, uses: _Uses, *, with_readers: bool) -> list[str]:
    """Lines of a key: `actor.optim.lr`, or `ROLE.optim.lr` if several roles have it, or `SET.split`."""
    is_set = key.path.startswith(f"{SET}.")
    lines = _key_lines(next(iter(uses)) if len(uses) == 1 else key.path if is_set else f"ROLE.{key.path}", key)
    if with_readers:
        suffix = key.path.removeprefix(SET) if is_set else f".{key.path}"
        sections_of: dict[tuple[str, ...], list[str]] = {}
        for path, commands in uses.items():
            sections_of.setdefault(tuple(commands), []).append(path.removesuffix(suffix))
        readers = [
            ", ".join(commands) + (f" ({', '.join(names)})" if len(uses) > 1 else "")
            for commands, names in sections_of.items()
        ]
        lines += _wrapped([f"Read by {'; '.join(readers)}."], indent=6)
    return lines


def _key_lines(path: str, key: ConfigKey) -> list[str]:
    """Path, type and default in one line, the sentence below."""
    default = key.default.strip("`")
    default = default if default == "required" else f"default {default}"
    kind = key.kind.replace("`", "")
    return [*_wrapped([f"{path}  [{kind}; {default}]"], indent=2, then=6), *_wrapped([key.description], indent=6)]


def _wrapped(paragraphs: Iterable[str], *, indent: int, then: int | None = None) -> list[str]:
    wrapper = textwrap.TextWrapper(
        max(60, min(110, shutil.get_terminal_size().columns)),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if then is None else then),
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line for paragraph in paragraphs for line in wrapper.wrap(paragraph)]
