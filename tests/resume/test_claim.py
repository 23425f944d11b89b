"""What a start does where an earlier run has been: it goes on or starts over, and nothing is mixed or lost in silence.

Not covered: Weights & Biases' own folder, which stays; what a run that goes on does with its files.
"""

import errno
import os
import subprocess
import sys
from copy import deepcopy

import pytest
import yaml

from megarlhf.config import CheckpointConfig, GenerateConfig, SFTConfig, load_config
from megarlhf.config.choices import BestConfig
from megarlhf.observe.records import open_records
from megarlhf.observe.run_directory import files_of_a_run
from megarlhf.resume.claim import NO_STEPS_LEFT, claim, finish, finished, require_usable
from megarlhf.resume.lock import Lock
from tests.command import ROOT
from tests.config.examples import KINDS as EXAMPLES
from tests.resume.earlier_run import begin


@pytest.fixture
def cfg(tmp_path):
    """A configuration of sft with changes to its section `run`, and to the actor's model."""

    def make(model="model", num_steps=10, optim=None, **run):
        return SFTConfig.model_validate(
            {
                "run": {"dir": tmp_path / "run", **run},
                "actor": {"model": {"path": tmp_path / model}, "optim": optim or {}},
                "data": {"train": tmp_path / "train.jsonl"},
                "train": {"num_steps": num_steps, "mini_batch_samples": 1, "micro_batch_samples": 1},
            }
        )

    return make


def leave_a_run(cfg, command="sft"):
    """The traces of a whole run, and files of the user's beside them."""
    run = cfg.run.dir
    begin(cfg, command)
    with open_records(run, None, None, lengths=True) as records:
        records.keep_lengths(1, [3], [4])
        records.metrics.log(1, {"loss": 0.5})
    for step in (1, 2):
        (run / f"checkpoints/step_{step:06d}/actor").mkdir(parents=True)
        (run / f"checkpoints/step_{step:06d}/actor/config.json").write_text("{}")
    os.symlink("step_000002", run / "checkpoints/latest")
    (run / "checkpoints/.step_000003.partial/actor").mkdir(parents=True)
    (run / "checkpoints/.step_000003.partial/.critic.megarlhf-partial").mkdir()
    (run / "checkpoints/.step_000003.partial/.critic.megarlhf-lock").touch()
    for export in ("step_000002", ".step_000003.partial"):
        (run / f"checkpoints/{export}/actor_adapter").mkdir()
        (run / f"checkpoints/{export}/actor_adapter/adapter_config.json").write_text("{}")
    (run / "responses.jsonl").write_text("{}\n")
    (run / "wandb_id").write_text("abc")
    left = ["resume/step_000002/MANIFEST.json", "resume/.step_000003.partial/state", "bank/a", "failures/b"]
    left += [f"profile/{name}" for name in ("step_000002_rank_00000.trace.json", ".step_000001_rank_00000.x.partial")]
    for name in left:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    mine = {"notes.txt", "plots/loss.png", "checkpoints/best/config.json", "tensorboard/mine.txt", "profile/mine.html"}
    for name in mine:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    return mine


def content(directory):
    """Every file and link by its path: what is in it, and when it was written."""
    return {
        path.relative_to(directory).as_posix(): (
            path.read_bytes() if path.is_file() else b"",
            path.lstat().st_mtime_ns,
        )
        for path in directory.rglob("*")
        if path.is_file() or path.is_symlink()
    }


def refused(cfg, words, command="sft"):
    """By the check and by the claim, and nothing is touched."""
    before = content(cfg.run.dir)
    messages = []
    for action in (require_usable, claim):
        with pytest.raises(ValueError, match=words) as raised:
            action(cfg, cfg.run, command)
        messages.append(str(raised.value))
    assert content(cfg.run.dir) == before
    assert messages[0] == messages[1]
    return messages[0]


def test_with_refuse_a_used_directory_is_refused(cfg):
    leave_a_run(cfg())
    message = refused(cfg(on_existing="refuse"), r"holds an earlier run \(bank, checkpoints, config.yaml, failures")
    assert "run.on_existing=overwrite" in message


