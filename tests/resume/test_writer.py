"""What is said when a resume point cannot be written."""

from collections import namedtuple
from pathlib import Path

from megarlhf.resume import writer


def test_a_full_disk_is_called_that(tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage(12))
    said = writer._in_words(RuntimeError("unexpected pos 704 vs 598"), tmp_path / "x")
    assert said.startswith(f"the disk is full (12 bytes are free at {tmp_path}); RuntimeError: unexpected")
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage(10**9))
    assert writer._in_words(RuntimeError("other"), tmp_path / "x") == "RuntimeError: other"
