"""Configuration of tools that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, PositiveInt, Tag

from megarlhf.config.own_names import PathOnly, require_path
from megarlhf.config.roles import FrozenModel, Positive

PYTHON = "python"
"""Name of the Python tool with its default limits."""


class McpToolConfig(FrozenModel):
    """Tools of an MCP server. Each worker process has a server of its own, or a connection to the URL."""

    mcp: str
    """Command that starts the server (`python server.py`), or the URL of one that runs (`http://HOST:PORT/mcp`)."""
    names: tuple[str, ...] = ()
    """Tools of the server that the model gets; default: all."""
    env: tuple[str, ...] = ()
    """Names of environment variables of the run that the command gets, such as that of a key, besides PATH, HOME and
    a few others. Values are not written down: for others write `env NAME=VALUE COMMAND`."""
    cwd: Path | None = None
    """Working directory of the command."""


class PythonLimitsConfig(FrozenModel):
    """Limits of one call of the Python tool."""

    seconds: Positive = 10.0
    """Time."""
    memory_mb: PositiveInt = 512
    """Memory of all its processes."""
    processes: PositiveInt = 16
    """Processes and threads."""
    output_bytes: PositiveInt = 20_000
    """Bytes of output that the model sees."""
    file_mb: PositiveInt = 16
    """Size of all files that it writes."""
    files: PositiveInt = 200
    """Number of files."""


class PythonToolConfig(FrozenModel):
    """Python code in a process of its own, without network (docs/tools.md)."""

    python: PythonLimitsConfig


def _kind(tool: Any) -> str:
    """Kind of a tool in the configuration. Raises: ValueError for something else."""
    if isinstance(tool, str):
        return "function"
    for kind, model in (("mcp", McpToolConfig), ("python", PythonToolConfig)):
        if isinstance(tool, model) or (isinstance(tool, Mapping) and kind in tool):
            return kind
    raise ValueError(
        f"got {tool!r}, expected a tool: a function's import path (mine:search), {{mcp: COMMAND OR URL}}, {PYTHON}, or "
        f"{{{PYTHON}: {{seconds: 5}}}}"
    )


def _named(tool: Any) -> Any:
    return tool if tool == PYTHON or not isinstance(tool, str) else require_path(tool)


Tool = Annotated[
    Annotated[PathOnly | str, BeforeValidator(_named), Tag("function")]
    | Annotated[McpToolConfig, Tag("mcp")]
    | Annotated[PythonToolConfig, Tag("python")],
    Discriminator(_kind),
]
"""A tool: the import path of a function, `python`, or a mapping."""
