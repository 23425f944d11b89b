"""Whatever a reward does wrong, the command ends with a sentence that says so, and keeps what was trained before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.resume.points.point import find_points
from tests.distributed.test_reward_runs import command
from tests.rollout.test_http_reward import Server

ONE_RANK = [f"{role}.parallel.tp=1" for role in ("actor", "reference")]
RULE = "tests.distributed.bad_rewards:"
ON_SAMPLE = f"reward '{RULE}%s' on sample "
FUNCTIONS = {
    "raises": (2, ["raised KeyError: 'no_such_field'; ", "bad_rewards.py:", 'fields["no_such_field"]']),
    "nothing": (2, ["16 of 16 samples of this step (the first is sample 0", ") got no reward: every reward said None"]),
    "nan": (2, ["returned nan, expected a finite number; return a float, or None for no reward"]),
    "a_list": (2, ["returned [1.0], expected a number; return a float"]),
    "a_string": (2, ["returned '1.0', expected a number; return a float for every response"]),
    "wrong_length": (2, ["returned 15 values for 16 responses; return one for each"]),
    "never_returns": (3, ["took longer than 2 s", "rewards[].on_failure = drop goes on without such samples"]),
    "exits": (2, ["ended its process with status 7; a function must return, not exit"]),
    "calls_exit": (2, ["raised SystemExit: 0; a function must return, not exit; ", "bad_rewards.py:", "sys.exit(0)"]),
    "forgot_async": (2, ["returned <coroutine object", "declare the function with `async def`"]),
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
    rule: dict[str, Any] = {
        "kind": "rule",
        "rule": RULE + name,
        "timeout_seconds": 2.0,
        "workers": workers,
        "check": "none",
    }
    argv = [*command(tmp_path, one_layer, data, [rule]), *ONE_RANK]
    status, said = ranks.run(1, "command_status", *argv)[0]
    assert status == expected, said
    last = said.strip().splitlines()[-1]
    assert last.startswith("megarlhf rl: ")
    for each in [*words, *([] if name == "nothing" else [ON_SAMPLE % name])]:
        assert each in last
    assert "Traceback" not in said
    assert "WARNING step 1: nothing can be learnt: in each group all rewards are equal (reward_mean 1). Likely" in said
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
    assert "reward 'judge' on sample " in last
    assert "Traceback" not in said
    _assert_first_step_is_kept(tmp_path / "run")


def test_a_run_that_fails_in_its_first_step_goes_on_as_the_message_advises(ranks, one_layer, data, tmp_path) -> None:
    """No point is written where nothing had been trained; the responses are taken from the bank, and a changed
    `on_failure` is the same run."""
    rule = {"kind": "rule", "rule": RULE + "raises_for_short", "check": "none"}
    argv = [*command(tmp_path, one_layer, data, [rule]), *ONE_RANK]
    status, said = ranks.run(1, "command_status", *argv)[0]
    assert status == 2
    assert "raised KeyError: 'too short for the judge'" in said
    assert not find_points(tmp_path / "run")
    argv = [*command(tmp_path, one_layer, data, [{**rule, "on_failure": "drop"}]), *ONE_RANK]
    status, said = ranks.run(1, "command_status", *argv)[0]
    assert status == 0, said
    assert "step 1: 16 of 16 responses are in the rollout bank" in said
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["samples_without_reward"] == rows[0][f"reward/{RULE}raises_for_short_failed"] > 0


def _assert_first_step_is_kept(run: Path) -> None:
    """Its metrics, and the state after it, from which the same command goes on."""
    assert [row["step"] for row in read_metrics(run) if row["step"]] == [1]
    (found,) = find_points(run)
    assert found.position.name == "step_000001"


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"kind": "rule", "rule": "exact_mach"}, "did you mean 'exact_match'"),
        ({"kind": "rule", "rule": RULE + "raisess"}, "has no function 'raisess'; did you mean 'raises'"),
        ({"kind": "rule", "rule": "tests.distributed.bad_reward:raises"}, "cannot import tests.distributed.bad_reward"),
        (
            {"kind": "rule", "rule": "tests.distributed.exiting_rewards:score"},
            "tests.distributed.exiting_rewards fails when it is imported: SystemExit: 0 (",
        ),
        ({"kind": "rule", "rule": RULE + "yields"}, "it is a generator; return the values instead of yielding them"),
        ({"kind": "rule", "rule": "tags", "args": {"name": ["a"]}}, "did you mean 'names'"),
        ({"kind": "ruel", "rule": "exact_match"}, "'rule'"),
        ({"kind": "rule", "rule": "exact_match", "wieght": 2}, "did you mean 'weight'"),
        ({"kind": "http", "url": "judge:5000/get_reward"}, "expected http://HOST:PORT/PATH"),
    ],
)
def test_what_is_typed_wrong_is_said_before_anything_is_done(reward, words, ranks, one_layer, data, tmp_path) -> None:
    argv = [*command(tmp_path, one_layer, data, [reward]), *ONE_RANK]
    status, said = ranks.run(1, "command_status", *argv)[0]
    assert status == 2
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
