"""Reading of a configuration file: YAML, overrides, and error messages with a remedy."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from megarlhf.config.commands import UNKNOWN_STEPS
from megarlhf.config.old_keys import translate
from megarlhf.config.roles import FrozenModel

ConfigT = TypeVar("ConfigT", bound=FrozenModel)

_YAML = "tag:yaml.org,2002:"
_PLAIN_WORDS = (
    (_YAML + "bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_YAML + "int", r"[-+]?\d+|0o[0-7]+|0x[\da-fA-F]+", "-+0123456789"),
    (_YAML + "float", r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
)
"""Tag, pattern and first characters of words without quotes in YAML 1.2. PyYAML follows YAML 1.1, where 010 is eight,
1:30 is ninety, `on` is a boolean and 1e-3 is a text. Here 010 is ten, 1:30 and `on` are texts, and 1e-3 is a number."""


class _DuplicateKeyError(ValueError):
    """A mapping that names a key twice. The message names the lines."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a mapping that names a key twice. YAML itself would keep the second.

    Merge keys (`<<: *anchor`) work as usual: a merged key may be set again.
    """

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in first_lines:
                raise _DuplicateKeyError(
                    f"the key {key.value!r} is in line {first_lines[key.value]} and again in line {line}, and only one "
                    "of them would count; merge the two, or remove one"
                )
            first_lines[key.value] = line
        return node

    def construct_yaml_int(self, node: Any) -> int:
        text = str(self.construct_scalar(node))
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes a text that YAML 1.1 or 1.2 would read as something else."""


_UniqueKeyLoader.add_constructor(_YAML + "int", _UniqueKeyLoader.construct_yaml_int)
_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag in (_YAML + "null", _YAML + "merge")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _form, _first in _PLAIN_WORDS:
    for _class in (_UniqueKeyLoader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_form})\Z"), list(_first))


def _read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_UniqueKeyLoader)


def load_config(
    kind: type[ConfigT], path: str | Path, overrides: Sequence[str] = (), *, of_a_run: bool = False
) -> ConfigT:
    """Read a YAML file, apply `section.key=value` overrides, validate.

    of_a_run: the file was written by a run, perhaps of an earlier version

    Raises: ValueError with one line per mistake, and the nearest known key for an unknown one.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        raise ValueError(f"no configuration file {path}" + (f"; did you mean {path.parent / near[0]}?" if near else ""))
    try:
        tree = _read_yaml(path.read_text(encoding="utf-8")) or {}
    except _DuplicateKeyError as error:
        raise ValueError(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 (byte {error.start} is {error.object[error.start]:#04x}); a configuration is "
            "a YAML file: give that one, or save it as UTF-8"
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {_in_a_line(error)}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must be a mapping of sections, got {type(tree).__name__}")
    return config_of(kind, translate(_unshared(tree)) if of_a_run else tree, overrides, source=str(path))


def config_of(
    kind: type[ConfigT], tree: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "the configuration"
) -> ConfigT:
    """Apply `section.key=value` overrides to a mapping of sections, validate. `source`: its name in messages.

    Raises: ValueError as `load_config`.
    """
    own = _unshared(tree)
    _require_order(overrides)
    for override in overrides:
        _apply_override(own, override, kind)
    try:
        return kind.model_validate(own)
    except ValidationError as error:
        raise ValueError(_describe(error, kind, source, overrides, own)) from None


def _in_a_line(error: yaml.YAMLError) -> str:
    """PyYAML's message in one line, without the excerpt of the file."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(filter(None, (error.context, error.problem)))}"


