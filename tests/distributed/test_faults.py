"""Faults that a run survives, or ends of in order: what was complete is untouched, the same command goes on exactly.

Each is brought about in ranks that are there already. A real kill of processes, and a small file system that is full:
`make test-faults`. Not covered: GPUs.
"""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.provenance import FILE as PROVENANCE
from megarlhf.resume.points.point import Position, damaged_files, find_points, read_manifest
from megarlhf.trainers.run.open_session import _require_steps_left
from tests.distributed.interrupted_jobs import (
    command_on_a_full_disk,
    command_on_a_read_only_disk,
    command_stopped_while_it_scales,
    command_that_hangs,
    command_that_is_late,
    command_that_skips,
    command_until,
    command_whose_directory_moves,
    command_whose_line_waits,
    command_with,
    points_at_updates,
    stopped_rollout,
)
from tests.distributed.test_resume import (
    BOUNDARY,
    TRAIN,
    Case,
    assert_refused,
    command_line,
    files,
    rows,
    tree,
    uncalled_before_the_start,
)
from tests.refuses import lines_naming, refuses

RARELY = {"every_minutes": 1000}
EACH_STEP = {"every": 1, "every_minutes": 0, "background": False}


@pytest.fixture
def case(one_layer, data):
    """A command by its name, with one section of its configuration replaced by each keyword."""

    def make(name: str, **sections: Any) -> Case:
        command = "rl" if name in ("ppo", "grpo") else name
        return Case(command, tree(name, one_layer, data) | sections, Path())

    return make


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file, but that which names the run."""
    return {path: found for path, found in files(directory).items() if Path(path).name != PROVENANCE}


@pytest.mark.parametrize(
    "name, module", [("sft", "megarlhf.trainers.supervised.loop"), ("grpo", "megarlhf.trainers.rl.build")]
)
def test_a_signal_while_the_models_are_built(name, module, case, ranks, tmp_path) -> None:
    """With nothing saved yet the directory stays empty; an earlier run's stays as it is. One rank of two gets it."""
    made = case(name, checkpoint=EACH_STEP)
    made.config["train"]["num_steps"] = 2
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(2, "command", *command_line(made, whole))
    argv = command_line(made, run)
    build = (1, module, "build_role")
    (status, said), (other, _) = ranks.run(2, command_with, signal.SIGTERM, 1, *build, *argv)
    assert (status, other) == (75, 75)
    assert lines_naming(said, "SIGTERM", "the same command begins")
    assert list(run.iterdir()) == []
    calls = 2 if name == "sft" else 6
    assert ranks.run(2, command_until, calls, TRAIN, "step", *argv)[0][0] == "killed"
    assert [point.position.name for point in find_points(run)] == ["step_000001"]
    before = content(run)
    (status, said), (other, _) = ranks.run(2, command_with, signal.SIGINT, 0, *build, *argv)
    assert (status, other) == (130, 130)
    assert lines_naming(said, "SIGINT", "the same command goes on")
    assert content(run) == before
    assert "from resume/step_000001" in ranks.run(2, "command", *argv)[0]
    assert rows(run) == rows(whole)


