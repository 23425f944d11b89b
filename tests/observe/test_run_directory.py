"""What a start does where an earlier run has been: nothing is mixed, and nothing of the user's is removed.

Not covered: two runs that overwrite one directory at the same moment; Weights & Biases' own folder, which stays.
"""

import os

import pytest
import yaml

from megarlhf.config import GenerateConfig, SFTConfig, load_config
from megarlhf.observe.metrics import MetricsWriter
from megarlhf.observe.run_directory import claim, files_of_a_run, require_usable, require_writable_output


@pytest.fixture
def cfg(tmp_path):
    """A configuration of sft with changes to its section `run`, and to the actor's model."""

    def make(model="model", **run):
        return SFTConfig.model_validate(
            {
                "run": {"dir": tmp_path / "run", **run},
                "actor": {"model": {"path": tmp_path / model}},
                "data": {"train": tmp_path / "train.jsonl"},
                "train": {"num_steps": 1, "mini_batch_samples": 1, "micro_batch_samples": 1},
            }
        )

    return make


def leave_a_run(cfg, command="sft"):
    """The traces of a whole run, and files of the user's beside them."""
    run = cfg.run.dir
    claim(cfg, cfg.run, command)
    with MetricsWriter(run) as writer:
        writer.log(1, {"loss": 0.5})
    for step in (1, 2):
        (run / f"checkpoints/step_{step:06d}/actor").mkdir(parents=True)
        (run / f"checkpoints/step_{step:06d}/actor/config.json").write_text("{}")
    os.symlink("step_000002", run / "checkpoints/latest")
    (run / "checkpoints/.step_000003.partial/actor").mkdir(parents=True)
    for name in ("watchdog/20261122T120000/rank_00000.json", "step_000002_actor/rank_00000.pt"):
        (run / "failures" / name).parent.mkdir(parents=True)
        (run / "failures" / name).write_text("{}")
    (run / "responses.jsonl").write_text("{}\n")
    (run / "wandb_id").write_text("abc")
    mine = {"notes.txt", "plots/loss.png", "checkpoints/best/config.json", "tensorboard/mine.txt"}
    for name in mine:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    return mine


def content(directory):
    """Every file and link by its path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in directory.rglob("*")
        if path.is_file() or path.is_symlink()
    }


def test_a_used_directory_is_refused_and_stays_as_it_is(cfg):
    leave_a_run(cfg())
    before = content(cfg().run.dir)
    for action in (require_usable, claim):
        with pytest.raises(
            ValueError, match=r"holds an earlier run \(checkpoints, config.yaml, failures, metrics.jsonl"
        ) as raised:
            action(cfg(), cfg().run, "sft")
        assert "run.on_existing=overwrite" in str(raised.value)
    assert content(cfg().run.dir) == before


def test_overwrite_removes_what_the_run_wrote_and_nothing_else(cfg):
    mine = leave_a_run(cfg())
    new = cfg(on_existing="overwrite", seed=7)
    doomed = require_usable(new, new.run, "sft")
    assert (len(doomed), doomed[-1].name) == (11, "config.yaml")
    claim(new, new.run, "sft")
    assert set(content(new.run.dir)) == mine | {"config.yaml"}
    assert not (new.run.dir / "checkpoints/step_000001").exists()
    assert yaml.safe_load((new.run.dir / "config.yaml").read_text())["run"]["seed"] == 7
    assert load_config(SFTConfig, new.run.dir / "config.yaml") == new


def test_a_directory_with_the_users_files_only_is_free(cfg):
    run = cfg().run.dir
    (run / "checkpoints/best").mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    (run / "failures/watchdog/20261122T120000").mkdir(parents=True)  # of a start that hung while it built its models
    assert files_of_a_run(run) == []
    claim(cfg(), cfg().run, "sft")
    assert set(content(run)) == {"notes.txt", "config.yaml"}


def test_overwrite_keeps_its_hands_off_what_may_not_be_the_runs(cfg, tmp_path):
    """Another command's run; a config.yaml that the user wrote; a file inside a checkpoint; the run's own input."""
    new = cfg(on_existing="overwrite")
    mine = tmp_path / "run/checkpoints/step_000001/quantised"
    own = cfg("run/checkpoints/latest/actor", on_existing="overwrite")
    latest = r"would remove actor.model.path = .*latest/actor, which this run reads"

    def refused(settings, words):
        before = content(settings.run.dir)
        with pytest.raises(ValueError, match=words):
            claim(settings, settings.run, "sft")
        assert content(settings.run.dir) == before

    leave_a_run(new, "rm")
    refused(new, r"of a run of `megarlhf rm`; only an earlier run of `megarlhf sft` is overwritten")
    config = new.run.dir / "config.yaml"
    written = config.read_text().replace("megarlhf rm", "megarlhf sft")
    config.write_text(written.partition("\n")[2])
    refused(new, r"its config.yaml is none of megarlhf's")
    config.write_text(written)
    refused(own, latest)
    mine.write_text("mine")
    refused(new, rf"holds {mine}, which no run wrote")
    mine.unlink()
    claim(new, new.run, "sft")


def test_a_directory_that_cannot_be_made_is_told(cfg, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match=r"run.dir = .*run is a file; name a directory"):
        claim(cfg(), cfg().run, "sft")
    nested = cfg(dir=tmp_path / "run/deeper")
    with pytest.raises(ValueError, match=r"deeper lies below .*/run, which is a file; name a directory"):
        claim(nested, nested.run, "sft")


def test_of_two_starts_at_once_one_gets_the_directory(cfg, monkeypatch):
    """The other has looked just before, and saw nothing."""
    claim(cfg(), cfg().run, "sft")
    monkeypatch.setattr("megarlhf.observe.run_directory.require_usable", lambda *_: [])
    before = content(cfg().run.dir)
    with pytest.raises(ValueError, match="another run has just started there"):
        claim(cfg(seed=1), cfg().run, "sft")
    assert content(cfg().run.dir) == before


@pytest.mark.parametrize("on_existing", ["refuse", "overwrite"])
@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/step_000002/model.safetensors",
        "checkpoints/.step_000002.partial/model.safetensors",
        "checkpoints/step_000002",
        "checkpoints/latest/model.safetensors",
        "checkpoints/.latest.partial/mine",
        "checkpoints",
        "tensorboard",
    ],
)
def test_what_stands_where_the_run_would_save_is_refused(name, on_existing, cfg):
    """The user's own, with no run beside it."""
    new = cfg(on_existing=on_existing)
    mine = new.run.dir / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ValueError, match=r"run.dir = .* holds .*, which no run wrote, where this run would write; mov"):
        claim(new, new.run, "sft")
    assert content(new.run.dir) == {name: b"mine"}