def repeated_overrides(overrides: Sequence[str]) -> list[str]:
    """A sentence for each key that is overridden more than once. The last value counts."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        values.setdefault(key, []).append(text)
    return [
        f"{key} is overridden {len(texts)} times: {key}={texts[-1]}, the last, counts"
        for key, texts in values.items()
        if len(texts) > 1
    ]


def names_section(path: str | Path, section: str, overrides: Sequence[str]) -> bool:
    """Whether the file or an override sets a key of the section. True for a file that cannot be read, which
    `load_config` refuses later."""
    if any(override.startswith((f"{section}.", f"{section}=")) for override in overrides):
        return True
    try:
        tree = _read_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return True
    return not isinstance(tree, dict) or tree.get(section) is not None


def _require_order(overrides: Sequence[str]) -> None:
    """Raises: ValueError for an override of a whole section that would undo an earlier override of a key in it."""
    for index, override in enumerate(overrides):
        section = override.partition("=")[0] + "."
        if undone := [earlier for earlier in overrides[:index] if earlier.startswith(section)]:
            raise ValueError(
                f"override {override!r} replaces the whole section, and with it the earlier {undone[0]!r}; give the "
                "section first"
            )


def dump_config(config: FrozenModel) -> str:
    """The resolved configuration as YAML; loading it again gives the same object."""
    return yaml.dump(_tree_of(config), Dumper=_Dumper, sort_keys=False)


def dump_changed(config: FrozenModel) -> str:
    """The keys whose values are not the defaults, as YAML."""
    return yaml.dump(_tree_of(config, exclude_defaults=True), Dumper=_Dumper, sort_keys=False)


def _tree_of(config: FrozenModel, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """The configuration as a tree, without a number of steps that is not counted yet."""
    tree = config.model_dump(mode="json", exclude_defaults=exclude_defaults)
    if isinstance(train := tree.get("train"), dict) and train.get("num_steps") == UNKNOWN_STEPS:
        del train["num_steps"]
    return tree


def _unshared(node: Any) -> Any:
    """Deep copy, in which a YAML alias no longer shares its anchor's objects: an override changes one role only."""
    if isinstance(node, Mapping):
        return {key: _unshared(value) for key, value in node.items()}
    return [_unshared(value) for value in node] if isinstance(node, list) else node


def _apply_override(tree: dict[str, Any], override: str, kind: type[BaseModel] = FrozenModel) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"override {override!r} is not of the form section.key=value")
    *sections, last = key.split(".")
    node: Any = tree
    for depth, section in enumerate(sections, 1):
        place = _place(node, section, override, kind, sections[: depth - 1])
        # An empty YAML section reads as None, and an absent one may have defaults.
        if isinstance(node, dict) and node.get(place) is None:
            node[place] = {}
        if isinstance(node[place], str) and (short := _short_form(kind, sections[:depth])):
            node[place] = {short: node[place]}
        node = node[place]
        if not isinstance(node, dict | list):
            raise ValueError(f"override {override!r}: {section} is a value ({node!r}), not a section")
    place = _place(node, last, override, kind, sections)
    try:
        node[place] = _read_yaml(text)
    except _DuplicateKeyError as error:
        raise ValueError(f"override {override!r}: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: {text!r} is not valid YAML; quote it") from error


def _place(node: Any, name: str, override: str, kind: type[BaseModel], sections: Sequence[str]) -> str | int:
    """Where the part `name` of an override's key is in `node`: a key of a section, or a number in a list."""
    where, index = ".".join(sections), int(name) if name.isdecimal() else None
    if isinstance(node, list) and index is not None and index < len(node):
        return index
    if isinstance(node, list):
        entries = f" (0 to {len(node) - 1})" if node else ""
        raise ValueError(
            f"override {override!r}: {where} is a list of {len(node)}, and {name!r} is no entry of it{entries}; name "
            "one by its number, or give the whole list"
        )
    if index is not None and sections and _section_at(kind, _keys(sections)):
        raise ValueError(
            f"override {override!r}: {where} is no list in the file, so it has no entry {name}; leave the number out, "
            "or give the whole list"
        )
    return name


def _keys(sections: Sequence[str]) -> list[str]:
    """Sections without numbers of entries of lists."""
    return [part for part in sections if not part.isdecimal()]


def _short_form(kind: type[BaseModel], location: Sequence[str]) -> str | None:
    """Key that a text in place of the section at `location` sets (`short_form`), if the section has one."""
    return getattr(_section_at(kind, _keys(location)), "short_form", None)


def _without_list_indices(location: Sequence[int | str], tree: Any) -> list[int | str]:
    """Location without numbers of entries of lists that the file does not write as lists, such as a single set of
    records."""
    shown: list[int | str] = []
    for part in location:
        if isinstance(part, int) and not isinstance(tree, list):
            continue
        shown.append(part)
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            tree = None
    return shown


