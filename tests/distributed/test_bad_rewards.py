"""Whatever a reward does wrong, the command ends with a sentence that says so, and keeps what was trained before."""

import json
from pathlib import Path

import pytest

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.resume.points.point import find_points
from tests.distributed.test_reward_runs import command
from tests.refuses import command_refuses, lines_naming, missing_names
from tests.rollout.test_http_reward import Server

ONE_RANK = [f"{role}.parallel.tp=1" for role in ("actor", "reference")]
RULE = "tests.distributed.bad_rewards:"
FUNCTIONS = {
    "raises": (2, ["KeyError: 'no_such_field'", "bad_rewards.py", 'fields["no_such_field"]']),
    "nothing": (2, ["16 of 16 samples", "sample 0", "no reward", "None"]),
    "nan": (2, ["returned nan", "return a float", "None"]),
    "a_list": (2, ["returned [1.0]", "return a float"]),
    "a_string": (2, ["returned '1.0'", "return a float"]),
    "wrong_length": (2, ["returned 15 values for 16 responses"]),
    "never_returns": (3, ["longer than 2 s", "rewards[].on_failure = drop"]),
    "exits": (2, ["status 7", "must return"]),
    "calls_exit": (2, ["SystemExit: 0", "must return", "bad_rewards.py", "sys.exit(0)"]),
    "forgot_async": (2, ["returned <coroutine object", "`async def`"]),
}
ANSWERS = {
    "no JSON": (200, "<html>"),
    "another form": (200, '{"score": [1.0]}'),
    "a string": (200, json.dumps({"rewards": ["1"] * 16})),
    "NaN": (200, '{"rewards": [' + ", ".join(["NaN"] * 16) + "]}"),
    "too few": (200, '{"rewards": [1.0]}'),
}


@pytest.mark.parametrize("name, workers", [*((name, 1) for name in FUNCTIONS), ("calls_exit", 0)])
def test_a_function_that_is_wrong_in_the_second_step(name, workers, ranks, one_layer, data, tmp_path) -> None:
    expected, words = FUNCTIONS[name]
    rule = {"kind": "rule", "rule": RULE + name, "timeout_seconds": 2.0, "workers": workers, "check": "none"}
    argv = [*command(tmp_path, one_layer, data, [rule]), *ONE_RANK]
    status, said = ranks.run(1, "command_status", *argv)[0]
    assert status == expected, said
    last = said.strip().splitlines()[-1]
    assert last.startswith("megarlhf rl: ")
    assert not missing_names(last, *words, *([] if name == "nothing" else [f"reward '{RULE}{name}'", "sample"]))
    assert "Traceback" not in said
    assert lines_naming(said, "WARNING step 1", "rewards are equal", "reward_mean 1")
    _assert_first_step_is_kept(tmp_path / "run")
    if name == "raises":  # a new process counts its calls anew, so that the function is right now
        status, said = ranks.run(1, "command_status", *argv)[0]
        assert status == 0, said
        assert "from resume/step_000001" in said
        assert [row["step"] for row in read_metrics(tmp_path / "run") if row["step"]] == [1, 2]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_server_that_answers_garbage_in_the_second_step(name, ranks, one_layer, data, tmp_path) -> None:
    server = Server()
    try:
        server.answers = [(200, json.dumps({"rewards": [1.0] * 16})), *[ANSWERS[name]] * 20]
        judge = {"kind": "http", "url": server.url, "name": "judge", "retries": 1}
        argv = [*command(tmp_path, one_layer, data, [judge]), *ONE_RANK]
        status, said = ranks.run(1, "command_status", *argv)[0]
    finally:
        server.stop()
    assert status in (2, 3), said
    last = said.strip().splitlines()[-1]
    assert not missing_names(last, "reward 'judge'", "sample")
    assert "Traceback" not in said
    _assert_first_step_is_kept(tmp_path / "run")


def test_a_run_that_fails_in_its_first_step_goes_on_as_the_message_advises(ranks, one_layer, data, tmp_path) -> None:
    """No point is written where nothing had been trained; the responses are taken from the bank, and a changed
    `on_failure` is the same run."""
    rule = {"kind": "rule", "rule": RULE + "raises_for_short", "check": "none"}
    argv = [*command(tmp_path, one_layer, data, [rule]), *ONE_RANK]
    command_refuses(ranks, argv, "KeyError: 'too short for the judge'")
    assert not find_points(tmp_path / "run")
    argv = [*command(tmp_path, one_layer, data, [{**rule, "on_failure": "drop"}]), *ONE_RANK]
    assert lines_naming(ranks.run(1, "command", *argv)[0], "step 1", "16 of 16 responses", "bank")
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["samples_without_reward"] == rows[0][f"reward/{RULE}raises_for_short_failed"] > 0


def _assert_first_step_is_kept(run: Path) -> None:
    """Its metrics, and the state after it, from which the same command goes on."""
    assert [row["step"] for row in read_metrics(run) if row["step"]] == [1]
    (found,) = find_points(run)
    assert found.position.name == "step_000001"


@pytest.mark.parametrize(
    ("reward", "names"),
    [
        ({"rule": "exact_mach"}, ["exact_mach", "'exact_match'"]),
        ({"rule": RULE + "raisess"}, ["'raisess'", "did you mean 'raises'"]),
        ({"rule": "tests.distributed.bad_reward:raises"}, ["cannot import tests.distributed.bad_reward"]),
        ({"rule": "tests.distributed.exiting_rewards:score"}, ["tests.distributed.exiting_rewards", "SystemExit: 0"]),
        ({"rule": RULE + "yields"}, ["yields", "generator"]),
        ({"rule": "tags", "args": {"name": ["a"]}}, ["'names'"]),
        ({"kind": "ruel", "rule": "exact_match"}, ["'rule'"]),
        ({"rule": "exact_match", "wieght": 2}, ["wieght", "'weight'"]),
        ({"kind": "http", "url": "judge:5000/get_reward"}, ["http://HOST:PORT/PATH"]),
    ],
)
def test_what_is_typed_wrong_is_said_before_anything_is_done(reward, names, ranks, one_layer, data, tmp_path) -> None:
    argv = [*command(tmp_path, one_layer, data, [{"kind": "rule"} | reward]), *ONE_RANK]
    assert "Traceback" not in command_refuses(ranks, argv, *names)
    assert not (tmp_path / "run").exists()
