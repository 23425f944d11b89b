"""An MCP server for tests: `python mcp_server.py WAY`. Each note is a line of the file that NOTES names."""

import asyncio
import os
import sys
import time

WAY = sys.argv[1] if len(sys.argv) > 1 else "good"


def note(text: str) -> None:
    if path := os.environ.get("NOTES"):
        with open(path, "a") as file:
            file.write(text + "\n")


note(f"start {os.getpid()}")
if WAY == "ends":
    print("no key is set", file=sys.stderr)
    sys.exit(3)
if WAY == "silent":
    time.sleep(600)

from mcp.server.lowlevel import Server  # noqa: E402
from mcp.server.mcpserver import MCPServer  # noqa: E402
from mcp.server.mcpserver.utilities.types import Image  # noqa: E402
from mcp.types import ListToolsResult, Tool  # noqa: E402

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    note("add")
    return a + b


@server.tool()
def act(how: str) -> str:
    """Do something."""
    note(f"act {how}")
    if how == "exit":
        os._exit(3)
    if how == "raise":
        raise KeyError("no such row")
    if how == "noise":
        print("not a message", flush=True)
    return {"megabytes": "x" * 3_000_000, "unicode": "naïve 你好"}.get(how, how)


@server.tool()
async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
async def block(seconds: float) -> str:
    """Hold up the whole server."""
    time.sleep(seconds)
    return "done"


@server.tool()
def picture() -> Image:
    """Draw."""
    return Image(data=b"0123456789", format="png")


@server.tool()
def table() -> dict[str, int]:
    """Count."""
    return {"rows": 3}


async def list_wrong(context: object, params: object) -> ListToolsResult:
    return ListToolsResult(tools=[Tool(name="bad", description="Bad.", input_schema=SCHEMAS[WAY])])


SCHEMAS = {
    "wrong_schema": {"type": "object", "properties": {"a": {"type": "whole"}}},
    "no_object": {"type": "string"},
}
if WAY in SCHEMAS:
    import anyio
    from mcp.server.stdio import stdio_server

    async def serve() -> None:
        low = Server("tests", on_list_tools=list_wrong)
        async with stdio_server() as (read, write):
            await low.run(read, write, low.create_initialization_options())

    anyio.run(serve)
elif WAY == "http":
    server.run("streamable-http", port=int(sys.argv[2]))
elif WAY == "empty" or (WAY == "changes" and os.path.exists(os.environ["NOTES"] + ".second")):
    MCPServer("empty").run()
else:
    server.run()
