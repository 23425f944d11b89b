"""What a start does where an earlier run has been: it goes on or starts over, and nothing is mixed or lost in silence.

Not covered: Weights & Biases' own folder, which stays; what a run that goes on does with its files; what is
overwritten (test_overwrite.py).
"""

import errno
import os
from copy import deepcopy

import pytest

from megarlhf.config import CheckpointConfig, SFTConfig, load_config
from megarlhf.config.choices import BestConfig
from megarlhf.config.commands import UNKNOWN_STEPS
from megarlhf.observe.records.run_directory import files_of_a_run
from megarlhf.resume.claim.lock import Lock
from megarlhf.resume.claim.on_existing import NO_STEPS_LEFT, claim, finish, finished, require_usable
from tests.config.examples import KINDS as EXAMPLES
from tests.refuses import missing_names, refuses
from tests.resume.earlier_run import begin, content, leave_a_run, refused


def test_with_refuse_a_used_directory_is_refused(cfg):
    leave_a_run(cfg())
    refused(cfg(on_existing="refuse"), "bank", "checkpoints", "config.yaml", "failures", "run.on_existing=overwrite")


def test_the_same_command_goes_on(cfg):
    """Nothing is touched before `start`, and by it nothing where the configuration is the same."""
    leave_a_run(cfg())
    before = content(cfg().run.dir)
    claimed = claim(cfg(), cfg().run, "sft")
    assert claimed.resumes
    (note,) = claimed.notes
    assert not missing_names(note, f"run.dir = {cfg().run.dir}", "`megarlhf sft`", "goes on")
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
    refused(cfg, f"pid {os.getpid()}")
    refused(cfg.model_copy(update={"run": cfg.run.model_copy(update={"on_existing": "overwrite"})}), "is running")
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
    assert not missing_names(claimed.notes[0], "left behind", "ended")


def test_two_starts_between_look_and_lock(cfg, monkeypatch):
    """The other has begun a run after this one has looked: it is seen under the lock, and refused."""
    new = cfg(on_existing="refuse")
    take = Lock.take

    def begin_first(run_dir):
        monkeypatch.setattr(Lock, "take", take)
        begin(cfg(), "sft")
        return take(run_dir)

    monkeypatch.setattr(Lock, "take", begin_first)
    with refuses("earlier run (config.yaml)"):
        claim(new, new.run, "sft")
    assert set(content(new.run.dir)) == {"config.yaml"}, "the lock is given back"


def test_neutral_changes_are_noted_and_the_earlier_configuration_is_kept(cfg):
    begin(cfg(), "sft")
    first = (cfg().run.dir / "config.yaml").read_text()
    second = cfg(nproc=2)
    claimed = begin(second, "sft")
    (note,) = claimed.notes[1:]
    assert not missing_names(note, "changed since", "run.nproc: 1 -> 2")
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
    ways_out = "another run.dir", "run.allow_changes=true", "run.on_existing=overwrite"
    refused(cfg(optim=other, nproc=2), "actor.optim.lr: 1e-06 -> 0.5", "earlier values", *ways_out)
    claimed = begin(cfg(optim=other, allow_changes=True), "sft")
    assert not missing_names(claimed.notes[1], "run.allow_changes", "actor.optim.lr: 1e-06 -> 0.5")
    assert begin(cfg(optim=other), "sft").resumes, "it is this run's now"


def test_epochs_are_no_change_before_their_steps_are_counted(cfg):
    """The earlier run's configuration has the number of steps; the records are counted later."""
    leave_a_run(cfg(optim={"lr": 1e-6, "schedule": "linear"}))
    again = cfg(optim={"lr": 1e-6, "schedule": "linear"})
    epochs = again.train.model_copy(update={"num_steps": UNKNOWN_STEPS, "num_epochs": 2.0})
    usable = require_usable(again.model_copy(update={"train": epochs}), again.run, "sft")
    assert [note for note in usable.notes if "changed" in note] == []


