"""Prompts of a user's environment as a data source. Not covered: training on them, and packages with environments."""

import json
import os
import subprocess
import sys

import pytest

from megarlhf.data.sources import environment_source
from megarlhf.data.sources.environment_source import generate, look_at_source
from megarlhf.data.sources.find import find, is_there, source_files
from megarlhf.data.sources.procedural import parse, require_disjoint
from megarlhf.data.tokenize.load import _content
from megarlhf.planning.own_code import check_own_code, own_sources
from tests.command import ROOT
from tests.data.in_memory import load_records, source_of
from tests.planning.configs import rl
from tests.refuses import refuses

MODULE = "tests.data.environments_for_source"


def named(name, query="size=3&seed=4"):
    return f"environment:{MODULE}:{name}?{query}"


def test_records_by_a_method_with_parameters():
    name = named("Asks", "size=3&seed=4&times=2&more=[a, b]")
    records = load_records(name, fields=("prompt",))
    assert [(record["prompt"], record["answer"]) for record in records] == [("4 x 2", 8), ("5 x 2", 10), ("6 x 2", 12)]
    assert records[2].where == f"{name}, item 2"
    source = parse(name)
    assert (source.kind, source.task, source.python) == ("environment", f"{MODULE}:Asks", None)
    assert source.other_params() == {"times": 2, "more": ["a", "b"]}


def test_a_static_method_needs_no_object():
    """Records may be conversations, and what is printed is no record."""
    records = load_records(named("Static"))
    assert len({record["messages"][0]["content"] for record in records}) == 3


@pytest.mark.parametrize("name, prompt", [
    ("Game", "game 5 None 1"), ("AsyncGame", "async 5"), ("make_game", "game 5 None 1"),
])  # fmt: skip
def test_observations_of_reset_are_prompts(name, prompt):
    """Each of an object of its own, which is closed; record n has seed + n."""
    records = generate(named(name))
    assert records[1] == {"prompt": prompt, "environment_seed": 5}
    assert [record["environment_seed"] for record in records] == [4, 5, 6]


def test_records_do_not_depend_on_the_hashes_of_a_rank():
    """`Static` walks through a set."""
    name = named("Static", "size=7&seed=0")
    code = f"from megarlhf.data.sources.environment_source import generate; print(generate({name!r}))"
    expected = repr(generate(name))
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


@pytest.mark.parametrize("name, names", [
    ("Returns?size=3&seed=0&what=fewer", "returned 2 records|prompts(size=3, seed=0)|expected 3"),
    ("Returns?size=3&seed=0&what=more", "more than 3 records"),
    ("Returns?size=3&seed=0&what=text", "'abc' from prompts|a list of 3 records"),
    ("Returns?size=3&seed=0&what=none", "returned None from prompts"),
    ("Returns?size=3&seed=0&what=numbers", "returned 5 as record 0|a mapping with prompt or messages"),
    ("Returns?size=3&seed=0&what=set", "record 0|JSON cannot hold"),
    ("Returns?size=3&seed=0&what=clock", "record 1 was another one|prompt = |random.Random(seed)"),
    ("Raises?size=3&seed=0", "raised KeyError: \"the user's\"|raise KeyError"),
    ("Ends?size=3&seed=0", "without an answer (status 3)"),
    ("NoText?size=3&seed=0", "the observation [0] from reset|a text"),
])  # fmt: skip
def test_what_is_no_set_of_records_is_named(name, names):
    with refuses(f"{MODULE}:{name.partition('?')[0]}", *names.split("|")):
        generate(f"environment:{MODULE}:{name}")


