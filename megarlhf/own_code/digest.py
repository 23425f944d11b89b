"""Digests of the source of user code, by which a later start notices a change."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarlhf.own_code.failures import is_installed, is_standard_library, without_partials
from megarlhf.own_code.load import load, load_module


def digest_of(path: str, what: str) -> str:
    """SHA-256 of the source of `package.module:name`. `what`: its kind, such as "adapter".

    It covers the named module, the file with the code (another one where a factory or a decorator made it), and the
    user's modules that these import. Raises: ValueError where the module has no source.
    """
    value = load(path, what)
    files = [_source_of(path.partition(":")[0], f"{what} {path!r}")]
    code = without_partials(value)
    with contextlib.suppress(Exception):  # a callable object, of any kind: its class is named in the files
        code = inspect.unwrap(code)
    code = code if inspect.isroutine(code) or inspect.isclass(code) else type(code)
    with contextlib.suppress(TypeError, OSError):
        file, module = Path(inspect.getsourcefile(code) or ""), getattr(code, "__module__", None) or ""
        if file.suffix == ".py" and _is_own(module, file):
            files.append((module, file))
    return _digest(files)


def digest_of_module(name: str, what: str) -> str:
    """SHA-256 of the source of a user's module and of the user's modules that it imports. `what`: as for
    `load_module`."""
    load_module(name, what)
    return _digest([_source_of(name, what)])


def digest_of_script() -> dict[str, str]:
    """SHA-256 of the user's script that runs in this process and of the user's modules that it imports, by name; empty
    for a notebook and for a program that is installed."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or is_installed(Path(file)) or is_standard_library(file):
        return {}
    return {f"script {Path(file).name}": _digest([("__main__", Path(file))])}


def _source_of(module_name: str, label: str) -> tuple[str, Path]:
    module = sys.modules[module_name]
    file = getattr(module, "__file__", None) or ""
    if not file.endswith(".py"):
        raise ValueError(f"{label}: {module} has no file in Python; name a function in a module")
    return module.__name__, Path(file)


def _digest(waiting: list[tuple[str, Path]]) -> str:
    named = {module.partition(".")[0] for module, _ in waiting}
    files: dict[Path, bytes] = {}
    while waiting:
        module, path = waiting.pop()
        if path not in files:
            files[path] = path.read_bytes()
            waiting += _own_imports(files[path], module, path, named)
    digests = sorted((path.name, hashlib.sha256(content).hexdigest()) for path, content in files.items())
    return hashlib.sha256(repr(digests).encode()).hexdigest()


def _is_own(module: str, file: Path, named: Any = ()) -> bool:
    """Whether a module is the user's: neither Python's, nor megarlhf's, nor of an installed package, unless the
    configuration names that package (`named`)."""
    package = module.partition(".")[0]
    return package not in sys.stdlib_module_names | {"megarlhf"} and (package in named or not is_installed(file))


def _own_imports(source: bytes, module: str, file: Path, named: set[str]) -> Iterator[tuple[str, Path]]:
    """The user's modules that a file imports, anywhere in it, with their files."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
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
    for name in sorted(absolute):
        if name.partition(".")[0] in sys.stdlib_module_names:
            continue
        with contextlib.suppress(ImportError, ValueError, AttributeError):  # a name that is no module, or is missing
            spec = importlib.util.find_spec(name)
            if spec and spec.origin and spec.origin.endswith(".py") and _is_own(name, path := Path(spec.origin), named):
                yield name, path
