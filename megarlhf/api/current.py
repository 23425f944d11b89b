"""User code in a process that lives on: a notebook's imported modules may be older than their files."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megarlhf.own_code.digest import modules_behind, modules_of
from megarlhf.planning.own_code import own_code_of

_imported: dict[str, tuple[str, Any]] = {}
"""Digest of the file and the import specification of each module that a run of this process has used."""


def require_current(cfg: Any) -> None:
    """Check that the user's modules in this process are those that a new process would import.

    Raises: ValueError for a module whose file has changed since, or that another file would now be imported for.
    """
    for key, modules in _modules(cfg):
        for name, path in modules.items():
            if name in sys.modules:  # others will be imported anew
                _require_unchanged(key, name, path)
                _require_same_file(key, name)


def _modules(cfg: Any) -> Iterator[tuple[str, dict[str, Path]]]:
    """Keys of the configuration with the modules behind their import paths, but for those of other processes."""
    for own in own_code_of(cfg):
        if own.look is not None:
            continue
        yield f"{own.key} = {own.path}", modules_of(own.path, own.what)
    for role, section in cfg.roles().items():
        for family in section.model.families:
            yield f"{role}.model.families: {family}", modules_behind(family, f"model family {family!r}")


def _require_unchanged(key: str, name: str, path: Path) -> None:
    digest, spec = hashlib.sha256(path.read_bytes()).hexdigest(), getattr(sys.modules[name], "__spec__", None)
    before, known = _imported.setdefault(name, (digest, spec))
    if before != digest and known is spec:  # importlib.reload makes a new specification
        raise ValueError(
            f"{key}: {path} has changed since this process imported it, so the old code would run; reload the module "
            f"{name} (importlib.reload) and those that import from it, or restart the process"
        )
    _imported[name] = digest, spec


def _require_same_file(key: str, name: str) -> None:
    package, file = name.partition(".")[0], getattr(sys.modules[name.partition(".")[0]], "__file__", None)
    spec = PathFinder.find_spec(package, None)
    if spec is not None and spec.origin and file and Path(spec.origin).resolve() != Path(file).resolve():
        raise ValueError(
            f"{key}: this process has imported {package} from {file}, and a new one would import {spec.origin}, which "
            "comes earlier in sys.path; rename one of them, or restart the process"
        )