def _describe(
    error: ValidationError, kind: type[FrozenModel], source: str, overrides: Sequence[str], tree: Mapping[str, Any]
) -> str:
    """One line for each mistake, first those of the file, then those of overrides."""
    of_file, of_overrides = [], []
    for item in error.errors():
        where = ".".join(str(part) for part in _without_list_indices(item["loc"], tree))
        if item["type"] == "extra_forbidden":
            text = f"unknown key {where!r}; {_hint(kind, item['loc'])}"
        elif item["type"] == "missing":
            text = f"missing key {where!r}" + " or 'train.num_epochs'" * (where == "train.num_steps")
        elif item["type"] == "model_type":
            text = f"{where}: got {item['input']!r}, expected {_section_wanted(kind, item['loc'], where)}"
        else:
            got = "" if item["type"] == "value_error" else f", got {item['input']!r}"
            text = (f"{where}: " if where else "") + item["msg"].removeprefix("Value error, ") + got
            if item["type"] == "literal_error":
                text += _nearest_choice(str(item["input"]), item["ctx"]["expected"])
        unknown = item["type"] == "extra_forbidden"
        override = next((o for o in reversed(overrides) if _concerns(o.partition("=")[0], where, unknown)), None)
        if override is None:
            of_file.append(text)
        else:
            of_overrides.append(f"override {override!r}: {text}")
    return "\n".join([f"{source}: " + "\n".join(of_file)] * bool(of_file) + of_overrides)


def _section_wanted(kind: type[FrozenModel], location: Sequence[int | str], where: str) -> str:
    """Advice on what to write in place of a value where a section is expected."""
    section = _section_at(kind, location)
    required = [name for name, field in section.model_fields.items() if field.is_required()] if section else []
    if required:
        return f"a section of keys ({', '.join(required)} and others)"
    return f"a section of keys; for its defaults write {{}}, on the command line {where}='{{}}'"


def _nearest_choice(given: str, expected: str) -> str:
    """Suggestion of the nearest of the choices, which are quoted in `expected`."""
    near = difflib.get_close_matches(given, re.findall(r"'([^']+)'", expected), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _concerns(key: str, where: str, unknown: bool) -> bool:
    """Whether an override of `key` set the value at `where`, or created the unknown section there."""
    return (where + ".").startswith(key + ".") or (unknown and key.startswith(where + "."))


_NAMES_ELSEWHERE = {
    **dict.fromkeys(("epochs", "max_epochs", "num_train_epochs", "total_epochs"), "num_epochs"),
    **dict.fromkeys(("learning_rate", "base_lr"), "lr"),
    **dict.fromkeys(("n", "num_generations", "n_samples_per_prompt"), "num_samples_per_prompt"),
    **dict.fromkeys(("max_steps", "total_training_steps", "train_iters"), "num_steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "train_batch_size", "global_batch_size"), "mini_batch_samples"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_batch_size", "micro_train_batch_size"), "micro_batch_samples"
    ),
}
"""Our keys by the names that other frameworks have for the same."""


def _hint(kind: type[FrozenModel], location: Sequence[int | str]) -> str:
    """Suggestion for an unknown key: the same name in another section, or the nearest name in this section."""
    section = _section_at(kind, location[:-1])
    name, known_keys = str(location[-1]), sorted(section.model_fields if section else ())
    if ours := _NAMES_ELSEWHERE.get(name):
        keys = [ours] if ours in known_keys else [key for key in _all_keys(kind) if key.split(".")[-1] == ours]
        if keys:
            return f"did you mean {' or '.join(map(repr, sorted(keys, key=len)[:3]))}?"
    if likely := difflib.get_close_matches(name, known_keys, n=1, cutoff=0.85):
        return f"did you mean {likely[0]!r}?"
    if elsewhere := sorted((key for key in _all_keys(kind) if key.split(".")[-1] == name), key=len):
        return f"did you mean {' or '.join(map(repr, elsewhere[:3]))}?"
    same_words = [key for key in known_keys if sorted(key.split("_")) == sorted(name.split("_"))]
    near = same_words or difflib.get_close_matches(name, known_keys, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known_keys)}"


def _all_keys(kind: type[BaseModel]) -> list[str]:
    """Every key of a configuration, with the sections that it is in."""
    keys = []
    for name, field in kind.model_fields.items():
        section = _model_in(field.annotation)
        keys += [name, *(f"{name}.{key}" for key in (_all_keys(section) if section else ()))]
    return keys


def _section_at(kind: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """The section at `location`, in which indices of lists are skipped; None: there is no section."""
    section: type[BaseModel] | None = kind
    for part in location:
        if not isinstance(part, int) and section is not None:
            field = section.model_fields.get(part)
            section = _model_in(field.annotation) if field else None
    return section


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section type inside `X`, `X | None`, `tuple[X, ...]` or `Annotated[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        for argument in get_args(annotation):
            if (nested_model := _model_in(argument)) is not None:
                return nested_model
    return None
