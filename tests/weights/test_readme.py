"""The worked example of megarlhf/weights/README.md: what it prints is what the page says."""

import contextlib
import io
import re
from pathlib import Path

import megarlhf.weights

README = Path(megarlhf.weights.__file__).parent / "README.md"


def test_the_example_prints_what_the_page_says():
    text = README.read_text()
    (code,), (printed,) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "text"))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(README), "exec"), {})
    assert output.getvalue() == printed
    assert "one element changed: False" in printed


def test_the_files_that_it_names_are_there():
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)(?:::\w+)?`", README.read_text()))
    assert len(named) > 8
    assert [path for path in named if not any((root / path).is_file() for root in README.parents)] == []
