"""Where a user's reward function failed: its line, and the import of its module. Not covered: all else of calls
(test_reward_calls.py).
"""

import functools
import itertools
import json
from dataclasses import replace

import pytest

from megarlhf.own_code.load import load_function
from megarlhf.rollout.rewards.calls import call
from megarlhf.rollout.rewards.forms import Form
from tests.rollout.test_reward_pool import batch

ONE_BY_ONE = Form()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module; each has a name of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    numbers = itertools.count()

    def write(text, name=""):
        # Not test_...: pytest would rewrite it, as it does no user's.
        name = name or f"rules_{tmp_path.name}_{next(numbers)}".replace("-", "_")
        (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "import sys\nsys.exit(0)\n",
            r"SystemExit: 0 \(.*\.py:2\); what a command line calls belongs under `if __name_",
        ),
        ("import argparse\nargparse.ArgumentParser().parse_args(['-x'])\n", r"SystemExit: 2 \(.*_0\.py:2\); what"),
        ("import asyncio\nraise asyncio.CancelledError\n", r"CancelledError \(.*\.py:2\)$"),
        ("raise ValueError('x' * 5_000_000)\n", r"ValueError: x{1000}\.\.\. \(5000000 characters\) \(.*\.py:1\)$"),
        ("f = (\n", r"SyntaxError: '\(' was never closed \(\w+\.py, line 1\)$"),
        ("def __getattr__(name):\n    raise KeyError(name)\n", r"KeyError: 'f' \(.*\.py:2\)$"),
    ],
)
def test_a_module_that_does_not_come_to_its_end_is_an_error(module, text, words):
    with pytest.raises(ValueError, match=words):
        load_function(f"{module(text)}:f", "reward rule")


def test_modules_without_a_file(module, tmp_path):
    """Built into Python, and a folder without __init__.py."""
    with pytest.raises(
        ValueError, match="the module time, which is built into Python, has no function 'slep'; did you"
    ):
        load_function("time:slep", "reward rule")
    module("", "no_package_here/rules")
    with pytest.raises(
        ValueError, match=r"no_package_here is a folder without __init__\.py, which has no function 'f'"
    ):
        load_function("no_package_here:f", "reward rule")


DECORATORS = """
import functools

def plain(function):
    def wrapper(*args):
        return function(*args)
    return wrapper

def wraps(function):
    @functools.wraps(function)
    def wrapper(*args):
        try:
            return function(*args)
        finally:
            args = ()
    return wrapper
"""
DECORATED = """
import functools, json
from {decorators} import plain, wraps

@wraps
def wrapped(prompt, response, fields):
    return json.loads("no")  # wrapped

@plain
def covered(prompt, response, fields):
    return json.loads("no")  # covered

@functools.lru_cache
def cached(prompt, response, fields=None):
    return json.loads("no")  # cached

class Judge:
    @wraps
    def __call__(self, prompt, response, fields):
        return json.loads("no")  # judge

bare = Judge()
judge = functools.partial(bare)
"""


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("name", ["wrapped", "covered", "judge", "bare"])
def test_the_line_is_the_user_s(module, monkeypatch, tmp_path, name, installed):
    """Below decorators and in the `__call__` of an object: neither the decorator's line nor json's. A decorator that
    says nothing of what it wraps is taken for the function, unless it is an installed package's."""
    decorators = f"decorators_{installed}_{name}"
    folder = "site-packages" if installed else "beside"
    module(DECORATORS, f"{folder}/{decorators}")
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    users = module(DECORATED.format(decorators=decorators))
    function = load_function(f"{users}:{name}", "reward rule")
    (found,) = call(function, ONE_BY_ONE, batch(responses=("a",)))
    if name == "covered" and not installed:
        assert f"{decorators}.py:6: return function(*args)" in found.error
    else:
        assert f"{users}.py:" in found.error
        assert found.error.endswith(f'return json.loads("no")  # {name.replace("bare", "judge")}')


def test_the_line_below_a_cache_a_partial_and_none(module):
    """A cache in C is unwrapped; a builtin that refuses its arguments has no line."""
    module(DECORATORS, "decorators_of_cached")
    cached = load_function(f"{module(DECORATED.format(decorators='decorators_of_cached'))}:cached", "reward rule")
    row = replace(batch(responses=("a",)), fields=[None])
    (found,) = call(cached, ONE_BY_ONE, row)
    assert found.error.endswith('return json.loads("no")  # cached')
    (found,) = call(functools.partial(int, "x"), ONE_BY_ONE, row)
    assert found.error == "raised TypeError: int() takes at most 2 arguments (4 given); it takes other arguments"
    (found,) = call(functools.partial(lambda one, *_: json.loads(one), "no"), ONE_BY_ONE, row)
    assert found.error.endswith('json.loads(one), "no"), ONE_BY_ONE, row)')


def test_an_exception_s_text_is_cut(module):
    """And the line of source; one whose text raises is said as well."""

    class Mute(Exception):
        def __str__(self):
            raise KeyError

    def raises(prompt, response, fields):
        raise ValueError("x" * 5_000_000) if response == "a" else Mute

    first, second, _ = call(raises, ONE_BY_ONE, batch())
    assert first.error.startswith("raised ValueError: " + "x" * 1000 + "... (5000000 characters); " + __file__)
    assert second.error.startswith("raised Mute: (its text raises KeyError); ")
    name = module(f"def f(prompt, response, fields): return 1 / 0, [{'1, ' * 1000}]\n")
    (found,) = call(load_function(f"{name}:f", "reward rule"), ONE_BY_ONE, batch(responses=("a",)))
    assert "division by zero; " in found.error
    assert found.error.endswith("1, 1,...")
    assert len(found.error) < 500
