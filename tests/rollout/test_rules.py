"""Rule rewards on texts written out, how a rule is found by name, and what is said of one that fails."""

import re
import sys

import numpy as np
import pytest
import torch

from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollout.rewards.calls import call
from megarlhf.rollout.rewards.forms import form_of
from megarlhf.rollout.rewards.rules import RULES, exact_match, field_check, load_rule, numeric_match


@pytest.mark.parametrize(
    "response, answer, expected",
    [
        ("85", "85", 1.0),
        (" 85\n", "85", 1.0),
        ("085", "85", 0.0),
        ("85.", "85", 0.0),
        ("", "85", 0.0),
        ("85", 85, 1.0),
        ("85", 85.0, 1.0),
        ("85.0", 85.0, 1.0),
        ("0.5", 0.5, 1.0),
        ("85", ["84", "85"], 1.0),
        ("85", [["84"], [85.0, None]], 1.0),
        ("['85']", ["85"], 0.0),
        ("Paris", {"text": ["Lutetia", "Paris"], "answer_start": [3, 9]}, 1.0),
        ("Lutetia", {"value": "Paris", "aliases": ["Lutetia"], "type": "Wikipedia"}, 1.0),
        ("B", {"ground_truth": "B", "style": "rule"}, 1.0),
        ("85", np.array(["84", "85"]), 1.0),
        ("true", True, 1.0),
        ("1", True, 0.0),
        ("7", '["7"]', 1.0),
        ("seven", ' ["7", "seven"] ', 1.0),
        ("Seven", '["7", "seven"]', 0.0),
        ('["7", "seven"]', '["7", "seven"]', 1.0),
        ("[7]", "[7]", 1.0),
        ("7", "[7]", 0.0),
        ("1", "[1, 2]", 0.0),
        ("7", '["7", 8]', 0.0),
        ("a", '[["a"]]', 0.0),
        ("[]", "[]", 1.0),
        ("[x", "[x", 1.0),
        ("72", "So it is.\n#### 72", 0.0),
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
        (".5", "0.5", 1.0),
        ("0.5", ".5", 1.0),
        ("it is -.5", "-0.5", 1.0),
        ("37-.5", ".5", 1.0),
        ("it is $.50.", "0.5", 1.0),
        ("3.5", ".5", 0.0),
        ("so...5", "5", 1.0),
        ("section.5", "5", 1.0),
        (".5e1", "5", 1.0),
        ("1e3", "1000", 1.0),
        ("1000", "1e3", 1.0),
        ("+5", "5", 1.0),
        ("5", "+5", 1.0),
        ("1000", "1,000", 1.0),
        ("it fell to \N{MINUS SIGN}3.", "-3", 1.0),
        ("it fell to \N{MINUS SIGN}3.", "3", 0.0),
        ("it fell to \N{EN DASH}3.", "-3", 1.0),
        ("-3", "\N{MINUS SIGN}3", 1.0),
        ("pages 3\N{EN DASH}5", "5", 1.0),
        ("5\N{MINUS SIGN}3", "3", 1.0),
        ("5 - 3", "3", 1.0),
        ("the answer \N{EN DASH} 42", "42", 1.0),
        ("-$3", "-3", 1.0),
        (r"-\$3", "-$3", 1.0),
        ("$-3$", "-3", 1.0),
        ("- 3", "-3", 1.0),
        ("x = - 3", "-3", 1.0),
        ("two of them:\n- 3\n- 4", "4", 1.0),
        ("1 234", "1234", 1.0),
        ("1 234", "234", 0.0),
        ("10 20 300", "300", 1.0),
        ("1\N{NO-BREAK SPACE}234,5", "5", 1.0),
        ("-12\N{NARROW NO-BREAK SPACE}345.5", "-12345.5", 1.0),
        ("1234", "1\N{NO-BREAK SPACE}234", 1.0),
        (r"1{,}234 or 1\,234", "$1,234", 1.0),
        ("1_000", "1000", 1.0),
        ("4", ["3", "4.0"], 1.0),
        ("4", {"value": "4", "aliases": ["four"]}, 1.0),
        ("7", '["seven", "7"]', 1.0),
        ("8", '["seven", "7"]', 0.0),
        ("it is 72", "48/2 = 24, 48+24 = 72\n#### 72", 1.0),
        ("it is 24", "48/2 = 24, 48+24 = 72\n#### 72", 0.0),
        ("1000", "So it is. #### 1,000\n", 1.0),
    ],
)
def test_numeric_match(response, answer, expected):
    assert numeric_match("", response, {"answer": answer}) == expected


