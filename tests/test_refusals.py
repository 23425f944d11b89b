"""The comparison of messages before and after a change. Not covered: `git archive`, and the package's sentences."""

from __future__ import annotations

import textwrap

import pytest

from tools.message_texts import Sources, names_in
from tools.refusals import Comparison, compare_sources, reasons_in

CONFIG = """
class TrainConfig:
    every: int
    check: str
"""
OLD = '''
def check(cfg, path):
    """Not a message: train.never_read; set it."""
    if cfg.every < 0:
        raise ValueError(f"train.every = {cfg.every} lies below nothing; give 0 or more")
    if cfg.num_steps % cfg.every:
        raise ValueError(f"train.num_steps is no multiple of train.every = {cfg.every}; use --round-steps")
    if not path.is_file():
        raise ValueError(_not_there(path))
    if not path.stat().st_size:
        raise ValueError(f"{path} holds no byte, its copy was interrupted; copy it anew")


def _not_there(path):
    why = "is a directory" if path.is_dir() else "does not exist"
    return f"{path} {why}; run `megarlhf init` in its parent"
'''
REWORDED = """
def check_training(train, file):
    if train.every < 0:
        raise ValueError(f"expected train.every of 0 or more, got {train.every}; choose another number")
    if train.num_steps % train.every:
        raise ValueError(
            f"train.every = {train.every} must divide train.num_steps; pass --round-steps to shorten the run"
        )
    if not file.exists():
        raise ValueError(missing_file(file))
    if not file.stat().st_size:
        raise ValueError(f"copying was interrupted: {file} holds 0 bytes. Copy it again")


def missing_file(file):
    return f"no file {file}: start with `megarlhf init` in the parent directory"
"""


def compared(old: str, new: str, renamed: dict[str, str] | None = None) -> Comparison:
    before, after = (
        {"p/config.py": CONFIG, f"p/{name}.py": textwrap.dedent(text)} for name, text in (("a", old), ("b", new))
    )
    return compare_sources(Sources(before), Sources(after), renamed or {})


def missing(old: str, new: str, renamed: dict[str, str] | None = None) -> list[str]:
    return [text.text for text, _ in compared(old, new, renamed).missing]


def test_nothing_is_missing_from_the_same_text_in_another_file():
    result = compared(OLD, OLD)
    assert [result.missing, result.reworded, result.added] == [[], [], []]
    assert len([text for text in result.same if text.kind == "raise"]) == 4
    assert not [text for text in result.same if "never_read" in text.text]


def test_reworded_messages_are_found_in_renamed_functions():
    result = compared(OLD, REWORDED)
    assert not result.missing
    assert not result.same
    assert sorted(pair.new.kind for pair in result.reworded) == ["part", "raise", "raise", "raise", "raise"]
    assert all(pair.old.names == pair.new.names for pair in result.reworded)


@pytest.mark.parametrize(
    ("line", "listed"),
    [
        ('raise ValueError(f"expected train.every', "lies below nothing"),
        ("raise ValueError(missing_file(file))", "`megarlhf init`"),
        ('raise ValueError(f"copying', "holds no byte"),
    ],
)
def test_a_deleted_raise_is_listed_among_reworded_ones(line: str, listed: str):
    lines = REWORDED.splitlines()
    (number,) = [number for number, text in enumerate(lines) if line in text]
    lines[number] = "        pass"
    (text,) = missing(OLD, "\n".join(lines))
    assert listed in text


def test_a_lost_flag_and_lost_advice_are_listed():
    assert len(missing(OLD, REWORDED.replace("--round-steps", "an option"))) == 1
    old = 'def f(x):\n    raise ValueError("a sample has no tokens, as its text is empty; remove it")'
    assert not missing(old, old.replace("; remove it", ". Drop it from the data, or fill it"))
    assert len(missing(old, old.replace("; remove it", ""))) == 1


def test_a_message_made_by_a_helper_counts_for_the_raise_that_says_it():
    (text,) = [text for text in compared(OLD, OLD).same if text.kind == "raise" and "megarlhf init" in text.names]
    assert text.text == "§ is a directory does not exist; run `megarlhf init` in its parent"
    variable = """
        def f(x):
            found = [f"{name}: weight_{name} is negative" for name in x]
            if found:
                raise ValueError("; ".join(found))
    """
    (said,) = [text for text in compared(variable, variable).same if text.kind == "raise"]
    assert said.text == "§: weight_§ is negative"


def test_equal_names_twice_need_two_new_messages():
    twice = """
        def f(x):
            if x < 0:
                raise ValueError("train.every is negative; raise it")
            if x > 9:
                raise ValueError("train.every is too large; lower it")
    """
    once = """
        def f(x):
            if not 0 <= x <= 9:
                raise ValueError("train.every is outside 0 to 9, too large or negative; change it")
    """
    assert len(missing(twice, once)) == 1


def test_renamed_keys():
    new = OLD.replace("train.every", "train.interval")
    assert len(missing(OLD, new)) == 2
    assert not missing(OLD, new, {"train.every": "train.interval"})


def test_names():
    text = (
        "set check: call, or see: docs/a-page.md; --flag takes 'a b' (config.json, num_heads), not 1 but 16 of § names"
    )
    assert names_in(text, {"check", "see"}) == {
        "check", "docs/a-page.md", "--flag", "a b", "config.json", "num_heads", "16",
    }  # fmt: skip


def test_reasons():
    assert reasons_in(["# comment", "", "p/a.py train.every: the key: gone"]) == [
        (["p/a.py", "train.every"], "the key: gone")
    ]
