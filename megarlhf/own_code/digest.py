"""Digests of the source of user code, by which a later start notices a change."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megarlhf.own_code.advantage import Advantage
from megarlhf.own_code.failures import is_installed, is_standard_library, without_partials
from megarlhf.own_code.load import load, load_module


class Source(NamedTuple):
    """Source of user code."""

    file: str
    """File of the module that is named; `no file` where it has none."""
    digest: str
    """Digest of `digest_of`; some words where the module has no source in Python."""


def source_of(path: str, what: str) -> Source:
    """Source of `package.module:name`, which is imported. `what`: its kind, such as "adapter"."""
    try:
        digest = digest_of(path, what)
    except ValueError:
        digest = "no source in Python"
    module = sys.modules.get(path.partition(":")[0])
    return Source(getattr(module, "__file__", None) or "no file", digest)


def digest_of(path: str, what: str) -> str:
    """SHA-256 of the source of `package.module:name`. `what`: its kind, such as "adapter".

    It covers the named module and its packages, the file with the code (another one where a factory or a decorator made
    it), and the user's modules that these import by an import statement. Raises: ValueError where the module has no
    source.
    """
    return _digest(modules_of(path, what))


def modules_of(path: str, what: str) -> dict[str, Path]:
    """Files of the user's modules behind `package.module:name`, by name; see `digest_of`."""
    value = load(path, what)
    files = [_source_of(path.partition(":")[0], f"{what} {path!r}")]
    code = without_partials(value.compute if isinstance(value, Advantage) else value)
    with contextlib.suppress(Exception):  # a callable object, of any kind: its class is named in the files
        code = inspect.unwrap(code)
    code = code if inspect.isroutine(code) or inspect.isclass(code) else type(code)
    with contextlib.suppress(TypeError, OSError):
        file, module = Path(inspect.getsourcefile(code) or ""), getattr(code, "__module__", None) or ""
        if file.suffix == ".py" and _is_own(module, file):
            files.append((module, file))
    return _closure(files)


def digest_of_module(name: str, what: str) -> str:
    """SHA-256 of the source of a user's module and of the user's modules that it imports. `what`: as for
    `load_module`."""
    return _digest(modules_behind(name, what))


def modules_behind(name: str, what: str) -> dict[str, Path]:
    """Files of a user's module and of the user's modules that it imports, by name."""
    load_module(name, what)
    return _closure([_source_of(name, what)])


def digest_of_script() -> dict[str, str]:
    """SHA-256 of the user's script that runs in this process and of the user's modules that it imports, by name; empty
    for a notebook and for a program that is installed."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None or is_installed(Path(file)) or is_standard_library(file):
        return {}
    name = "__main__" if spec is None else spec.name
    return {f"script {Path(file).name}": _digest(_closure([(name, Path(file))]))}


def _source_of(module_name: str, label: str) -> tuple[str, Path]:
    module = sys.modules[module_name]
    file = getattr(module, "__file__", None) or ""
    if not (file.endswith(".py") and Path(file).is_file()):
        raise ValueError(f"{label}: {module} has no file in Python; name a function in a module")
    return module.__name__, Path(file)


def _closure(waiting: list[tuple[str, Path]]) -> dict[str, Path]:
    """The modules, their packages, and the user's modules that they import, with their files."""
    named = {module.partition(".")[0] for module, _ in waiting}
    files: dict[str, Path] = {}
    while waiting:
        module, path = waiting.pop()
        if module not in files:
            files[module] = path
            waiting += _own_imports(path.read_bytes(), module, path, named)
    return files


def _digest(files: Mapping[str, Path]) -> str:
    digests = sorted((module, hashlib.sha256(path.read_bytes()).hexdigest()) for module, path in files.items())
    return hashlib.sha256(repr(digests).encode()).hexdigest()


def _is_own(module: str, file: Path, named: Collection[str] = ()) -> bool:
    """Whether a module is the user's: neither Python's, nor megarlhf's, nor of an installed package, unless the
    configuration names that package (`named`)."""
    package = module.partition(".")[0]
    ours = package == "megarlhf" or is_standard_library(str(file))
    return not ours and (package in named or not is_installed(file))


def _own_imports(source: bytes, module: str, file: Path, named: Collection[str]) -> Iterator[tuple[str, Path]]:
    """The packages of a module, and the user's modules that its file imports anywhere, with their files."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = {module}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {base, *(f"{base}{'' if base.endswith('.') else '.'}{alias.name}" for alias in node.names)}
    absolute: set[str] = set()
    for name in names:
        with contextlib.suppress(ImportError):  # a relative import in a module without a package, which cannot run
            parts = importlib.util.resolve_name(name, package).split(".")
            absolute |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    for name in sorted(absolute - {"__main__"}):
        with contextlib.suppress(ImportError, ValueError, AttributeError):  # a name that is no module, or is missing
            spec = importlib.util.find_spec(name)
            path = Path((spec and spec.origin) or "")
            if path.suffix == ".py" and path.is_file() and _is_own(name, path, named):
                yield name, path
