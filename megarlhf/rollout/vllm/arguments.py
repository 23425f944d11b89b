"""Arguments of the installed vLLM, read without importing it: an import takes seconds and touches devices."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """Names that vLLM does not know, each with the nearest that it does.

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
    for node in _statements("engine/arg_utils.py", search_path):
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (field.target for field in node.body if isinstance(field, ast.AnnAssign))
            names = (field.id for field in fields if isinstance(field, ast.Name))
            return frozenset(name for name in names if not name.startswith("_"))
    return frozenset()


def cpu_head_sizes(search_path: list[str] | None = None) -> tuple[int, ...]:
    """The sizes of an attention head that vLLM computes on a CPU, read from its source; empty if there are none."""
    for statement in _statements("v1/attention/backends/cpu_attn.py", search_path):
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
                returned = node.body[-1]
                if isinstance(returned, ast.Return) and isinstance(returned.value, ast.List):
                    return tuple(ast.literal_eval(returned.value))
    return ()


def cpu_experts_multiple(search_path: list[str] | None = None) -> int:
    """Divisor of the hidden size of a mixture of experts that vLLM on a CPU demands, read from its source; 1 if
    that is not there."""
    for node in _statements("model_executor/layers/fused_moe/experts/cpu_moe.py", search_path):
        if isinstance(node, ast.ClassDef) and node.name == "CPUUnquantizedExperts":
            for statement in node.body:
                if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "output_alignment":
                    return int(ast.literal_eval(statement.value))
    return 1


def _statements(file: str, search_path: list[str] | None) -> list[ast.stmt]:
    """Statements of a file of the installed vLLM; none where it is not there."""
    spec = PathFinder.find_spec("vllm", search_path)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    sources = [path for folder in folders if (path := Path(folder) / file).is_file()]
    return [node for source in sources for node in ast.parse(source.read_text(encoding="utf-8")).body]
