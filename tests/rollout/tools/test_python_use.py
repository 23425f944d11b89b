"""Ordinary use of the Python tool, its end by a caller, and what holds without seccomp."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megarlhf.rollout.tools.python.guard import FOLDER_PREFIX
from megarlhf.rollout.tools.python.isolation import PROTECTIONS
from megarlhf.rollout.tools.python.limits import PythonLimits, describe_python
from megarlhf.rollout.tools.python.tool import missing_protection, remove_old_folders, run_python
from tests.rollout.tools.python_calls import LIMITS, call, guards
from tests.rollout.tools.python_calls import run_folder as run_folder

USES = {
    "print": ("print('a', 1)", "a 1"),
    "value": ("x = 20\nx * 2 + 2", "42"),
    "no value of None": ("print(1)\nNone", "1"),
    "nothing": ("x = 1", "(no output)"),
    "order of writing": (
        "import sys\nprint(1)\nprint(2, file=sys.stderr)\nsys.stdout.write('3')\nsys.stderr.write('4\\n')\nprint(5)",
        "1\n2\n34\n5",
    ),
    "unicode": ("print('π ≠ 3', '\\ud800')", "π ≠ 3 \\ud800"),
    "large integer": ("2 ** 200", str(2**200)),
    "main": ("if __name__ == '__main__':\n    print('main')", "main"),
    "exit": ("print(1)\nexit = __import__('sys').exit\nexit('why')", "1\nwhy\n(exit status 1)"),
    "files": ("open('a.txt', 'w').write('b')\nprint(open('a.txt').read())", "b"),
    "own module": ("open('helper.py', 'w').write('x = 3')\nimport helper\nhelper.x", "3"),
    "temporary file": (
        "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write('x'); f.seek(0); print(f.read())",
        "x",
    ),
    "asyncio": ("import asyncio\nasync def f(): return await asyncio.sleep(0.01, 7)\nasyncio.run(f())", "7"),
    "threads": (
        "import concurrent.futures as f\nwith f.ThreadPoolExecutor(8) as pool: print(sum(pool.map(abs, range(-5, 0))))",
        "15",
    ),
    "thread that outlives the code": (
        (
            "import threading, time\ndef late(): time.sleep(0.05); print('late')\n"
            "threading.Thread(target=late).start()\nprint('code')"
        ),
        "code\nlate",
    ),
    "data class": ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)"),
}


@pytest.mark.parametrize("name", USES)
def test_use(name: str) -> None:
    code, expected = USES[name]
    assert call(code) == expected


def test_order_of_sets_is_the_same_in_each_call() -> None:
    assert call("set('abcdefgh')") == call("set('abcdefgh')") != call("sorted('abcdefgh')")


def test_random_numbers_follow_from_the_code() -> None:
    """A call that is repeated after a kill has the same result."""
    pytest.importorskip("numpy")
    one, two = "import random\nrandom.random()", "import random, numpy as np\nrandom.random(), np.random.rand()"
    assert call(one) == call(one) != call(one + "  ")
    assert call(two) == call(two)


@pytest.mark.parametrize("end", ["exit()", "quit(0)", "import sys; sys.exit()"])
def test_the_ways_to_end(end: str) -> None:
    assert call(f"print(1)\n{end}\nprint(2)") == "1"


def test_numpy_and_sympy() -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("sympy")
    code = "import numpy as np, sympy\nprint(np.linalg.inv(np.eye(99))[0, :2])\n"
    code += "x = sympy.Symbol('x')\nsympy.integrate(x**2, x)"
    assert call(code) == "[1. 0.]\nx**3/3"


def test_traceback_has_own_lines_only() -> None:
    """Frames of json, of a thread, and of what runs the code are left out; the exception's cause is kept."""
    seen = call(
        "import json\ndef f(text):\n    try:\n        json.loads(text)\n    except ValueError as e:\n"
        "        raise KeyError(1) from e\nf('{')"
    )
    assert [line for line in seen.splitlines() if "File " in line] == [
        '  File "<code>", line 4, in f',
        '  File "<code>", line 7, in <module>',
        '  File "<code>", line 6, in f',
    ]
    assert "json.decoder.JSONDecodeError: Expecting property name" in seen
    assert seen.endswith("KeyError: 1")
    assert call("1/0").splitlines()[2:4] == ["    1/0", "    ~^~"]
    seen = call("import threading\ndef f(): 1 / 0\nt = threading.Thread(target=f, name='T')\nt.start(); t.join()")
    assert seen.startswith(
        'In thread T: Traceback (most recent call last):\n  File "<code>", line 2, in f\n    def f(): 1 / 0'
    )
    assert "threading.py" not in seen
    assert 'File "<code>", line 1\n    x = (\n' in call("x = (")
    assert call("input()").endswith("EOFError: EOF when reading a line")


def test_long_output_keeps_its_ends() -> None:
    seen = call("print('a' * 1000)\nprint('b' * 1000)", PythonLimits(output_bytes=100))
    assert seen == "a" * 50 + "\n... (1902 bytes of output were dropped) ...\n" + "b" * 49


