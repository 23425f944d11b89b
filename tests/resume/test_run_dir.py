"""Directories in which a run does not begin: a model's, its data's, and one that cannot be written."""

import contextlib
from pathlib import Path

import pytest

from megarlhf.config import SourceConfig
from megarlhf.resume.claim import require_usable, require_writable, strangers_in


@pytest.mark.parametrize("inside", [False, True])
def test_a_run_does_not_write_into_a_model(cfg, tmp_path, inside):
    """Nor below one. A directory that only holds a model, as a project's does, is none."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    name = "model/runs/1" if inside else "model"
    new = cfg("model")
    new = new.model_copy(update={"run": new.run.model_copy(update={"dir": tmp_path / name})})
    with pytest.raises(ValueError, match=f"{name} {'stands in' if inside else 'is'} actor.model.path = .*of its own"):
        require_usable(new, new.run, "sft")
    elsewhere = new.model_copy(update={"run": new.run.model_copy(update={"dir": tmp_path})})
    require_usable(elsewhere, elsewhere.run, "sft")
    assert any("will stand beside model" in note for note in strangers_in(elsewhere.run))


@pytest.mark.parametrize("train, refused", [("data", True), ("data/*.jsonl", True), ("data/sums_*.jsonl", False)])
def test_a_run_does_not_write_records_into_its_data(cfg, tmp_path, train, refused):
    """Its metrics.jsonl would be read at the next start."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sums_1.jsonl").write_text("{}\n")
    new = cfg()
    data = new.data.model_copy(update={"train": (SourceConfig(path=tmp_path / train),)})
    new = new.model_copy(update={"data": data, "run": new.run.model_copy(update={"dir": tmp_path / "data"})})
    with pytest.raises(ValueError, match=r" data\.train = .*of its own") if refused else contextlib.nullcontext():
        require_usable(new, new.run, "sft")


def test_a_directory_that_cannot_be_written_is_refused(cfg):
    """Also where the user may write anything: there is no place for files in /proc."""
    with pytest.raises(ValueError, match=r"run\.dir = /proc/x/y cannot be written"):
        require_writable(cfg().run.model_copy(update={"dir": Path("/proc/x/y")}))
