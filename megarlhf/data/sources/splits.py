"""Files of a directory or a pattern, by split. A README of the hub, file names, or folder names tell the split.

`datasets` is not used for this: it reads doubtful names such as `mathtrain` and `mathtest` as one training split.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarlhf.data.sources.read import SUFFIXES, kind_of, require_readable

Splits = dict[str, list[Path]]
"""Files in order, by split. "" stands for files without a split."""

_SPLIT_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "dev": "validation", "val": "validation",
    "heldout": "heldout", "held_out": "heldout", "held-out": "heldout", "holdout": "heldout",
    "test": "test", "testing": "test", "eval": "test", "evals": "test", "evaluation": "test",
}  # fmt: skip
"""Splits by words in file names, in any case: those of `datasets`, and ours for held-out data."""
_SPLIT_WORD = re.compile(rf"(?:^|(?<=[-._ 0-9]))({'|'.join(_SPLIT_WORDS)})(?=[-._ 0-9])")
_MAY_BE_A_SPLIT = re.compile(r"train|test|valid|dev|eval|hold[-_]?out|held[-_]?out")
"""Parts of words (`mathtrain`, `contest`) that may or may not mean a split."""
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")


def chosen_split(name: str, splits: Iterable[str], split: str | None) -> str:
    """The split to read. Raises: ValueError that lists the splits."""
    known = list(splits)
    listed = ", ".join(known_split or "(no split named)" for known_split in known)
    if split is None:
        if len(known) > 1:
            raise ValueError(
                f"{name} has several splits, of which only one is meant: {listed}; name it, as {{path: {name}, split: "
                f"{next(filter(None, known))}}} (data.train.split on the command line), or give the path of its own "
                "file or directory"
            )
        return known[0]
    if split not in known:
        raise ValueError(f"{name} has no split {split!r}; it has {listed}")
    return split


def saved_splits(directory: Path) -> list[str]:
    """Splits of a dataset of `save_to_disk`: one without a name for a Dataset, none for any other directory."""
    described = directory / "dataset_dict.json"
    if described.exists():
        try:
            return list(json.loads(described.read_text(encoding="utf-8"))["splits"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{described} is not a file of save_to_disk: {error}; save the dataset again") from error
    return [""] if (directory / "state.json").exists() else []


def is_pattern(path: Path) -> bool:
    """Tell whether a path is a pattern. The name of an existing file is none."""
    return bool(glob.has_magic(str(path))) and not path.exists()


def files_of_pattern(path: Path) -> Splits:
    """The files that match; `**` matches any folders. Raises: ValueError where none does."""
    matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    splits = _by_name(path, [match for match in matches if match.is_file()])
    if not splits:
        matched = f"it matches {list_names([match.name for match in matches])}" if matches else "it matches nothing"
        raise ValueError(f"no data files match {path}: {matched}; expected names that end in {', '.join(SUFFIXES)}")
    return splits


def files_of_directory(directory: Path, subset: str | None) -> Splits:
    """Data files of a directory, by its hub README if any, else by the names in it (`_by_layout`). Raises: ValueError
    where there are none."""
    if described := _described_files(directory, subset):
        return described
    if subset is not None:
        raise ValueError(
            f"{directory} has no subset {subset!r}: no README.md in it names any (configs); leave subset out, or give "
            "the path of the folder that is meant"
        )
    return _by_layout(directory)


def _by_layout(directory: Path) -> Splits:
    """Data files of a directory itself, else of its `data/`, else of its folders that are named for splits. Raises:
    ValueError where there are none."""
    entries = _entries(directory)
    if splits := _by_name(directory, entries):
        return splits
    inner = directory / "data"
    if inner.is_dir() and (splits := _by_name(inner, _entries(inner))):
        return splits
    by_folder = {entry.name: _by_name(entry, _entries(entry)) for entry in entries if entry.is_dir()}
    named = {_SPLIT_WORDS[name.lower()]: files for name, files in by_folder.items() if name.lower() in _SPLIT_WORDS}
    if named := {split: files for split, files in named.items() if files}:
        return {split: [file for part in files.values() for file in part] for split, files in named.items()}
    file_names = list_names([entry.name for entry in entries]) or "nothing"
    raise ValueError(
        f"no data files in {directory}: found {file_names}; expected names that end in {', '.join(SUFFIXES)}, or a "
        "directory written by datasets' save_to_disk"
    )


def passed_over(directory: Path, read: Splits) -> list[str]:
    """Entries of a directory that belong to no split."""
    files = {file for files in read.values() for file in files}
    used = files | {parent for file in files for parent in file.parents}
    others = [entry for entry in _entries(directory) if entry not in used]
    return [entry.name + "/" * entry.is_dir() for entry in others]


def _entries(directory: Path) -> list[Path]:
    return sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))


def _by_name(where: Path, entries: Sequence[Path]) -> Splits:
    """Data files among the entries, by the split in their names."""
    splits: Splits = {}
    for entry in entries:
        require_readable(entry)
        if kind_of(entry.name)[0] and entry.is_file():
            splits.setdefault(split_of(entry.name), []).append(entry)
    if list(splits) == [""]:
        _require_one_kind(where, splits[""])
    return splits


def _require_one_kind(where: Path, files: Sequence[Path]) -> None:
    """Check files without a split, which are joined. Names that differ in numbers only (`latest_1`, `latest_2`) are
    parts of one set. Raises: ValueError where the names may mean several splits."""
    stems = [file.name.lower().partition(kind_of(file.name)[0])[0] for file in files]
    doubtful = [file.name for file, stem in zip(files, stems, strict=True) if _MAY_BE_A_SPLIT.search(stem)]
    if doubtful and len({re.sub(r"[-._ 0-9]", "", stem) for stem in stems}) > 1:
        raise ValueError(
            f"{where} has {len(files)} data files, and may mix splits such as train and test; these names do "
            f"not say clearly: {list_names(doubtful)}. Give the path of the one file that is meant. Or rename the "
            "files so that the split is a word of its own (math_train.jsonl, math_test.jsonl), and name it "
            "(data.train.split). Or, if all are meant, move them to a directory as part_1, part_2 and so on"
        )


def split_of(name: str) -> str:
    """Split in a file name, as `datasets` reads it: `train_sft-00000-of-00002.parquet` -> train_sft, `math_Test.jsonl`
    -> test. "" where the name has none, or several (`train_heldout.jsonl`)."""
    if shard := _SHARD.match(name):
        return shard[1]
    splits = {_SPLIT_WORDS[word] for word in _SPLIT_WORD.findall(name.lower())}
    return splits.pop() if len(splits) == 1 else ""


def list_names(names: Sequence[str]) -> str:
    """Up to eight names, and the number of others."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _described_files(directory: Path, subset: str | None) -> Splits:
    """Data files by the front matter of a hub README.md: `configs` with `data_files`, with a `data_dir` whose files
    are found by name, or with both. Empty without it.

    Raises: ValueError for an unknown subset, for several of which none is named, and for missing files.
    """
    configs = _configs(directory / "README.md")
    if not configs:
        return {}
    names = [str(config.get("config_name", "default")) for config in configs]
    if subset is None and len(names) > 1:
        default = [name for name, config in zip(names, configs, strict=True) if config.get("default") is True]
        raise ValueError(
            f"{directory}: its README.md names several subsets: {', '.join(names)}"
            f"{f' (its own default is {default[0]})' if default else ''}; name the one that is meant, as {{path: "
            f"{directory}, subset: {(default or names)[0]}}}"
        )
    if subset is not None and subset not in names:
        raise ValueError(f"{directory} has no subset {subset!r}; its README.md names {', '.join(names)}")
    config = configs[0 if subset is None else names.index(subset)]
    within = directory
    if (folder := config.get("data_dir")) is not None and not (within := directory / str(folder)).is_dir():
        raise ValueError(
            f"{directory}: its README.md says data_dir: {folder} for the subset {config.get('config_name', 'default')}"
            ", and no such folder is there; copy it, or give the path of what is there"
        )
    if not config.get("data_files"):
        return _by_layout(within)
    splits: Splits = {}
    for split, patterns in _patterns(config["data_files"]):
        for pattern in patterns:
            matches = sorted(Path(name) for name in glob.glob(str(within / pattern), recursive=True))
            files = [file for file in matches if kind_of(file.name)[0]]
            if not files:
                raise ValueError(
                    f"{directory}: its README.md says {Path(folder or '') / pattern} for the split {split}, and no "
                    "data file is there; copy the files, or give the path of what is there"
                )
            splits.setdefault(split, []).extend(files)
    return splits


def _configs(readme: Path) -> list[Mapping[str, Any]]:
    """The README's `configs`. One with neither `data_files` nor `data_dir` is the whole directory."""
    if not readme.is_file():
        return []
    parts = readme.read_text(encoding="utf-8", errors="replace").split("---", 2)
    if len(parts) < 3 or parts[0].strip():
        return []
    try:
        front = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return []
    configs = front.get("configs") if isinstance(front, Mapping) else None
    listed = configs if isinstance(configs, list) else []
    return [config for config in listed if isinstance(config, Mapping)]


def _patterns(data_files: Any) -> list[tuple[str, list[str]]]:
    """Splits and patterns of `data_files`: a pattern, patterns, or a mapping with split and path for each split."""
    result = []
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        split, path = (
            (entry.get("split", "train"), entry.get("path")) if isinstance(entry, Mapping) else ("train", entry)
        )
        result.append((str(split), [str(part) for part in (path if isinstance(path, list) else [path])]))
    return result