def test_the_same_command_goes_on(cfg):
    """Nothing is touched before `start`, and by it nothing where the configuration is the same."""
    leave_a_run(cfg())
    before = content(cfg().run.dir)
    claimed = claim(cfg(), cfg().run, "sft")
    assert claimed.resumes
    assert claimed.notes == [f"run.dir = {cfg().run.dir} holds an earlier run of `megarlhf sft`, which goes on"]
    claimed.start()
    assert set(content(cfg().run.dir)) == {*before, "lock"}
    claimed.lock.release()
    assert content(cfg().run.dir) == before


def test_a_new_run_is_claimed_for_one_process(cfg):
    """A directory in which a start was killed before it wrote its configuration is as good as new."""
    cfg = cfg()
    cfg.run.dir.mkdir()
    first = claim(cfg, cfg.run, "sft")
    assert (first.resumes, first.notes) == (False, [])
    refused(cfg, r"belongs to a run that is running: pid \d+ on .*, since \d{4}-.*Wait for that run or stop it")
    refused(cfg.model_copy(update={"run": cfg.run.model_copy(update={"on_existing": "overwrite"})}), "is running: pid")
    first.lock.release()
    assert list(cfg.run.dir.iterdir()) == []
    assert not claim_and_leave(cfg).resumes


def claim_and_leave(cfg):
    claimed = claim(cfg, cfg.run, "sft")
    claimed.lock.release()
    return claimed


def test_a_lock_left_behind_is_no_earlier_run(cfg, dead_lock):
    dead_lock(cfg().run.dir)
    assert require_usable(cfg(), cfg().run, "sft").resumes is False
    claimed = claim_and_leave(cfg(on_existing="refuse"))
    assert "was left behind by pid" in claimed.notes[0]
    assert "that process has ended" in claimed.notes[0]


@pytest.fixture
def dead_lock():
    """A directory with the lock of a process that has ended."""

    def leave(directory):
        directory.mkdir(exist_ok=True)
        code = (
            f"import os, pathlib; from megarlhf.resume.lock import Lock; Lock.take(pathlib.Path({str(directory)!r})); "
        )
        subprocess.run([sys.executable, "-c", code + "os._exit(9)"], check=False, cwd=ROOT)
        assert (directory / "lock").exists()

    return leave


def test_two_starts_between_look_and_lock(cfg, monkeypatch):
    """The other has begun a run after this one has looked: it is seen under the lock, and refused."""
    new = cfg(on_existing="refuse")
    take = Lock.take

    def begin_first(run_dir):
        monkeypatch.setattr(Lock, "take", take)
        begin(cfg(), "sft")
        return take(run_dir)

    monkeypatch.setattr(Lock, "take", begin_first)
    with pytest.raises(ValueError, match=r"holds an earlier run \(config.yaml\)"):
        claim(new, new.run, "sft")
    assert set(content(new.run.dir)) == {"config.yaml"}, "the lock is given back"


def test_neutral_changes_are_noted_and_the_earlier_configuration_is_kept(cfg):
    begin(cfg(), "sft")
    first = (cfg().run.dir / "config.yaml").read_text()
    second = cfg(nproc=2)
    claimed = begin(second, "sft")
    assert claimed.notes[1:] == ["changed since, with the same numbers up to rounding: run.nproc: 1 -> 2"]
    assert (second.run.dir / "config.1.yaml").read_text() == first
    assert load_config(SFTConfig, second.run.dir / "config.yaml") == second
    assert begin(second, "sft").notes[1:] == []
    assert begin(cfg(nproc=3), "sft").resumes
    kept = sorted(path.name for path in second.run.dir.glob("config*"))
    assert kept == ["config.1.yaml", "config.2.yaml", "config.yaml"]
    assert "nproc: 2" in (second.run.dir / "config.2.yaml").read_text()