def test_overwrite_goes_through_a_link_to_checkpoints_and_spares_shared_events(cfg, tmp_path):
    new = cfg(on_existing="overwrite")
    claim(new, new.run, "sft")
    role = tmp_path / "scratch/step_000001/actor"
    role.mkdir(parents=True)
    events = tmp_path / "board/events.out.tfevents.1.host"
    events.parent.mkdir()
    events.write_text("another run's")
    (new.run.dir / "checkpoints").symlink_to(tmp_path / "scratch")
    (new.run.dir / "tensorboard").symlink_to(tmp_path / "board")
    claim(new, new.run, "sft")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert (new.run.dir / "checkpoints").is_symlink()
    assert (new.run.dir / "tensorboard" / events.name).read_text() == "another run's"


@pytest.mark.parametrize("section", ["data", "model"])
def test_overwrite_removes_nothing_from_a_directory_that_is_read(section, cfg, tmp_path):
    """The run's directory is that of the data, or of a model with weights; one without weights loses nothing."""
    new = cfg("run" if section == "model" else "model", on_existing="overwrite")
    if section == "data":
        new = new.model_copy(update={"data": new.data.model_copy(update={"train": tmp_path / "run"})})
    claim(cfg(), cfg().run, "sft")
    (new.run.dir / "responses.jsonl").write_text("{}\n")
    if section == "model":
        assert len(require_usable(new, new.run, "sft")) == 2
        (new.run.dir / "model.safetensors").write_text("weights")
    before = content(new.run.dir)
    with pytest.raises(ValueError, match=r"would remove .*responses.jsonl.* from .*run, which this run reads; name"):
        claim(new, new.run, "sft")
    assert content(new.run.dir) == before


def test_responses_replace_no_input_and_nothing_of_the_runs_own(tmp_path):
    """With `overwrite`; `run.dir/responses.jsonl` and any other file are free."""
    for name in ("model/model.safetensors", "hf/tokenizer.json", "data/train.jsonl", "old.jsonl", "run/config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "data/train.jsonl")
    (tmp_path / "model/link").symlink_to(tmp_path / "old.jsonl")
    tree = {
        "run": {"dir": tmp_path / "run", "on_existing": "overwrite"},
        "actor": {"model": {"path": tmp_path / "model", "hf": tmp_path / "hf"}},
        "data": {"train": tmp_path / "data"},
    }
    cfg = GenerateConfig.model_validate(tree)
    for out, words in {
        "data/train.jsonl": "lies below data.train",
        "data/new.jsonl": "lies below data.train",
        "link.jsonl": "lies below data.train",
        "model/model.safetensors": "lies below actor.model.path",
        "model/link": "lies below actor.model.path",
        "hf/tokenizer.json": "lies below actor.model.hf",
        "run/config.yaml": "which the run itself writes",
        "run/metrics.jsonl": "which the run itself writes",
        "run/.responses.jsonl.partial": "which the run itself writes",
        "run/checkpoints/a.jsonl": "which the run itself writes",
        "run": "is a directory; name a file",
    }.items():
        with pytest.raises(ValueError, match=words):
            require_writable_output(cfg, cfg.run, tmp_path / out)
    for out in ("old.jsonl", "run/responses.jsonl", "new/responses.jsonl"):
        require_writable_output(cfg, cfg.run, tmp_path / out)
    with pytest.raises(ValueError, match=r"old.jsonl is there; name another file"):
        require_writable_output(cfg, cfg.run.model_copy(update={"on_existing": "refuse"}), tmp_path / "old.jsonl")
