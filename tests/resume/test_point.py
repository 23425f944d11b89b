"""Which resume points count, and which give way. What is in them: tests/distributed/test_resume*.py."""

from pathlib import Path

from megarlhf.config import CheckpointConfig
from megarlhf.resume.points import point
from megarlhf.resume.points.cadence import Cadence
from megarlhf.resume.points.point import Position, find_points, superfluous


def points(run: Path, *positions: Position) -> list[str]:
    for position in positions:
        (point.resume_directory(run) / position.name).mkdir(parents=True)
    return [found.path.name for found in find_points(run)]


def test_a_position_in_words() -> None:
    """Two steps and one update done: the update is of the third step."""
    assert [str(Position(2)), str(Position(2, 1))] == ["step 2", "update 1 of step 3"]
    assert Position(2, 1).name == "step_000002_update_0001"


def test_later_points_than_that_which_a_run_goes_on_from_count_no_more(tmp_path) -> None:
    """They would fill the places of `checkpoint.keep`, and could be taken later for what comes after other steps."""
    points(tmp_path, Position(4), Position(8), Position(8, 2), Position(12))
    point.set_aside(tmp_path, Position(8))
    assert points(tmp_path, Position(9)) == ["step_000004", "step_000008", "step_000009"]
    assert sorted(path.name for path in (tmp_path / "resume").glob("*.passed_over")) == [
        "step_000008_update_0002.passed_over",
        "step_000012.passed_over",
    ]
    point.set_aside(tmp_path, Position(4))  # again, and names that are there already
    (tmp_path / "resume/step_000012").mkdir()
    point.set_aside(tmp_path, Position(4))
    assert points(tmp_path) == ["step_000004"]
    for each in point.passed_over(tmp_path):
        point.remove(each)
    assert [path.name for path in (tmp_path / "resume").iterdir()] == ["step_000004"]


def test_the_first_point_from_each_multiple_on_is_kept(tmp_path) -> None:
    """Whatever the cadence: points by time lie at any step, those by updates inside of steps."""
    at = [(2, 0), (4, 1), (5, 0), (7, 0), (11, 2), (12, 0), (13, 0)]
    points(tmp_path, *(Position(*each) for each in at))
    kept = {4: [(4, 1), (11, 2), (12, 0), (13, 0)], 5: [(5, 0), (11, 2), (13, 0)], 100: [(13, 0)], 0: [(13, 0)]}
    for keep_every, expected in kept.items():
        found = find_points(tmp_path)
        gone = superfluous(found, keep=1, keep_every=keep_every)
        assert [each.position for each in found if each not in gone] == [Position(*each) for each in expected]


def test_an_old_point_gives_way_where_there_is_no_room(tmp_path, monkeypatch) -> None:
    """The newest never does, nor one that is kept for good; none does while there is room."""
    names = points(tmp_path, Position(2), Position(4), Position(5), Position(6))
    usage = type("usage", (), {"free": property(lambda self: 10 * (5 - len(find_points(tmp_path))))})
    monkeypatch.setattr(point.shutil, "disk_usage", lambda path: usage())
    monkeypatch.setattr(point, "allocated_bytes", lambda path: 10)
    spare = superfluous(find_points(tmp_path), keep=1, keep_every=4)
    partial = point.partial_path(tmp_path, Position(7))
    assert point.make_room(partial, 10, spare) is None
    assert points(tmp_path) == names
    assert "0.000 GB" in str(point.make_room(partial, 40, spare))
    assert points(tmp_path) == names, "none goes where all of them would not be enough"
    assert point.make_room(partial, 20, spare) is None
    assert points(tmp_path) == ["step_000004", "step_000005", "step_000006"]
    spare = superfluous(find_points(tmp_path), keep=1, keep_every=4)
    assert "free" in str(point.make_room(partial, 50, spare))
    assert points(tmp_path) == ["step_000004", "step_000005", "step_000006"]


def test_updates_are_those_of_mini_batches() -> None:
    cadence = Cadence(CheckpointConfig(every_updates=3, every_minutes=0), lambda: None)
    due = []
    for number in range(1, 8):
        cadence.at_boundary(1)
        due.append(cadence.due(Position(0, number)))
        if due[-1]:
            cadence.saving()
    assert due == [False, False, True, False, False, True, False]