def test_another_computation_needs_permission(cfg):
    leave_a_run(cfg())
    other = {"lr": 0.5}
    message = refused(
        cfg(optim=other, nproc=2),
        r"the configuration has changed in what is computed: actor.optim.lr: 1e-06 -> 0.5. Give the earlier values",
    )
    for way_out in ("name another run.dir", "run.allow_changes=true", "run.on_existing=overwrite"):
        assert way_out in message
    claimed = begin(cfg(optim=other, allow_changes=True), "sft")
    assert claimed.notes[1] == ("changed since, in what is computed (run.allow_changes): actor.optim.lr: 1e-06 -> 0.5")
    assert begin(cfg(optim=other), "sft").resumes, "it is this run's now"


def test_a_configuration_that_cannot_be_read_needs_permission(cfg):
    """As after an update that has removed a key."""
    begin(cfg(), "sft")
    config = cfg().run.dir / "config.yaml"
    config.write_text(config.read_text() + "key_of_old: 1\n")
    refused(cfg(), "unknown key 'key_of_old'.*cannot be compared with that of the earlier run; name another run.dir")
    assert "cannot be compared" in begin(cfg(allow_changes=True), "sft").notes[1]


def test_a_finished_run_is_refused_unless_it_has_more_steps_to_do(cfg):
    leave_a_run(cfg())
    assert finished(cfg().run.dir) is None
    finish(cfg().run.dir, 10, NO_STEPS_LEFT)
    points, elsewhere = cfg().run.dir / "resume", cfg().run.dir / "elsewhere"
    points.rename(elsewhere)
    message = refused(cfg(num_steps=20), r"has finished .step 10, num_steps, .*, and no resume point of it")
    assert "name it as model.path in a run with another run.dir" in message
    elsewhere.rename(points)
    message = refused(cfg(), r"holds a run that has finished \(step 10, num_steps, \d{4}-\d\d-\d\dT.*\)")
    assert "to go on, raise train.num_steps above 10 (it is 10); or name another directory" in message
    refused(cfg(num_steps=9), "has finished .*above 10 .it is 9.")
    refused(cfg(num_steps=20, optim={"schedule": "linear"}), "in what is computed: train.num_steps: 10 -> 20; actor")
    claimed = claim(cfg(num_steps=20), cfg().run, "sft")
    assert finished(cfg().run.dir).step == 10, "nothing changes before `start`"
    with claimed.lock:
        claimed.start()
    assert finished(cfg().run.dir) is None
    finish(cfg().run.dir, 12, "max_kl")
    message = refused(cfg(num_steps=30), "has finished .step 12, max_kl, ")
    assert "raise train.num_steps" not in message
    (cfg().run.dir / "FINISHED").write_text("")
    refused(cfg(num_steps=30), "FINISHED is not what a run writes when it has finished")


def test_a_start_that_finds_a_full_disk_changes_nothing(cfg, monkeypatch):
    """A finished run that is to be prolonged stays finished: later runs may wait for it."""
    leave_a_run(cfg())
    finish(cfg().run.dir, 10, NO_STEPS_LEFT)
    before = content(cfg().run.dir)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    claimed = claim(cfg(num_steps=20), cfg().run, "sft")
    with claimed.lock:
        for call in (1, 2):  # the earlier configuration is kept first, then the new one is written
            calls = []

            def fsync(descriptor, real=os.fsync, calls=calls, call=call):
                calls.append(1)
                return full(descriptor) if len(calls) == call else real(descriptor)

            with monkeypatch.context() as patch:
                patch.setattr("megarlhf.resume.claim.os.fsync", fsync)
                with pytest.raises(ValueError, match=r"cannot be written .*No space left"):
                    claimed.start()
    assert content(cfg().run.dir) == before


def test_a_run_that_a_stop_rule_has_ended_goes_on_with_another_rule(tmp_path):
    """With permission, since it computes something else; with the same rule it has finished."""
    kind, tree = deepcopy(EXAMPLES["rl"])
    tree["run"], tree["train"]["num_steps"] = {"dir": str(tmp_path / "run")}, 10

    def with_limit(limit, **run):
        return kind.model_validate(
            {**tree, "run": {**tree["run"], **run}, "train": {**tree["train"], "stop": {"max_kl": limit}}}
        )

    begin(with_limit(0.1), "rl")
    finish(tmp_path / "run", 2, "stopped: kl")
    (tmp_path / "run" / "resume" / "step_000002").mkdir(parents=True)
    rule, permission = "change train.stop, a rule of which has ended it", "give run.allow_changes=true"
    for refused_cfg, missing in (
        (with_limit(0.1), f"{rule} and {permission}"),
        (with_limit(9), permission),
        (with_limit(0.1, allow_changes=True), rule),
    ):
        with pytest.raises(ValueError, match=f"has finished .*; to go on, {missing}; or name another directory"):
            require_usable(refused_cfg, refused_cfg.run, "rl")
    cfg = with_limit(9, allow_changes=True)
    assert require_usable(cfg, cfg.run, "rl").resumes


