"""The figures of `make count`, on sources written here. Not covered: reading them from git."""

from __future__ import annotations

from tools.count import counts

LONG_FUNCTION = "def long():\n" + '    """Those that are long."""\n' + "    pass\n" * 60


def test_each_figure_of_a_small_package():
    texts = {
        "megarlhf/__init__.py": '"""The package."""\n',
        "megarlhf/a/one.py": '"""Of one."""\n\nclass Part:\n    """A part."""\n\nclass _Own:\n    pass\n',
        "megarlhf/a/two.py": "class Part:\n    pass\n\nclass _Own:\n    pass\n\n" + LONG_FUNCTION,
        "megarlhf/trainers/" + "rl.py": "class Loop:\n    def run(self):\n        pass\n",
        "tests/test_a.py": "def test_a():\n    def helper(): ...\n\n\ndef test_b(): ...\n",
        "docs/page.md": "three words here\n",
        "README.md": "two words\n",
    }
    assert counts(texts) == {
        "lines of megarlhf/": 1 + 7 + 68 + 3,
        "files of megarlhf/": 4,
        "lines of tests/": 5,
        "modules of the largest folder": "2 (megarlhf/a)",
        "docstrings": 4,
        "docstrings that begin with a relative word": 2,
        "public class names in several files": 1,
        "functions of more than 60 lines": 1,
        "lines of the loop": 2,
        "test functions": 2,
        "words of docs/": 3,
        "words of README.md": 2,
    }
