"""The arguments that the installed vLLM knows, without importing it: an import takes seconds and touches devices."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """Those of `names` that vLLM does not know, each with the nearest that it does.

    Nothing where vLLM's source cannot be found or is laid out differently: building the engine then refuses them.
    """
    names = list(names)
    vllm_names = known_arguments() if names else frozenset()
    mistakes = []
    for name in names:
        if vllm_names and name not in vllm_names:
            near = difflib.get_close_matches(name, vllm_names, n=1)
            mistakes.append(f"vLLM has no argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return mistakes


def known_arguments(search_path: list[str] | None = None) -> frozenset[str]:
    """The public fields of vLLM's `EngineArgs`, read from its source; empty if there is none."""
    spec = PathFinder.find_spec("vllm", search_path)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    sources = [path for folder in folders if (path := Path(folder) / "engine" / "arg_utils.py").is_file()]
    for node in [node for source in sources for node in ast.parse(source.read_text(encoding="utf-8")).body]:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (field.target for field in node.body if isinstance(field, ast.AnnAssign))
            names = (field.id for field in fields if isinstance(field, ast.Name))
            return frozenset(name for name in names if not name.startswith("_"))
    return frozenset()
