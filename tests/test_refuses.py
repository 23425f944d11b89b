"""The helper that other tests assert refusals with."""

from __future__ import annotations

import pytest

from tests.refuses import missing_names, refuses


def test_all_names_in_any_order():
    with refuses("b.c", "a", "-3"):
        raise ValueError("a is -3,\n  use b.c")


def test_a_missing_name_and_a_part_of_a_word_fail():
    with pytest.raises(AssertionError, match="train"), refuses("train"):
        raise ValueError("trained")
    assert missing_names("data.train is 3", "train", "data.train", "3") == []
    assert missing_names("key 13", "3", "key") == ["3"]


def test_another_error_and_none_fail():
    with pytest.raises(KeyError), refuses("a"):
        raise KeyError("a")
    with pytest.raises(pytest.fail.Exception), refuses("a"):
        pass
