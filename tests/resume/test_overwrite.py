"""What `run.on_existing=overwrite` removes, and what it never touches."""

import pytest
import yaml

from megarlhf.config import GenerateConfig, SFTConfig, load_config
from megarlhf.resume.claim.on_existing import NO_STEPS_LEFT, finish, require_usable
from tests.resume.earlier_run import begin, content, leave_a_run, refused


def test_generate_starts_over_or_not_at_all(tmp_path, monkeypatch):
    """Queued again by Slurm it overwrites an attempt that has not finished, which has written nothing of worth."""
    tree = {"run": {"dir": tmp_path / "run"}, "actor": {"model": {"path": "m"}}, "data": {"train": "t.jsonl"}}
    cfg = GenerateConfig.model_validate(tree)
    begin(cfg, "generate")
    refused(cfg, "run.dir", "generate has nothing to go on with", "run.on_existing=overwrite", command="generate")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    over = cfg.model_copy(update={"run": cfg.run.model_copy(update={"on_existing": "overwrite"})})
    assert not begin(over, "generate").resumes
    finish(cfg.run.dir, 1, NO_STEPS_LEFT)
    message = refused(over, "SLURM_RESTART_COUNT = 1", "submit a new job", command="generate")
    assert "run.on_existing=resume" not in message


def test_a_restart_by_slurm_overwrites_nothing(cfg, monkeypatch):
    leave_a_run(cfg())
    new = cfg(on_existing="overwrite")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    refused(new, "SLURM_RESTART_COUNT = 2", "run.on_existing=resume", "submit a new job")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert begin(new, "sft").resumes is False


def test_overwrite_removes_what_the_run_wrote_and_nothing_else(cfg, dead_lock):
    mine = leave_a_run(cfg())
    begin(cfg(nproc=2), "sft")
    finish(cfg().run.dir, 10, NO_STEPS_LEFT)
    dead_lock(cfg().run.dir)
    new = cfg(on_existing="overwrite", seed=7)
    usable = require_usable(new, new.run, "sft")
    assert (len(usable.removed), usable.removed[-1].name, usable.resumes) == (22, "config.yaml", False)
    begin(new, "sft")
    assert set(content(new.run.dir)) == mine | {"config.yaml"}
    for folder in ("checkpoints/step_000001", "resume", "bank", "failures"):
        assert not (new.run.dir / folder).exists()
    assert yaml.safe_load((new.run.dir / "config.yaml").read_text())["run"]["seed"] == 7
    assert load_config(SFTConfig, new.run.dir / "config.yaml") == new


def test_overwrite_keeps_its_hands_off_what_may_not_be_the_runs(cfg, tmp_path):
    """Another command's run; a config.yaml that the user wrote; a file inside a checkpoint; the run's own input."""
    new = cfg(on_existing="overwrite")
    mine = tmp_path / "run/checkpoints/step_000001/quantised"
    own = cfg("run/checkpoints/latest/actor", on_existing="overwrite")

    leave_a_run(new, "rm")
    refused(new, "run.on_existing = overwrite", "`megarlhf rm`", "`megarlhf sft`")
    config = new.run.dir / "config.yaml"
    written = config.read_text().replace("megarlhf rm", "megarlhf sft")
    config.write_text(written.partition("\n")[2])
    refused(new, "its config.yaml")
    config.write_text(written)
    refused(own, f"actor.model.path = {tmp_path}/run/checkpoints/latest/actor", "another run.dir")
    mine.write_text("mine")
    refused(new, f"holds {mine}")
    mine.unlink()
    begin(new, "sft")


def test_overwrite_goes_through_a_link_to_checkpoints_and_spares_shared_events(cfg, tmp_path):
    new = cfg(on_existing="overwrite")
    begin(new, "sft")
    role = tmp_path / "scratch/step_000001/actor"
    role.mkdir(parents=True)
    events = tmp_path / "board/events.out.tfevents.1.host"
    events.parent.mkdir()
    events.write_text("another run's")
    (new.run.dir / "checkpoints").symlink_to(tmp_path / "scratch")
    (new.run.dir / "tensorboard").symlink_to(tmp_path / "board")
    begin(new, "sft")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert (new.run.dir / "checkpoints").is_symlink()
    assert (new.run.dir / "tensorboard" / events.name).read_text() == "another run's"


@pytest.mark.parametrize("section", ["data", "model"])
def test_overwrite_removes_nothing_from_a_directory_that_is_read(section, cfg, tmp_path):
    """The run's directory is that of the data, or of a model with weights; one without weights loses nothing."""
    new = cfg("run" if section == "model" else "model", on_existing="overwrite")
    if section == "data":
        new = new.model_copy(update={"data": new.data.model_copy(update={"train": tmp_path / "run"})})
    begin(cfg(), "sft")
    (new.run.dir / "responses.jsonl").write_text("{}\n")
    if section == "model":
        assert len(require_usable(new, new.run, "sft").removed) == 2
        (new.run.dir / "model.safetensors").write_text("weights")
    before = content(new.run.dir)
    refused(new, f"{tmp_path}/run/responses.jsonl", "another run.dir")
    assert content(new.run.dir) == before