def test_calls_share_nothing_and_queueing_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of 0.4 s in one place, with a limit of 0.9 s each: the last one waits 0.8 s before it starts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    code = "import os, time\ntime.sleep(0.4)\nx = globals().get('x', 0) + 1\nopen('f', 'a').write('x')\nx, os.listdir()"

    async def calls() -> list[str]:
        return await asyncio.gather(*(run_python(code, PythonLimits(seconds=0.9)) for _ in range(3)))

    begun = time.monotonic()
    assert asyncio.run(calls()) == ["(1, ['f'])"] * 3
    assert time.monotonic() - begun > 1.2


def test_cancel_ends_the_code() -> None:
    async def cancelled() -> None:
        call = asyncio.create_task(run_python("while True: pass", LIMITS))
        while not (folders := list(Path(tempfile.gettempdir()).iterdir())):
            await asyncio.sleep(0.01)
        assert len(folders) == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not guards()

    asyncio.run(cancelled())


def test_death_of_the_caller_ends_the_code() -> None:
    """The caller is ended by SIGKILL; a process that it forked still holds the pipe to the guard open."""
    caller = (
        "import asyncio, os, threading, time\n"
        "from megarlhf.rollout.tools.python.tool import run_python, PythonLimits\n"
        "def fork():\n    time.sleep(0.5)\n    if not os.fork(): time.sleep(4); os._exit(0)\n"
        "    print('forked', flush=True)\n"
        "threading.Thread(target=fork).start()\n"
        "asyncio.run(run_python('while True: pass', PythonLimits(seconds=60.0)))"
    )
    environment = os.environ | {"TMPDIR": tempfile.gettempdir()}
    with subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"forked\n"
        assert len(guards()) == 2  # with the child
        process.kill()
        process.wait()
        until = time.monotonic() + 3
        while guards() and time.monotonic() < until:
            time.sleep(0.01)
        assert not guards()
        assert not list(Path(tempfile.gettempdir()).iterdir())


def test_old_folders_are_removed() -> None:
    """Removed: one without an owner. Kept: one that is locked, and one that may be about to be."""
    old, owned, new = (Path(tempfile.gettempdir(), FOLDER_PREFIX + name) for name in ("old", "owned", "new"))
    for folder in (old, owned, new):
        folder.mkdir()
        (folder / "file").touch()
        os.utime(folder, (1e9, 1e9) if folder != new else None)
    fd = os.open(owned, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    remove_old_folders()
    assert sorted(Path(tempfile.gettempdir()).iterdir()) == [new, owned]
    os.close(fd)
    os.utime(new, (1e9, 1e9))
    remove_old_folders()
    assert not list(Path(tempfile.gettempdir()).iterdir())


WITHOUT_SECCOMP = {
    "endless fork": ("import os\nwhile True: os.fork()", "started more threads or processes than the limit of 4"),
    "daemon": (
        (
            "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(99)\n"
            "    os._exit(0)\n"
            "os.wait()\nprint('done')"
        ),
        "done",
    ),
    "memory of many": (
        "import os, time\nfor _ in range(2):\n    if not os.fork(): break\nx = bytearray(90 << 20)\ntime.sleep(9)",
        "used more memory than the limit of 200 MB",
    ),
    "kill guard": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
}


@pytest.mark.skipif(bool(missing_protection()), reason="Landlock or seccomp is missing")
@pytest.mark.parametrize("name", WITHOUT_SECCOMP)
def test_without_seccomp(name: str) -> None:
    """Processes can be started then. All of them are counted and ended."""
    code, expected = WITHOUT_SECCOMP[name]
    limits = PythonLimits(seconds=2.0, processes=4, memory_mb=200)
    assert expected in call(code, limits, ("seccomp",))


def test_without_any_protection() -> None:
    """Folders can be made then, and are removed all the same."""
    code = "import os\nfor _ in range(9): os.mkdir('x'); os.chdir('x')\nopen('/etc/hostname').read() and 1"
    assert call(code, LIMITS, tuple(PROTECTIONS)) == "1"


def test_missing_protection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word in {"landlock": "Landlock is missing", "seccomp": "seccomp filters are missing"}.items():
        monkeypatch.setitem(PROTECTIONS, name, lambda: 0)
        assert any(word in sentence for sentence in missing_protection())


def test_guard_that_cannot_work_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/does/not/exist")
    with pytest.raises(RuntimeError, match=r"(?s)guard ended with status 1 and no answer: .*FileNotFoundError"):
        call("1")


def test_closed_standard_input() -> None:
    code = (
        "import os; os.close(0)\nimport asyncio\n"
        "from megarlhf.rollout.tools.python.tool import run_python, PythonLimits\n"
        "print(asyncio.run(run_python('1 + 1', PythonLimits())))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("2\n", "")


@pytest.mark.parametrize(
    "limit", [{"seconds": 0}, {"memory_mb": 1}, {"files": "9"}, {"processes": True}, {"seconds": float("nan")}]
)
def test_wrong_limits(limit: dict[str, object]) -> None:
    (name,) = limit
    with pytest.raises(ValueError, match=rf"limit '{name}' of the Python tool is .*; use an? (number|integer) of"):
        PythonLimits(**limit)  # type: ignore[arg-type]


def test_description_names_the_limits() -> None:
    function = describe_python(PythonLimits())["function"]
    assert function["name"] == "python"
    assert function["parameters"]["required"] == ["code"]
    assert "no network" in function["description"]
    assert "10 s, 512 MB of memory, 16 MB of files" in function["description"]