def test_a_configuration_that_cannot_be_read_needs_permission(cfg):
    """As after an update that has removed a key."""
    begin(cfg(), "sft")
    config = cfg().run.dir / "config.yaml"
    config.write_text(config.read_text() + "key_of_old: 1\n")
    refused(cfg(), "key_of_old", "cannot be compared", "another run.dir")
    assert "cannot be compared" in begin(cfg(allow_changes=True), "sft").notes[1]


def test_a_finished_run_is_refused_unless_it_has_more_steps_to_do(cfg):
    leave_a_run(cfg())
    assert finished(cfg().run.dir) is None
    finish(cfg().run.dir, 10, NO_STEPS_LEFT)
    points, elsewhere = cfg().run.dir / "resume", cfg().run.dir / "elsewhere"
    points.rename(elsewhere)
    refused(cfg(num_steps=20), "step 10, num_steps", "no resume point", "model.path", "another run.dir")
    elsewhere.rename(points)
    refused(cfg(), "step 10, num_steps", "train.num_steps above 10 (it is 10)", "another directory")
    refused(cfg(num_steps=9), "train.num_steps above 10 (it is 9)")
    refused(cfg(num_steps=20, optim={"schedule": "linear"}), "train.num_steps: 10 -> 20", "actor.optim.schedule")
    claimed = claim(cfg(num_steps=20), cfg().run, "sft")
    assert finished(cfg().run.dir).step == 10, "nothing changes before `start`"
    with claimed.lock:
        claimed.start()
    assert finished(cfg().run.dir) is None
    finish(cfg().run.dir, 12, "max_kl")
    message = refused(cfg(num_steps=30), "has finished", "step 12, max_kl")
    assert "raise train.num_steps" not in message
    (cfg().run.dir / "FINISHED").write_text("")
    refused(cfg(num_steps=30), f"{cfg().run.dir}/FINISHED", "remove")


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
                patch.setattr("megarlhf.resume.claim.on_existing.os.fsync", fsync)
                with refuses("run.dir", "No space left"):
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
    rule, permission = "change train.stop", "run.allow_changes=true"
    for refused_cfg, needed in (
        (with_limit(0.1), {rule, permission}), (with_limit(9), {permission}),
        (with_limit(0.1, allow_changes=True), {rule}),
    ):  # fmt: skip
        with refuses("has finished", *needed) as caught:
            require_usable(refused_cfg, refused_cfg.run, "rl")
        assert {rule, permission} - needed == set(missing_names(str(caught.value), rule, permission))
    cfg = with_limit(9, allow_changes=True)
    assert require_usable(cfg, cfg.run, "rl").resumes


def test_another_commands_run_does_not_go_on(cfg):
    leave_a_run(cfg(), "rm")
    refused(cfg(), "run.on_existing = resume", "`megarlhf rm`", "`megarlhf sft`")
    config = cfg().run.dir / "config.yaml"
    config.write_text(config.read_text().partition("\n")[2])
    refused(cfg(), "its config.yaml", "`megarlhf sft`")


def test_a_directory_with_the_users_files_only_is_free(cfg):
    run = cfg().run.dir
    (run / "checkpoints/best").mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    assert files_of_a_run(run) == []
    asked = cfg().model_copy(update={"checkpoint": CheckpointConfig(best=BestConfig(metric="eval_loss"))})
    refused(asked, str(run / "checkpoints/best"))
    begin(cfg(), "sft")
    assert set(content(run)) == {"notes.txt", "config.yaml"}


def test_a_directory_that_cannot_be_made_is_told(cfg, tmp_path):
    (tmp_path / "run").write_text("a file")
    with refuses(f"run.dir = {tmp_path}/run is a file", "directory"):
        claim(cfg(), cfg().run, "sft")
    nested = cfg(dir=tmp_path / "run/deeper")
    with refuses(f"run.dir = {tmp_path}/run/deeper", f"{tmp_path}/run, which is a file", "directory"):
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
    with refuses(f"run.dir = {new.run.dir}", "no run wrote", "move", "another run.dir"):
        claim(new, new.run, "sft")
    assert {path: text for path, (text, _) in content(new.run.dir).items()} == {name: b"mine"}