def test_bad_answers_are_errors_and_not_zeros():
    with pytest.raises(ValueError, match=r"'eighty'.*expected a number"):
        numeric_match("", "80", {"answer": "eighty"})
    with pytest.raises(ValueError, match=r"needs the field 'answer', found 'solution'"):
        exact_match("", "80", {"solution": "80"})


@pytest.mark.parametrize("name", ["exact_match", "numeric_match", "math_verify"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"answer": None}, "the record's answer is None, in which there is no text and no number"),
        ({"answer": float("nan")}, "the record's answer is nan, in which there is no text"),
        ({"answer": []}, r"the record's answer is \[\], in which"),
        ({"answer": [[None], " "]}, "in which there is no text and no number"),
        ({"answer": {"a": 1}}, "a mapping of 'a', of which none is ground_truth, target"),
        ({"answer": {"text": "x", "answer": "B"}}, "of which 'answer' and 'text' may be it; name the one"),
        (
            {"reward_model": {"ground_truth": "4"}},
            "if 'reward_model.ground_truth' is meant, name it under data: columns",
        ),
        ({"answers": ["4"]}, r"found 'answers'; if 'answers' is meant, .* columns: \{answer: answers\}"),
    ],
)
def test_answers_that_are_none_are_refused_at_the_start(name, fields, words):
    with pytest.raises(ValueError, match=words):
        field_check(name)(fields)


def test_what_is_no_number_and_no_formula():
    bad = (True, ["four"], "[7]", "#### 72\nand more", "so many: 72")
    for rule, answer in (*(("numeric_match", each) for each in bad), ("math_verify", False)):
        with pytest.raises(ValueError, match=r"the record's answer is .*, expected a "):
            field_check(rule)({"answer": answer})


def result(rule, response, fields=None):
    """Result of a rule for one response to the prompt `p`."""
    batch = RewardBatch(["p"], [response], [[1]], [[2, 3]], [True], [fields or {}], [None], [37])
    return call(rule, form_of(rule), batch)[0]


def test_a_built_in_rule_s_error_is_told_once_and_without_our_own_line():
    assert result(numeric_match, "", {"answer": "x"}).error == (
        "failed: the record's answer is 'x', expected a number; clean the data or use exact_match"
    )


def test_load_rule_by_name_and_by_path(tmp_path, monkeypatch):
    assert load_rule("exact_match") is RULES["exact_match"] is exact_match
    (tmp_path / "my_rules_for_test.py").write_text("def half(prompt, response, fields):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_rule("my_rules_for_test:half")("", "", {}) == 0.5
    with pytest.raises(ValueError, match=r"my_rules_for_test\.py has no function 'third'"):
        load_rule("my_rules_for_test:third")
    del sys.modules["my_rules_for_test"]


def test_unknown_rules_say_what_there_is():
    with pytest.raises(ValueError, match=r"'exact'.*exact_match, numeric_match.*package\.module:name"):
        load_rule("exact")
    with pytest.raises(ValueError, match=r"cannot import no_such_module_here"):
        load_rule("no_such_module_here:f")


@pytest.mark.parametrize("value", ["0.5", b"1", [1.0], {}, float("nan"), float("-inf"), torch.ones(2)])
def test_a_rule_that_returns_no_number_is_told_what_it_returned(value):
    assert re.match(r"returned .*, expected ", result(lambda prompt, response, fields: value, "").error)


def test_a_coroutine_is_told_to_be_awaited():
    async def judged():
        return 1.0

    coroutine = judged()
    assert "declare the function with `async def`" in result(lambda prompt, response, fields: coroutine, "").error
    coroutine.close()


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), torch.tensor(1.0), {"a": 0.5, "b": 0.5}])
def test_whatever_is_a_number_is_taken(value):
    assert result(lambda prompt, response, fields: value, "").value == 1.0


@pytest.mark.parametrize(
    "response, answer, expected",
    [("-5", "\N{MINUS SIGN}5", 1.0), ("\N{EN DASH}5", "-5", 1.0), ("cafe\N{COMBINING ACUTE ACCENT}", "café", 1.0),
     ("a1_234", "a1234", 0.0), ("1 000", "1000", 0.0), ("1990\N{EN DASH}1995", "1990-1995", 0.0), ("5", "-5", 0.0)],
)  # fmt: skip
def test_exact_match_takes_signs_that_look_alike_for_one_and_nothing_else(response, answer, expected):
    assert exact_match("q", response, {"answer": answer}) == expected
