"""Environments under another Python, which has neither megarlhf nor its packages.

The other Python is a virtual environment without packages. Not covered: other versions of Python than the one of the
tests, and compiled packages.
"""

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megarlhf.config.environment import EnvironmentConfig
from megarlhf.own_code.digest import digest_of
from megarlhf.own_code.interpreter import command_of, variables_of
from megarlhf.planning.own_code import check_own_code, own_sources
from megarlhf.rehearsal.fakes.inputs import ENVIRONMENT, stand_in
from megarlhf.rehearsal.fakes.lengths import Constant
from megarlhf.rollout.environments.pool import EnvironmentPool
from tests.planning.configs import MODEL, rl
from tests.refuses import refuses
from tests.rollout.environment_talk import talks, turn

CODE = """
import importlib.util
import json
import multiprocessing
import sys

from megarlhf import Answer


def child(queue):
    from megarlhf import Answer
    queue.put(Answer("from a child"))


class Shows:
    def __init__(self, more=""):
        self.more = more

    def reset(self, fields, seed):
        pass

    def step(self, turn):
        if turn.text == "child":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            answer = queue.get(timeout=20)
            process.join()
            return answer
        found = [name for name in ("megarlhf", "torch", "pydantic") if importlib.util.find_spec(name)]
        return Answer(json.dumps({"prefix": sys.prefix, "found": found, "path": sys.path, "more": self.more}))


class NoStep:
    def reset(self, fields, seed):
        pass
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Path of a Python without packages."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Name of a module that only PYTHONPATH has, and that this process cannot import."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "of_another_python.py").write_text(CODE)
    (tmp_path / "code" / "fails_there.py").write_text("import package_that_is_missing\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    monkeypatch.chdir(tmp_path)
    return "of_another_python"


@pytest.fixture
def talk(tmp_path, python, monkeypatch):
    def pool(function, args, **options):
        return EnvironmentPool(function, args, python=python, **options)

    monkeypatch.setattr("tests.rollout.environment_talk.EnvironmentPool", pool)
    yield from talks(tmp_path)


def test_a_conversation_under_another_python(talk, module, python, tmp_path):
    """It imports megarlhf, but none of this environment's packages; so does a process that it spawns."""
    made = talk(path=f"{module}:Shows", args={"more": "x"})
    key = made.pool.begin({}, 7)
    made.replies(key)
    shown = made.answer(key, "show").answer.messages
    state = json.loads(shown)
    assert state["prefix"] == str(Path(python).parents[1])
    assert (state["found"], state["more"]) == (["megarlhf"], "x")
    assert state["path"][:2] == [str(tmp_path), str(tmp_path / "code")]
    assert not {path for path in sys.path if "site-packages" in path} & set(state["path"])
    assert not {str(path) for path in Path(__file__).parents} & set(state["path"]), "the folder of megarlhf"
    made.pool.step(key, turn("child", 1))
    assert made.replies(key)[0].answer.messages == "from a child"


def test_the_check_runs_there(module, python):
    """The class is listed and has its digest, and this process does not import it."""
    cfg = configuration(python, module)
    (listed,) = (note for note in check_own_code(cfg) if "environment" in note)
    digest = own_sources(cfg)[f"environment {module}:Shows"]
    assert listed == (
        f"own code: environment.function = {module}:Shows ({Path.cwd()}/code/{module}.py, source {digest[:12]})"
    )
    assert module not in sys.modules


def test_the_digest_is_the_same_as_here(module, python, tmp_path, monkeypatch):
    there = own_sources(configuration(python, module))[f"environment {module}:Shows"]
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    assert there == digest_of(f"{module}:Shows", "environment")
    del sys.modules[module]


def configuration(python, module, name="Shows", **environment):
    return rl(
        {"train": "t.jsonl", "model": "m"},
        environment={"function": f"{module}:{name}", "python": str(python), **environment},
        rewards=[{"kind": "environment"}],
    )


@pytest.mark.parametrize("function, args, names", [
    ("of_another_python:Missing", {}, "of_another_python:Missing|has no function 'Missing'|its own packages"),
    ("of_another_python:NoStep", {}, "has no method step(turn)"),
    ("of_another_python:Shows", {"other": 1}, "unexpected keyword argument 'other'|environment.args"),
    ("fails_there:Any", {}, "cannot import fails_there|No module named 'package_that_is_missing'|fails_there.py:1"),
])  # fmt: skip
def test_a_class_that_cannot_be_used_there(module, python, function, args, names):
    where, _, name = function.partition(":")
    with refuses("environment.function", python, *names.split("|")):
        check_own_code(configuration(python, where, name, args=args))


@pytest.mark.parametrize("script, names", [
    ("exit 3", "is no Python|3.10 or later"),
    ('[ "$1" = -c ] && printf 3.9; exit 1', "is Python 3.9, which is too old|3.10 or later"),
    (f'[ "$1" = -c ] && exec {sys.executable} "$@"; echo "no room" >&2; exit 4', "status 4): no room"),
])  # fmt: skip
def test_an_interpreter_that_cannot_run_it(module, tmp_path, script, names):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with refuses("environment.function", *names.split("|")):
        check_own_code(configuration(program, module))


def test_a_file_that_cannot_be_executed_is_refused_at_load(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path, words in (("nowhere", "does not exist"), ("text", "is not executable"), ("", "is a folder")):
        with refuses("environment.python", words, "venv/bin/python"):
            EnvironmentConfig(function="mine:Any", python=f"~/{path}")
    kept = EnvironmentConfig(function="mine:Any", python=sys.executable)
    assert kept.interpreter == sys.executable, "a link stays: it tells which packages there are"


def test_the_bootstrap_reads_in_older_pythons(monkeypatch):
    """It has no syntax that is newer than Python 3.4; the modules that it loads do."""
    source = Path(command_of("any", sys.executable)[1]).read_text()
    nodes = list(ast.walk(ast.parse(source, feature_version=(3, 4))))
    assert len(nodes) > 50
    assert not [node for node in nodes if isinstance(node, ast.JoinedStr)]
    assert "__future__" not in {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    monkeypatch.setenv("PYTHONHOME", "/somewhere")
    assert "PYTHONHOME" not in variables_of(sys.executable)
    assert variables_of(None)["PYTHONHOME"] == "/somewhere"


def test_modules_of_the_worker_need_python_3_10_only():
    """What the other Python loads has no syntax of later versions, and imports the standard library only."""
    program = textwrap.dedent("""
        import ast, sys
        before = set(sys.modules)
        import megarlhf.data.sources.environment_records, megarlhf.rollout.environments.look
        import megarlhf.rollout.environments.worker
        ours = {name: module for name, module in sys.modules.items() if name.startswith("megarlhf")}
        for module in ours.values():
            ast.parse(open(module.__file__).read(), feature_version=(3, 10))
        others = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(len(ours) > 15, sorted(others - set(sys.stdlib_module_names) - {"__mp_main__"}))
    """)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root, env=dict(os.environ)
    )
    assert done.stdout.strip() == "True ['megarlhf']"


def test_a_rehearsal_asks_no_environment(module, python, tmp_path):
    """Its stand-in has our interface, and runs under this Python."""
    lengths = {"prompt_lengths": Constant(4), "response_lengths": Constant(4)}
    cfg = configuration(python, module, interface="gymnasium")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(MODEL))
    stood = stand_in(cfg, tmp_path, steps=1, **lengths).cfg.environment
    assert (stood.function, stood.interface, stood.python) == (ENVIRONMENT, "megarlhf", None)
