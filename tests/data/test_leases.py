"""Leases of the cache: a process that waits says for whom, and takes over what nobody refreshes. Not covered: the lease
itself, which resume/test_lock.py has, and what becomes of the entry, which test_token_cache.py has."""

import json

import pytest

from megarlhf import lease
from megarlhf.data.tokenize import cache


@pytest.mark.parametrize("text", ["", '{"id": "theirs", "host": "elsewhere", "pid": 7}'])
def test_a_process_that_waits_logs_once_for_whom(tmp_path, monkeypatch, caplog, text):
    """Also for a lease that names nobody, as a process leaves it that was killed where there are no hard links."""
    caplog.set_level("INFO")
    monkeypatch.setattr(cache, "DEAD_SECONDS", 0.6)
    monkeypatch.setattr(cache, "LOG_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(lease, "READ_ATTEMPTS", 2)
    (tmp_path / "key.lease").write_text(text)
    assert cache.entry(tmp_path, "key", lambda partial: (partial / "MANIFEST.json").touch())[1]
    (record,) = [record for record in caplog.records if "waiting for" in record.message]
    assert str(tmp_path / "key") in record.message
    assert ("process 7 on elsewhere" if text else "does not name") in record.message
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_lease_names_its_holder_as_earlier_versions_read_it(tmp_path):
    with cache._lease(tmp_path, "key") as token:
        tree = json.loads((tmp_path / "key.lease").read_text())
    assert tree["id"] == token
    assert {"host", "pid"} <= tree.keys()
    assert list(tmp_path.iterdir()) == []