def test_the_bank_keeps_what_no_point_covers_until_the_last_point_is_there(case, ranks, tmp_path) -> None:
    """Killed before it is written; of three steps the second has one."""
    made = case("grpo", checkpoint={"every": 2, "every_minutes": 0, "background": False, "keep": 1}, eval={})
    del made.config["data"]["validation"], made.config["train"]["stop"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(1, "command", *command_line(made, whole))
    argv = command_line(made, run)
    assert ranks.run(1, command_until, 1, BOUNDARY, "finish", *argv)[0][0] == "killed"
    assert [point.position for point in find_points(run)] == [Position(2)]
    said = ranks.run(1, "command", *argv)[0]
    assert re.search(r"step 3: (\d+) of \1 responses .* bank", said), said
    assert rows(run) == rows(whole)
    assert [path.name for path in (run / "bank").glob("step_*")] == []


def test_a_step_that_is_above_the_limit_of_the_gap_is_completed_after_a_resume(case, ranks, tmp_path) -> None:
    """Cut off between its updates: the rest of it, its metrics and its export are made before the run ends. A limit
    below rounding stands for a real disagreement."""
    made = case("grpo", checkpoint={"every_updates": 1, "every_minutes": 0, "background": False}, eval={})
    made.config["rollout"]["logprob_gap"] = {"mean": 1e-12, "steps": 1}
    del made.config["data"]["validation"], made.config["train"]["stop"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert ranks.run(1, "command_status", *command_line(made, whole))[0][0] == 4
    argv = command_line(made, run)
    assert ranks.run(1, command_until, 2, TRAIN, "step", *argv)[0][0] == "killed"
    assert [point.position for point in find_points(run)][-1] == Position(0, 1)
    for _ in range(2):  # and what has ended stays so
        status, said = ranks.run(1, "command_status", *argv)[0]
        assert (status, bool(lines_naming(said, "rollout.logprob_gap"))) == (4, True), said
        assert rows(run) == rows(whole)
        assert (run / "checkpoints/latest").resolve().name == "step_000001"


@pytest.mark.parametrize("kind, words, saved", [("hangs", "limit of 1 s", 1), ("slow", "then ended", 2)])
def test_a_run_that_the_watchdog_ends_saves_its_last_boundary(kind, words, saved, case, ranks, tmp_path) -> None:
    """In the second step. What hangs is taken out, and the first step is saved; what is slow comes to its end, and the
    second is saved too."""
    made = case("grpo", checkpoint=RARELY, eval={})
    del made.config["data"]["validation"], made.config["train"]["stop"]
    uncalled_before_the_start(made.config)
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(2, "command", *command_line(made, whole))
    argv = command_line(made, run)
    late = ranks.run(2, command_that_is_late, kind, 8 + 3, *argv, "watchdog.reward=1", "watchdog.grace=4")
    assert [status for status, _ in late] == [3, 3], late
    said = late[0][1]
    assert words in said
    assert lines_naming(said, f"saved {run}/resume/step_{saved:06d}", "the same command")
    assert [point.position for point in find_points(run)] == [Position(saved)]
    assert f"from resume/step_{saved:06d}" in ranks.run(2, "command", *argv)[0]
    assert rows(run) == rows(whole)


def test_a_stopped_rollout_is_saved_before_the_engine_is_closed(case, ranks, tmp_path) -> None:
    """SIGTERM to one rank of two. vLLM's own: tests/distributed/test_rollout_resume.py."""
    made = case("grpo", checkpoint=RARELY, eval={})
    del made.config["data"]["validation"], made.config["train"]["stop"]
    run = tmp_path / "run"
    argv = command_line(made, run)
    (status, said, first), (other, _, second) = ranks.run(2, stopped_rollout, str(run), *argv)
    assert (status, other) == (75, 75)
    assert f"stopped (SIGTERM): saved {run}/resume/step_000001" in said
    assert first == [(["step_000001"], False, True)], "saved, given back, and the ranks are still together"
    assert [points for points, _, _ in second] == [["step_000001"]]


def test_skipped_steps_are_counted_on_after_a_kill(case, ranks, tmp_path) -> None:
    """Three good steps, whose gradient norms are kept; then all are skipped, and the third of those ends the run. So it
    does when the run is cut off before the first of them, and again before the last."""
    made = case("sft", checkpoint=EACH_STEP)
    made.config["train"] |= {"num_steps": 8, "skip_grad_norm_factor": 2.0, "max_skipped_in_a_row": 3}
    whole, run = tmp_path / "whole", tmp_path / "run"
    status, said = ranks.run(1, command_that_skips, 0, *command_line(made, whole))[0]
    assert status == 4, said
    assert [row.get("skipped_steps") for row in rows(whole)] == [None, 0, 0, 0, 1, 1]
    argv = command_line(made, run)
    assert ranks.run(1, command_that_skips, 4, *argv)[0][0] == "killed"
    assert ranks.run(1, command_that_skips, 3, *argv)[0][0] == "killed"
    assert find_points(run)[-1].position == Position(5)
    state = read_manifest(find_points(run)[-1])["state"]["bad_steps/actor"]
    assert (state["in_a_row"], len(state["norms"])) == (2, 3)
    status, said = ranks.run(1, command_that_skips, 0, *argv)[0]
    assert (status, bool(lines_naming(said, "3 optimizer step", "train.max_skipped_in_a_row = 3"))) == (4, True), said
    assert rows(run) == rows(whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_costs_nothing_that_was_complete(rank, case, ranks, tmp_path) -> None:
    """During the second and third of five steps one rank can write no file beyond 300 bytes: no point and, on rank 0,
    no export and no metrics; all that came before stays, and all that comes after is there."""
    made = case("sft", checkpoint=EACH_STEP | {"keep": 9, "export_every": 1})
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(2, "command", *command_line(made, whole))
    said = ranks.run(2, command_on_a_full_disk, rank, 2, 3, *command_line(made, run))[0]
    for step in (2, 3):
        assert lines_naming(said, "WARNING", "no resume point", f"step {step}", f"rank {rank}"), said
        assert bool(lines_naming(said, "WARNING", "no export", f"step {step}", "rank 0")) is (rank == 0)
    assert bool(lines_naming(said, "metrics.jsonl", "bytes")) is (rank == 0)
    assert rows(run) == rows(whole)
    points = find_points(run)
    assert [point.position.step for point in points] == [1, 4, 5]
    assert [damaged_files(point, read_manifest(point)) for point in points] == [[]] * 3
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", *(f"step_{step:06d}" for step in (1, 2, 3, 4, 5) if rank or step not in (2, 3))]
    for name in names[1:]:
        ours, theirs = (content(directory / "checkpoints" / name) for directory in (run, whole))
        assert {path: text for path, (text, _) in ours.items()} == {path: text for path, (text, _) in theirs.items()}
    assert sorted(path.name for path in (run / "resume").iterdir()) == [point.path.name for point in points]


def test_a_read_only_run_directory_is_refused_before_anything_is_built(case, ranks, tmp_path) -> None:
    """A place where nothing can be made; and an earlier run on a file system that has become read-only (patched: root
    may write anywhere else)."""
    made, run = case("sft", checkpoint=EACH_STEP), tmp_path / "run"
    argv = command_line(made, run)
    elsewhere = ranks.run(1, command_on_a_read_only_disk, False, *argv, "run.dir=/proc/nothing/run")[0]
    assert (elsewhere[0], elsewhere[2]) == (2, 0)
    assert lines_naming(elsewhere[1], "run.dir = /proc/nothing/run")
    assert ranks.run(1, command_until, 3, TRAIN, "step", *argv)[0][0] == "killed"
    before = content(run)
    status, said, built = ranks.run(1, command_on_a_read_only_disk, True, *argv)[0]
    assert (status, built) == (2, 0)
    assert lines_naming(said, f"run.dir = {run}", "Read-only file system", "name a directory")
    assert content(run) == before


def test_fewer_steps_than_are_done_are_refused(case, ranks, tmp_path) -> None:
    made, run = case("sft", checkpoint=EACH_STEP), tmp_path / "run"
    made.config["actor"]["optim"] = {"lr": 1e-3}
    argv = command_line(made, run)
    assert ranks.run(1, command_until, 4, TRAIN, "step", *argv)[0][0] == "killed"
    for steps in (2, 3):
        assert_refused(ranks, run, [*argv, f"train.num_steps={steps}"], "3 steps", f"train.num_steps = {steps}")
    ranks.run(1, "command", *argv, "train.num_steps=4")
    assert json.loads((run / "FINISHED").read_text())["step"] == 4
    assert (run / "checkpoints/step_000004/actor").is_dir()


def test_a_run_that_was_killed_after_its_last_step_ends_in_order(tmp_path) -> None:
    """With the number of steps that it was to make. In the middle of a step that is no step of the run it may not."""
    _require_steps_left(Position(5), 5, 5, tmp_path)
    for steps in (0, 5):
        _require_steps_left(Position(0), None, steps, tmp_path)
    with refuses("5 steps", "2 updates", "train.num_steps = 5"):
        _require_steps_left(Position(5, 2), 9, 5, tmp_path)


LATE = [
    ("build", "megarlhf.resume.points.point", "damaged_files"),
    ("checkpoint", "megarlhf.observe.records.jsonl:StepLines", "flush"),
]


@pytest.mark.parametrize("phase, owner, method", LATE)
def test_a_file_system_that_does_not_answer_is_late(phase, owner, method, case, ranks, tmp_path) -> None:
    """While a resume point is examined, and while metrics are written. Not covered: a call that cannot be interrupted,
    which `watchdog.grace` ends."""
    made = case("sft", checkpoint=EACH_STEP, watchdog={"build": 4, "checkpoint": 4})
    argv = command_line(made, tmp_path / "run")
    assert ranks.run(1, command_until, 3, TRAIN, "step", *argv)[0][0] == "killed"
    status, said = ranks.run(1, command_that_hangs, 1, owner, method, *argv)[0]
    assert status == 3, said
    (report,) = (tmp_path / "run/failures/watchdog").glob("*/report.txt")
    assert f"phase {phase!r} has passed its limit" in report.read_text()


def test_a_finished_run_is_not_begun_again_and_a_refusal_changes_nothing(case, ranks, tmp_path) -> None:
    """Its resume points were removed, or its metrics are damaged: more steps cannot be made. It can be overwritten."""
    made, run = case("sft", checkpoint=EACH_STEP), tmp_path / "run"
    made.config["actor"]["optim"], made.config["train"]["num_steps"] = {"lr": 1e-3}, 2
    argv = command_line(made, run)
    ranks.run(1, "command", *argv)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([lines[0], "no json\n", *lines[1:]]))
    assert_refused(ranks, run, [*argv, "train.num_steps=4"], "metrics.jsonl", "line 2")
    metrics.write_text("".join(lines))
    (run / "resume").rename(tmp_path / "resume")
    assert_refused(ranks, run, [*argv, "train.num_steps=4"], "has finished", "step 2", "no resume point")
    metrics.write_text("no json\n")
    status, said = ranks.run(1, "command_status", *argv, "run.on_existing=overwrite")[0]
    assert (status, [row["step"] for row in read_metrics(run)]) == (0, [0, 1, 2]), said


def test_a_reward_model_whose_head_was_scaled_can_be_prolonged(case, data, ranks, tmp_path) -> None:
    """From the point before the scaling, as if it had been planned so long; also where the default cadence has written
    no point."""
    made = case("rm", checkpoint={}, unit_variance=True, eval={"max_samples": 9})
    made.config["data"]["validation"], made.config["reward_model"]["optim"] = str(data["pairs"]), {"lr": 1e-3}
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(1, "command", *command_line(made, whole))
    ranks.run(1, "command", *command_line(made, run), "train.num_steps=3")
    assert [str(point.position) for point in find_points(run)] == ["update 1 of step 3"]
    scaled = rows(run)[3]
    ranks.run(1, "command", *command_line(made, run), "run.allow_changes=true")
    assert rows(run) == rows(whole)
    assert "eval_loss" in scaled
    assert "eval_loss" not in rows(run)[3]
    last = "checkpoints/step_000005/reward_model/model.safetensors"
    assert (run / last).read_bytes() == (whole / last).read_bytes()


@pytest.mark.parametrize("when", ["measured", "changes"])
def test_a_stop_while_a_head_is_scaled_loses_nothing(when, case, data, ranks, tmp_path) -> None:
    """Without any cadence: before the head changes the run is saved and left, afterwards it comes to its end."""
    made = case("rm", checkpoint={"every_minutes": 0}, unit_variance=True, eval={"max_samples": 9})
    made.config["data"]["validation"] = str(data["pairs"])
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(1, "command", *command_line(made, whole), "train.num_steps=2")
    argv = [*command_line(made, run), "train.num_steps=2"]
    status, said = ranks.run(1, command_stopped_while_it_scales, when, *argv)[0]
    if when == "measured":
        assert (status, f"saved {run}/resume/step_000001_update_0001" in said) == (75, True), said
        status, said = ranks.run(1, "command_status", *argv)[0]
    assert status == 0, said
    assert rows(run) == rows(whole)
    last = "checkpoints/step_000002/reward_model/model.safetensors"
    assert (run / last).read_bytes() == (whole / last).read_bytes()


def test_a_line_of_metrics_that_had_no_room_is_written_before_the_point_of_its_step(case, ranks, tmp_path) -> None:
    """Cut off before the next step: the run goes on after the step whose line had to wait."""
    made = case("sft", checkpoint=EACH_STEP)
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(1, "command", *command_line(made, whole))
    argv = command_line(made, run)
    assert ranks.run(1, command_whose_line_waits, 2, 2, *argv)[0][0] == "killed"
    assert "from resume/step_000001" in ranks.run(1, "command", *argv)[0]
    assert rows(run) == rows(whole)


def test_a_directory_that_is_moved_is_not_begun_anew(case, ranks, tmp_path) -> None:
    """A run that went on would leave half of it here and half of it there."""
    made = case("sft", checkpoint=EACH_STEP)
    whole, run, moved = tmp_path / "whole", tmp_path / "run", tmp_path / "run-moved"
    ranks.run(1, "command", *command_line(made, whole))
    status, said = ranks.run(1, command_whose_directory_moves, run, *command_line(made, run))[0]
    assert (status, bool(lines_naming(said, f"run.dir = {run}", "lock", "config.yaml"))) == (2, True), said
    (moved / "lock").unlink()  # it is another process's that has ended: this one lives on for the next test
    assert "from resume/step_000002" in ranks.run(1, "command", *command_line(made, moved))[0]
    assert rows(moved) == rows(whole)


def test_with_a_point_at_every_update_a_kill_loses_one(case, ranks, tmp_path) -> None:
    """Points are written while training goes on, but an update waits for the point of the one before."""
    made = case("grpo", checkpoint={"every_updates": 1, "every_minutes": 0, "keep": 99}, eval={})
    made.config["train"]["num_steps"] = 2
    del made.config["data"]["validation"], made.config["train"]["stop"]
    run = tmp_path / "run"
    seen = ranks.run(1, points_at_updates, run, *command_line(made, run))[0]
    assert len(seen) > 2
    assert [len(points) for points in seen] == list(range(len(seen)))
