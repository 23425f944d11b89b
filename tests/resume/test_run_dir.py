"""Directories in which a run does not begin: a model's, its data's, and one that cannot be written."""

import contextlib
from pathlib import Path

import pytest

from megarlhf.config import SourceConfig
from megarlhf.resume.claim.on_existing import require_usable, require_writable, strangers_in
from tests.refuses import refuses
from tests.resume.earlier_run import leave_a_run


@pytest.mark.parametrize("inside", [False, True])
def test_a_run_does_not_write_into_a_model(cfg, tmp_path, inside):
    """Nor below one. A directory that only holds a model, as a project's does, is none."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    name = "model/runs/1" if inside else "model"
    new = cfg("model")
    new = new.model_copy(update={"run": new.run.model_copy(update={"dir": tmp_path / name})})
    with refuses(f"run.dir = {tmp_path / name}", f"actor.model.path = {tmp_path}/model", "separate directory"):
        require_usable(new, new.run, "sft")
    elsewhere = new.model_copy(update={"run": new.run.model_copy(update={"dir": tmp_path})})
    require_usable(elsewhere, elsewhere.run, "sft")
    assert any("beside model" in note for note in strangers_in(elsewhere.run))


@pytest.mark.parametrize("train, refused", [("data", True), ("data/*.jsonl", True), ("data/sums_*.jsonl", False)])
def test_a_run_does_not_write_records_into_its_data(cfg, tmp_path, train, refused):
    """Its metrics.jsonl would be read at the next start."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sums_1.jsonl").write_text("{}\n")
    new = cfg()
    data = new.data.model_copy(update={"train": (SourceConfig(path=tmp_path / train),)})
    new = new.model_copy(update={"data": data, "run": new.run.model_copy(update={"dir": tmp_path / "data"})})
    with refuses("data.train", "separate directory") if refused else contextlib.nullcontext():
        require_usable(new, new.run, "sft")


def test_a_directory_that_cannot_be_written_is_refused(cfg):
    """Also where the user may write anything: there is no place for files in /proc."""
    with refuses("run.dir = /proc/x/y"):
        require_writable(cfg().run.model_copy(update={"dir": Path("/proc/x/y")}))


@pytest.mark.parametrize("which", ["the working directory", "the home directory", "the root of a git repository"])
def test_a_run_does_not_write_into_a_directory_that_is_everybody_s(cfg, tmp_path, monkeypatch, which):
    """A run that is there already goes on in it, and a directory in it may be a run's."""
    place, new = tmp_path / "place", cfg()
    place.mkdir()
    if which == "the working directory":
        monkeypatch.chdir(place)
    elif which == "the home directory":
        monkeypatch.setenv("HOME", str(place))
    else:
        (place / ".git").mkdir()
    given = Path(".") if which == "the working directory" else place
    with refuses("run.dir", which, "config.yaml", "metrics.jsonl", "run.dir=runs/1"):
        require_usable(new, new.run.model_copy(update={"dir": given}), "sft")
    require_usable(new, new.run.model_copy(update={"dir": given / "runs" / "1"}), "sft")
    leave_a_run(new)
    monkeypatch.chdir(new.run.dir)
    assert require_usable(new, new.run.model_copy(update={"dir": Path(".")}), "sft").resumes
