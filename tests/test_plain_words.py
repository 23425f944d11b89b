"""The check of words in `make lint`, on sources written here."""

from __future__ import annotations

import ast

from tests.refuses import missing_names
from tools.plain_words import violations

BAD = '''"""Of a module."""
X = 1
"""What it is."""


class Part:
    """Those."""

    field: int = 0
    """Size in bytes."""
    other: int = 0
    """By rank."""

    def run(self):
        """Whose."""
        "Of no docstring"
        text = """What is assigned."""
        return text
'''
GOOD = '''"""A module."""


class Piece:
    """A piece. Of two sentences, the first counts."""


class _Part:
    pass
'''


def test_each_kind_of_violation_is_found_with_its_line():
    found = violations({"a.py": ast.parse(BAD), "b.py": ast.parse("class Part: ..."), "c.py": ast.parse(GOOD)})
    lines = [problem.split()[0] for problem in found]
    assert lines == ["a.py:1", "a.py:3", "a.py:7", "a.py:12", "a.py:15", "a.py:"]
    assert missing_names(found[-1], "Part", "b.py") == []


def test_private_classes_may_stand_twice():
    assert violations({"a.py": ast.parse(GOOD), "b.py": ast.parse('"""B."""\n\n\nclass _Part: ...\n')}) == []