@pytest.mark.parametrize("name, names", [
    ("Missing?size=3&seed=0", "has no function 'Missing'"),
    ("Asks?size=3&seed=0&tims=2", "parameters that are given (tims)|'tims'|size, seed and python"),
    ("Ours?size=3&seed=0", "its method reset is called as reset(seed=...)|'fields'"),
    ("Nothing?size=3&seed=0", "makes no prompts|prompts(size, seed)|reset(*, seed, options)"),
    ("NoSeed?size=3&seed=0", "its reset takes no seed"),
    ("OtherPrompts?size=3&seed=0", "its method prompts is called as prompts(size, seed)"),
])  # fmt: skip
def test_a_class_that_makes_no_prompts_is_refused_before_the_run(name, names):
    """The check of a start names the key."""
    cfg = rl({"train": f"environment:{MODULE}:{name}", "model": "m"})
    with refuses("data.train", *names.split("|")):
        check_own_code(cfg)


@pytest.mark.parametrize("name, names", [
    ("environment:mine?size=3&seed=0", "'mine' is no import path"),
    ("environment:mine:Any?size=3", "seed = None|environment:mine:Any?size=500&seed=0"),
    ("environment:mine:Any?size=3&seed=0&python=/nowhere/python", "python = /nowhere/python does not exist"),
])  # fmt: skip
def test_a_bad_name_is_refused_when_it_is_read(name, names):
    with refuses(*names.split("|")):
        find(source_of(name))


def test_it_is_a_source_like_other_generated_ones():
    source = source_of(named("Asks"))
    assert find(source).count_rows(0, 0) == 3
    assert is_there([source])
    assert source_files([source]) == set()
    with refuses("split 'test'"):
        load_records(named("Asks"), split="test")
    with refuses("data.validation", "2 items", "seed of 7"):
        require_disjoint(named("Asks"), named("Asks", "size=3&seed=5&python=/other/python"))
    require_disjoint(named("Asks"), named("Asks", "size=3&seed=7"))
    require_disjoint(named("Asks"), named("Game"))


def test_first_rows_are_made_once(monkeypatch):
    """Checks before the run read them several times."""
    name, calls, made = named("Asks", "size=4&seed=11"), [], environment_source.generate
    monkeypatch.setattr(environment_source, "generate", lambda name: calls.append(name) or made(name))
    for _ in range(2):
        rows = find(source_of(name)).first_rows(2)
        assert rows[1] == (f"{name}, item 1", {"prompt": "12 x 1", "answer": 12})
    assert (len(rows), calls) == (2, [name])


def test_changed_code_gives_other_samples(tmp_path, monkeypatch):
    """The key of kept samples has the digest of the source; a resume point has that of the samples instead."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file, name = tmp_path / "asks_for_test.py", "environment:asks_for_test:Asks?size=1&seed=0"
    contents = []
    for word in ("first", "second"):
        file.write_text(f"class Asks:\n    def prompts(self, size, seed):\n        return [{{'prompt': {word!r}}}]\n")
        contents.append(_content(find(source_of(name)), tmp_path))
        assert generate(name) == [{"prompt": word}]
    assert contents[0][:2] == contents[1][:2] == ["generated", name]
    assert contents[0][2] != contents[1][2] == look_at_source(name).digest
    cfg = rl({"train": name, "model": "m"})
    assert f"own code: data.train = asks_for_test:Asks ({file}, source {contents[1][2][:12]})" in check_own_code(cfg)
    assert own_sources(cfg) == {}
    assert "asks_for_test" not in sys.modules, "another process imports it"


def test_another_python(tmp_path, monkeypatch):
    """It has the environment's packages; here, none."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    file = tmp_path / "shows_for_test.py"
    file.write_text("import sys\nclass Shows:\n    def prompts(size, seed):\n        return [{'prompt': sys.prefix}]\n")
    file.write_text(file.read_text().replace("    def", "    @staticmethod\n    def"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "environment:shows_for_test:Shows?size=1&seed=0&python=~/venv/bin/python"
    assert json.dumps(generate(name)) == json.dumps([{"prompt": str(tmp_path / "venv")}])
    with refuses("cannot import shows_nowhere", "venv/bin/python"):
        look_at_source(name.replace("shows_for_test", "shows_nowhere"))