def test_another_commands_run_does_not_go_on(cfg):
    leave_a_run(cfg(), "rm")
    refused(
        cfg(), r"run.on_existing = resume: .* of a run of `megarlhf rm`; only an earlier run of `megarlhf sft` goes"
    )
    config = cfg().run.dir / "config.yaml"
    config.write_text(config.read_text().partition("\n")[2])
    refused(cfg(), r"its config.yaml is none of megarlhf's; only an earlier run of `megarlhf sft` goes on")


def test_generate_starts_over_or_not_at_all(tmp_path, monkeypatch):
    """Queued again by Slurm it overwrites an attempt that has not finished, which has written nothing of worth."""
    tree = {"run": {"dir": tmp_path / "run"}, "actor": {"model": {"path": "m"}}, "data": {"train": "t.jsonl"}}
    cfg = GenerateConfig.model_validate(tree)
    begin(cfg, "generate")
    refused(cfg, "the two would be mixed; generate has nothing to go on with, and starts over only; name", "generate")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    over = cfg.model_copy(update={"run": cfg.run.model_copy(update={"on_existing": "overwrite"})})
    assert not begin(over, "generate").resumes
    finish(cfg.run.dir, 1, NO_STEPS_LEFT)
    refused(over, "the first attempt may have written; it is not removed. To start over, submit a new job", "generate")


def test_a_restart_by_slurm_overwrites_nothing(cfg, monkeypatch):
    leave_a_run(cfg())
    new = cfg(on_existing="overwrite")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    refused(
        new, r"\(SLURM_RESTART_COUNT = 2\).*; run.on_existing=resume goes on with it. To start over, submit a new job"
    )
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


def test_a_directory_with_the_users_files_only_is_free(cfg):
    run = cfg().run.dir
    (run / "checkpoints/best").mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    assert files_of_a_run(run) == []
    asked = cfg().model_copy(update={"checkpoint": CheckpointConfig(best=BestConfig(metric="eval_loss"))})
    refused(asked, f"holds {run / 'checkpoints/best'}, which no run wrote")
    begin(cfg(), "sft")
    assert set(content(run)) == {"notes.txt", "config.yaml"}


def test_overwrite_keeps_its_hands_off_what_may_not_be_the_runs(cfg, tmp_path):
    """Another command's run; a config.yaml that the user wrote; a file inside a checkpoint; the run's own input."""
    new = cfg(on_existing="overwrite")
    mine = tmp_path / "run/checkpoints/step_000001/quantised"
    own = cfg("run/checkpoints/latest/actor", on_existing="overwrite")
    latest = r"would remove actor.model.path = .*latest/actor, which this run reads"

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
    begin(new, "sft")


def test_a_directory_that_cannot_be_made_is_told(cfg, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match=r"run.dir = .*run is a file; name a directory"):
        claim(cfg(), cfg().run, "sft")
    nested = cfg(dir=tmp_path / "run/deeper")
    with pytest.raises(ValueError, match=r"deeper lies below .*/run, which is a file; name a directory"):
        claim(nested, nested.run, "sft")


@pytest.mark.parametrize("on_existing", ["resume", "refuse", "overwrite"])
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
        "resume",
        "bank",
        "lock/mine",
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
    assert {path: text for path, (text, _) in content(new.run.dir).items()} == {name: b"mine"}


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
    with pytest.raises(ValueError, match=r"would remove .*responses.jsonl.* from .*run, which this run reads; name"):
        claim(new, new.run, "sft")
    assert content(new.run.dir) == before
