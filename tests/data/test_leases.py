"""The lease of who makes an entry of the cache: it names its owner from the beginning, and who waits says for whom.

Not covered: what becomes of the entry, which test_token_cache.py has.
"""

import os
from pathlib import Path

import pytest

from megarlhf.data.tokenize import cache


def test_a_lease_has_its_text_from_the_beginning(tmp_path, monkeypatch):
    """So that none is empty when its writer is killed. Where there are no hard links it is written in place."""
    lease = tmp_path / "key.lease"
    seen = []
    link = os.link

    def spy(source, target):
        seen.append((Path(source).read_text(), Path(target).exists()))
        link(source, target)

    monkeypatch.setattr(cache.os, "link", spy)
    assert cache._create(lease, "text")
    assert (seen, lease.read_text()) == ([("text", False)], "text")
    assert not cache._create(lease, "other")
    lease.unlink()

    def refuse(source, target):
        raise PermissionError("no links here")

    monkeypatch.setattr(cache.os, "link", refuse)
    assert cache._create(lease, "text")
    assert not cache._create(lease, "other")
    assert lease.read_text() == "text"
    assert [path.name for path in tmp_path.iterdir()] == ["key.lease"]


@pytest.mark.parametrize("text", ["", '{"id": "theirs", "host": "elsewhere", "pid": 7}'])
def test_who_waits_says_for_what(tmp_path, monkeypatch, caplog, text):
    """Also for a lease that names nobody."""
    caplog.set_level("INFO")
    monkeypatch.setattr(cache, "DEAD_SECONDS", 0.6)
    monkeypatch.setattr(cache, "SAID_SECONDS", 0.1)
    (tmp_path / "key.lease").write_text(text)
    cache.entry(tmp_path, "key", lambda partial: (partial / "MANIFEST.json").touch())
    who = "process 7 on elsewhere" if text else "a process that it does not name"
    said = f"waiting for {tmp_path / 'key'}, which {who} makes, as key.lease says; it is taken over when it"
    assert caplog.text.count(said) == 1
