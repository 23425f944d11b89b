"""Configuration of tools that a model may call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, PositiveInt, model_validator

from megarlhf.config.own_names import PathOnly
from megarlhf.config.roles import FrozenModel, Positive

PYTHON = "python"
"""Name of the Python tool with its default limits."""


class PythonLimitsConfig(FrozenModel):
    """Limits of one call of the Python tool."""

    seconds: Positive = 10.0
    """Most time of a call."""
    memory_mb: PositiveInt = 512
    """Most memory, interpreter and libraries included (numpy takes 150 MB)."""
    processes: PositiveInt = 16
    """Most threads."""
    output_bytes: PositiveInt = 20_000
    """Most bytes of output that the model sees: the first and the last half."""
    file_mb: PositiveInt = 16
    """Largest size of all files together."""
    files: PositiveInt = 200
    """Most files."""


class ToolConfig(FrozenModel):
    """A tool, or the tools of a server: `function`, `mcp` or `python`. A text in place of the mapping is a `function`,
    or the word `python`."""

    function: PathOnly | None = None
    """Function of yours, `package.module:function`, with a docstring and types."""
    mcp: str | None = None
    """Command that starts an MCP server (`python server.py`), or the URL of one that runs (`http://HOST:PORT/mcp`).
    Each worker process has a server of its own, or a connection to the URL."""
    names: tuple[str, ...] = ()
    """Tools of the server that the model gets; default: all."""
    env: tuple[str, ...] = ()
    """Names of environment variables of the run that the server gets, such as that of a key, besides PATH, HOME and a
    few others. Values are not written down: for others write `env NAME=VALUE COMMAND`."""
    cwd: Path | None = None
    """Working directory of the server."""
    python: PythonLimitsConfig | None = None
    """Python code in a process of its own, without network, with these limits."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = [name for name in ("function", "mcp", "python") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"got {' and '.join(kinds) or 'none of function, mcp and python'}, expected one of function, mcp and "
                "python in each entry of tools"
            )
        if self.mcp is None and (of_server := self.changed("names", "env", "cwd")):
            raise ValueError(f"{of_server[0]} is of an MCP server, and {kinds[0]} has none; leave it out")
        return self

    @property
    def kind(self) -> Literal["function", "mcp", "python"]:
        """Kind of the tool."""
        return "function" if self.function is not None else "mcp" if self.mcp is not None else "python"


def _as_mapping(tool: Any) -> Any:
    if isinstance(tool, str):
        return {"python": {}} if tool == PYTHON else {"function": tool}
    return tool


Tool = Annotated[ToolConfig, BeforeValidator(_as_mapping)]
"""A tool in any of its forms."""
