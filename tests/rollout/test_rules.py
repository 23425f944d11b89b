"""Rule rewards on texts written out, and how a rule is found by name."""

import sys

import pytest

from megarlhf.rollout.rewards.rules import RULES, exact_match, load_rule, numeric_match


@pytest.mark.parametrize(
    "response, answer, expected",
    [
        ("85", "85", 1.0),
        (" 85\n", "85", 1.0),
        ("085", "85", 0.0),
        ("85.", "85", 0.0),
        ("", "85", 0.0),
        ("85", 85, 1.0),
    ],
)
def test_exact_match(response, answer, expected):
    assert exact_match("37+48=", response, {"answer": answer}) == expected


@pytest.mark.parametrize(
    "response, answer, expected",
    [
        ("so 37+48 is 85.", "85", 1.0),
        ("85 or 86", "85", 0.0),
        ("it costs $1,234.50", "1234.5", 1.0),
        ("it costs 1,234", 1234, 1.0),
        ("x=-5", "-5", 1.0),
        ("37-5", "5", 1.0),
        ("37-5", "-5", 0.0),
        ("8.5e1", 85.0, 1.0),
        ("085", "85", 1.0),
        ("0.1", "0.10", 1.0),
        ("no number", "0", 0.0),
        ("", "0", 0.0),
    ],
)
def test_numeric_match(response, answer, expected):
    assert numeric_match("", response, {"answer": answer}) == expected


def test_bad_answers_are_errors_and_not_zeros():
    with pytest.raises(ValueError, match=r"'eighty'.*expected a number"):
        numeric_match("", "80", {"answer": "eighty"})
    with pytest.raises(ValueError, match=r"needs the field 'answer', found 'solution'"):
        exact_match("", "80", {"solution": "80"})


def test_load_rule_by_name_and_by_path(tmp_path, monkeypatch):
    assert load_rule("exact_match") is RULES["exact_match"] is exact_match
    (tmp_path / "my_rules_for_test.py").write_text("def half(prompt, response, fields):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_rule("my_rules_for_test:half")("", "", {}) == 0.5
    with pytest.raises(ValueError, match=r"my_rules_for_test\.py has no function 'third'"):
        load_rule("my_rules_for_test:third")
    del sys.modules["my_rules_for_test"]


def test_unknown_rules_say_what_there_is():
    with pytest.raises(ValueError, match=r"'exact'.*exact_match, numeric_match.*package\.module:function"):
        load_rule("exact")
    with pytest.raises(ValueError, match=r"cannot import no_such_module_here"):
        load_rule("no_such_module_here:f")
