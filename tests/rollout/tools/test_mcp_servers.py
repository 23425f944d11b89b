"""Real MCP servers, written with the package: their results, and all that they may do wrong.

Not covered: servers that ask the client for something (sampling, roots), which are told that there is none.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from megarlhf.rollout.tools import mcp_servers
from megarlhf.rollout.tools.call import ToolError
from megarlhf.rollout.tools.mcp_servers import McpServer
from tests.rollout.test_reward_processes import is_running

SERVER = Path(__file__).with_name("mcp_server.py")


def command(way: str) -> str:
    return f"'{sys.executable}' '{SERVER}' {way}"


class Started:
    """A server with the notes that it writes."""

    def __init__(self, notes: Path, way: str = "good", seconds: float = 2.0, **spec):
        self.notes = notes
        self.server = McpServer({"mcp": f"env NOTES='{notes}' {command(way)}", **spec}, seconds)
        self.described = self.server.start()

    def call(self, name, **arguments):
        return asyncio.run(self.server.call(name, arguments))

    def pids(self):
        return [int(line.split()[1]) for line in self.notes.read_text().splitlines() if line.startswith("start")]

    def count(self, line):
        return self.notes.read_text().splitlines().count(line)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    started = Started(tmp_path_factory.mktemp("good") / "notes")
    yield started
    started.server.close()
    assert not any(map(is_running, started.pids()))


def test_descriptions_are_those_of_the_server(good):
    functions = [tool["function"] for tool in good.described]
    assert [function["name"] for function in functions] == ["add", "act", "slow", "block", "picture", "table"]
    assert functions[0]["description"] == "Add two numbers."
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    assert functions[0]["parameters"] == {"type": "object", "properties": numbers, "required": ["a", "b"]}


@pytest.mark.parametrize("name, arguments, text", [
    ("add", {"a": 2, "b": 3}, "5"),
    ("act", {"how": "unicode"}, "naïve 你好"),
    ("act", {"how": "noise"}, "noise"),
    ("act", {"how": "megabytes"}, "x" * 3_000_000),
    ("picture", {}, "(an image of 10 bytes is left out)"),
    ("slow", {"seconds": 0.01}, "done"),
])  # fmt: skip
def test_results(good, name, arguments, text):
    """A line of output that is no message harms nothing."""
    assert good.call(name, **arguments) == text
    assert '"rows": 3' in good.call("table")


def test_calls_at_once_do_not_wait_for_each_other(good):
    async def both():
        return await asyncio.gather(*(good.server.call("slow", {"seconds": 0.5}) for _ in range(8)))

    begun = time.monotonic()
    assert asyncio.run(both()) == ["done"] * 8
    assert time.monotonic() - begun < 2.0


@pytest.mark.parametrize("name, arguments, words", [
    ("act", {"how": "raise"}, "Error executing tool act"),
    ("add", {"a": "x"}, "validation error"),
    ("none", {}, "none"),
    ("slow", {"seconds": 60}, "took longer than 2 s"),
])  # fmt: skip
def test_failures_are_words_for_the_model(good, name, arguments, words):
    """And the same server answers the next call."""
    before = good.pids()
    with pytest.raises(ToolError, match=words):
        good.call(name, **arguments)
    assert good.call("add", a=1, b=1) == "2"
    assert good.pids() == before


def test_a_cancelled_call_leaves_the_server_as_it_was(good):
    async def cancelled():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(good.server.call("slow", {"seconds": 60}), 0.1)
        return await good.server.call("add", {"a": 1, "b": 2})

    assert asyncio.run(cancelled()) == "3"


def test_a_server_that_ends_during_a_call_is_started_anew_and_the_call_is_not_repeated(good):
    before = len(good.pids())
    with pytest.raises(ToolError, match="ended during the call"):
        good.call("act", how="exit")
    assert good.call("add", a=1, b=2) == "3"
    assert len(good.pids()) == before + 1
    assert good.count("act exit") == 1


def test_a_server_that_is_killed_between_two_calls_loses_none(good):
    os.kill(good.pids()[-1], signal.SIGKILL)
    time.sleep(0.05)
    before = good.count("add")
    assert good.call("add", a=2, b=2) == "4"
    assert good.count("add") == before + 1


def test_a_server_that_other_code_keeps_from_answering_is_not_taken_for_dead(good, monkeypatch):
    """A function that is not async holds up its server, which gives no sign of life meanwhile."""
    monkeypatch.setattr(mcp_servers, "PING_SECONDS", 0.05)
    before = good.pids()

    async def both():
        return await asyncio.gather(good.server.call("block", {"seconds": 0.5}), later())

    async def later():
        await asyncio.sleep(0.1)
        return await good.server.call("add", {"a": 1, "b": 2})

    assert asyncio.run(both()) == ["done", "3"]
    assert good.pids() == before


def test_a_server_that_hangs_is_started_anew(good, monkeypatch):
    """It gives no sign of life although it should have nothing to do."""
    monkeypatch.setattr(mcp_servers, "PING_SECONDS", 0.2)
    with pytest.raises(ToolError, match="took longer than 2 s"):
        good.call("block", seconds=600)
    before = len(good.pids())
    assert good.call("add", a=1, b=2) == "3"
    assert len(good.pids()) == before + 1


def test_a_server_that_describes_other_tools_when_it_starts_again(tmp_path):
    started = Started(tmp_path / "notes", "changes")
    try:
        (tmp_path / "notes.second").touch()
        os.kill(started.pids()[0], signal.SIGKILL)
        with pytest.raises(ToolError, match=r"cannot be started again: .* has no tools"):
            started.call("add", a=1, b=1)
    finally:
        started.server.close()


def test_chosen_tools(tmp_path):
    started = Started(tmp_path / "notes", names=["table", "add"])
    started.server.close()
    assert [tool["function"]["name"] for tool in started.described] == ["table", "add"]


def test_closing_during_a_call_and_twice(tmp_path):
    started = Started(tmp_path / "notes", seconds=30.0)

    async def closing():
        call = asyncio.ensure_future(started.server.call("slow", {"seconds": 60}))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(started.server.close)
        return await asyncio.wait({call}, timeout=5)

    done, _ = asyncio.run(closing())
    assert isinstance(done.pop().exception(), ToolError)
    started.server.close()
    assert not is_running(started.pids()[0])


@pytest.mark.parametrize("target, words", [
    ("no-such-program serve", "cannot be started: .*no-such-program.*; give a command that is found, or a URL"),
    ("", "is no command"),
    ("python 'x", "is no command .No closing quotation.; write it as in a shell"),
    (command("ends"), "ended before it answered; its last words: no key is set"),
    (command("empty"), "has no tools; name another server"),
    (command("wrong_schema"), "the schema of the arguments of 'bad' is no JSON schema .*'whole' is not valid"),
    (command("no_object"), "cannot be used: MCPError: Handler returned an invalid result"),
    ("http://127.0.0.1:9/mcp", "cannot be used: ConnectError"),
])  # fmt: skip
def test_servers_that_cannot_be_used(target, words):
    with pytest.raises(ValueError, match=f"(?s)^the MCP server .*{words}"):
        McpServer({"mcp": target}, 2.0).start()


def test_variables_of_the_run(tmp_path, monkeypatch):
    """A server gets those that are named, and no others."""
    with pytest.raises(ValueError, match="needs the variable SOME_KEY, which is not set; export it"):
        McpServer({"mcp": command("good"), "env": ["SOME_KEY"]}, 2.0).start()
    monkeypatch.setenv("SOME_KEY", "1")
    monkeypatch.setenv("OTHER_KEY", "2")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    server = McpServer({"mcp": command("good"), "env": ["SOME_KEY", "NOTES"]}, 2.0)
    try:
        server.start()
        pid = int((tmp_path / "notes").read_text().split()[1])
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"SOME_KEY=1" in variables
        assert b"OTHER_KEY=2" not in variables
    finally:
        server.close()


def test_a_server_that_does_not_have_a_chosen_tool(tmp_path):
    with pytest.raises(ValueError, match="has no tool 'subtract'; it has add, act, slow"):
        Started(tmp_path / "notes", names=["subtract"])


def test_a_server_that_never_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_servers, "START_SECONDS", 1.0)
    with pytest.raises(ValueError, match="did not"):
        Started(tmp_path / "notes", "silent")
    (pid,) = (int(line.split()[1]) for line in (tmp_path / "notes").read_text().splitlines())
    assert not is_running(pid)


def test_a_server_behind_a_url(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"

    def started():
        process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
        until = time.monotonic() + 30
        while True:
            try:
                httpx.get(url)
                return process
            except httpx.TransportError:
                assert time.monotonic() < until
                time.sleep(0.05)

    process = started()
    try:
        server = McpServer({"mcp": url}, 2.0)
        assert server.start()[0]["function"]["name"] == "add"
        assert asyncio.run(server.call("add", {"a": 20, "b": 22})) == "42"
        process.kill()
        process.wait()
        process = started()  # which knows nothing of the session
        assert asyncio.run(server.call("add", {"a": 20, "b": 23})) == "43"
        process.kill()
        process.wait()
        with pytest.raises(ToolError, match=r"cannot be started again|ended during the call"):
            asyncio.run(server.call("add", {"a": 20, "b": 22}))
        process = started()
        assert asyncio.run(server.call("add", {"a": 20, "b": 24})) == "44"
        server.close()
    finally:
        process.kill()
        process.wait()
