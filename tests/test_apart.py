"""A process of its own has the environment of its test, not of the one that started the server of such processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.apart import apart


def environment() -> tuple[str, str | None]:
    return tempfile.gettempdir(), os.environ.get("MEGARLHF_APART")


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_environment_is_that_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MEGARLHF_APART", name)
    assert apart(environment) == (str(tmp_path), name)
    monkeypatch.delenv("MEGARLHF_APART")
    assert apart(environment) == (str(tmp_path), None)
