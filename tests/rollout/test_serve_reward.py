"""`megarlhf serve-reward` as a process of its own, asked by the client of `kind: http` and by hand."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
import torch

from megarlhf.config import RewardConfig
from megarlhf.config.serve import ServeRewardConfig
from megarlhf.rollout.rewards.score import make_source
from megarlhf.rollout.rewards.server import RequestError, answer_to, batch_of, require_token
from tests.command import ROOT, megarlhf
from tests.rollout.test_http_reward import ask

CONFIG = """
rewards:
  - {kind: rule, rule: exact_match, weight: 2.0}
  - {kind: rule, rule: "tests.rollout.served_rules:short", workers: 1}
port: 0
token_env: SERVE_TOKEN
max_samples: 4
max_body_mib: 1
"""
TOKEN = "not to be shown"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "serve.yaml").write_text(CONFIG)
    env = os.environ | {"SERVE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megarlhf", "serve-reward", "-c", str(folder / "serve.yaml")]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    line = server.stdout.readline()
    assert line.startswith("serving exact_match, tests.rollout.served_rules:short at http://127.0.0.1:"), line
    yield line.split()[-1]
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=20) == 0
    log = (folder / "log").read_text()
    assert TOKEN not in log
    assert "stopped" in log


def test_a_stop_at_the_first_moment_is_not_lost(tmp_path):
    """Whoever reads the line that says where it serves may send it at once."""
    (tmp_path / "serve.yaml").write_text("rewards: [{kind: rule, rule: exact_match}]\nport: 0\n")
    command = [sys.executable, "-m", "megarlhf", "serve-reward", "-c", str(tmp_path / "serve.yaml")]
    for _ in range(3):
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=30)
        assert (server.returncode, said.strip()) == (0, "stopped")


def post(url, body, token=TOKEN, **options):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.post(url, headers=headers, **({"json": body} | options), timeout=20)


def test_a_run_is_answered(url):
    """Responses r0, r1 with answers none and 1: `short` gives 1 where it applies, `exact_match` needs an answer."""
    answer = post(url, {"query": ["p0 3", "p1 4"], "prompts": ["p0 ", "p1 "], "labels": ["3", "5"]}).json()
    assert answer["rewards"] == [2.0 * 1.0 + 1.0, 0.0 + 1.0]
    assert answer["by_reward"]["exact_match"] == [1.0, 0.0]
    found = ask(url, count=2, token=TOKEN)
    assert "status 500" in found[0].error
    assert "exact_match" in found[0].error, "a prompt without an answer"


def test_a_reward_that_fails_and_is_dropped_is_no_zero():
    """Null, and said to have failed: for the run it is then no reward that does not apply."""
    rules = [
        RewardConfig(kind="rule", rule="tests.rollout.served_rules:picky", workers=0, on_failure="drop"),
        RewardConfig(kind="rule", rule="tests.rollout.served_rules:short", workers=0),
    ]
    sources = {rule.label: (rule, make_source(rule, torch.device("cpu"))) for rule in rules}
    answer = answer_to(batch_of(b'{"query": ["a", "bad", "ab"]}', 4), sources)
    assert answer["rewards"] == [2.0, None, 1.0]
    assert answer["failed"].keys() == {"1"}
    assert "picky' raised RuntimeError: no judge for this" in answer["failed"]["1"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_reads_what_a_request_does_not_say_fails(workers):
    """It would take something for the truth that nobody has said. One that reads texts gets them."""
    rules = [
        RewardConfig(kind="rule", rule=f"tests.rollout.served_rules:{name}", workers=workers, on_failure="drop")
        for name in ("finished_only", "texts_of_batch")
    ]
    sources = {rule.label: (rule, make_source(rule, torch.device("cpu"))) for rule in rules}
    try:
        answer = answer_to(batch_of(b'{"query": ["ab", "c"]}', 4), sources)
    finally:
        for _, source in sources.values():
            source.close()
    assert answer["by_reward"] == {rules[0].label: [None, None], rules[1].label: [2.0, 1.0]}
    assert "reads finished, of which a request says nothing" in answer["failed"]["0"]


def test_health_needs_no_token(url):
    said = httpx.get(url.replace("get_reward", "health")).json()
    assert said == {"status": "ok", "rewards": ["exact_match", "tests.rollout.served_rules:short"]}


@pytest.mark.parametrize("token", [None, "another"])
def test_a_wrong_token_is_refused(url, token):
    answer = post(url, {"query": ["a"]}, token=token)
    assert (answer.status_code, answer.json()["detail"][:22]) == (401, "Authorization: Bearer ")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"json": {"query": ["a"] * 5}}, 413, "got 5 responses, at most 4: send several requests"),
        ({"json": None, "content": b"x" * (1 << 20 | 1)}, 413, "larger than 1048576 bytes"),
        ({"json": None, "content": b"{"}, 422, "is no JSON"),
        ({"json": None, "content": b"[" * 100000}, 422, "is no JSON"),
        ({"json": [1]}, 422, "expected {"),
        ({"json": {"query": "a"}}, 422, "query = 'a', expected a list of texts"),
        ({"json": {"query": ["a"], "prompts": []}}, 422, "query has 1 entries"),
        (
            {"json": {"query": ["a"], "columns": [{}, {}]}},
            422,
            "query has 1 entries; columns must be a list of as many",
        ),
        ({"json": {"query": ["a"], "columns": ["b"]}}, 422, "columns = ['b'], expected objects or null"),
        ({"json": {"query": ["ab"], "prompts": ["b"]}}, 422, "query 0 does not begin with its prompt: 'ab'"),
    ],
)
def test_what_cannot_be_answered_is_said(url, options, status, words):
    answer = post(url, None, **options)
    assert answer.status_code == status
    assert words in answer.json()["detail"]


def test_what_a_request_leaves_out():
    batch = batch_of(b'{"query": ["ab"], "labels": ["1"]}', 4)
    assert (batch.prompts, batch.responses, batch.fields) == ([""], ["ab"], [{"answer": "1"}])
    assert batch.part([0]).response_sizes() == [None]
    assert batch.turns is None
    assert batch_of(b'{"query": ["ab"], "turns": [["a", "b"]]}', 4).turns == [["a", "b"]]


def test_a_rule_that_needs_a_column_is_served():
    """By the columns of the request; a TRL function gets its conversations."""
    body = {
        "query": ["say a", "say b"],
        "prompts": ["say ", "say "],
        "labels": ["x", "b"],
        "columns": [{"answer": "a", "wanted": ["a"]}, {"wanted": ["c"]}],
        "messages": [[{"role": "user", "content": "say"}], None],
    }
    names = ("wanted", "of_messages")
    rules = [RewardConfig(kind="rule", rule=f"tests.rollout.served_rules:{name}", workers=0) for name in names]
    sources = {rule.label: (rule, make_source(rule, torch.device("cpu"))) for rule in rules}
    batch = batch_of(json.dumps(body).encode(), 4)
    assert batch.fields == [{"answer": "a", "wanted": ["a"]}, {"answer": "b", "wanted": ["c"]}]
    found = answer_to(batch, sources)["by_reward"]
    assert [found[rule.label] for rule in rules] == [[1.0, 0.0], [1.0, 0.0]]


def test_a_token_is_compared_whole():
    require_token("Bearer x", "x")
    require_token(None, None)
    with pytest.raises(RequestError):
        require_token("Bearer ", "x")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rewards": []}, "rewards is empty"),
        ({"rewards": [{"kind": "model"}]}, "serves rules and classifiers; got a reward of kind 'model'"),
        ({"rewards": [{"kind": "classifier", "path": "x", "form": "chat"}]}, "form: chat and append_eos need"),
        ({"rewards": [{"kind": "classifier", "path": "x", "append_eos": True}]}, "set form: joined or pair, or give"),
        ({"host": "0.0.0.0"}, "can be reached from other machines: set token_env"),
        ({"rewards": [{"kind": "rule", "rule": "exact_match", "normalise": "group"}]}, "normalise is for the run"),
    ],
)
def test_bad_configurations_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        ServeRewardConfig.model_validate({"rewards": [{"kind": "rule", "rule": "exact_match"}], **keys})


def test_the_command_says_what_is_wrong(tmp_path):
    (tmp_path / "serve.yaml").write_text("rewards: [{kind: rule, rule: exakt_match}]\nport: 0\n")
    done = megarlhf("serve-reward", "-c", str(tmp_path / "serve.yaml"))
    assert done.returncode == 2
    assert "exakt_match" in done.stderr
    assert "Traceback" not in done.stderr
