"""A reward model behind a URL: the form of OpenRLHF's server, and a server that fails in every way."""

import datetime
import json
import logging
import math
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megarlhf.rollout.rewards import http
from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollout.rewards.http import Circuit, HttpReward

FAST = {"backoff_seconds": (0.01,), "timeout_seconds": 5.0, "retries": 2}


def batch(count):
    rows = range(count)
    return RewardBatch(
        prompts=[f"p{n} " for n in rows],
        responses=[f"r{n}" for n in rows],
        prompt_tokens=[[1]] * count,
        response_tokens=[[2]] * count,
        finished=[True] * count,
        fields=[{"answer": str(n)} if n else {} for n in rows],
        messages=[None] * count,
        samples=list(rows),
    )


class Server:
    """Answers what `answers` has next, then rewards of 1; keeps what it was sent."""

    def __init__(self):
        self.answers, self.requests = [], []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, dict(self.headers), body))
                usual = (200, json.dumps({"rewards": [1.0] * len(body["query"])}))
                status, text = server.answers.pop(0) if server.answers else usual
                if status == "late":
                    time.sleep(float(text))
                    status, text = usual
                if status == "slow":  # a byte now and then, of the headers or of the body
                    for byte in text.encode():
                        self.wfile.write(bytes([byte]))
                        time.sleep(0.1)
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/get_reward"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.stop()


def ask(url, count=2, **options):
    reward = HttpReward(url, **{**FAST, **options})
    try:
        return reward.start(batch(count)).wait()
    finally:
        reward.close()


def test_the_form_of_the_request_and_of_the_answer(server):
    """Prompt and response together, labels from `answer`; the token in a header; requests of so many samples."""
    server.answers = [(200, json.dumps({"rewards": [0.5, None], "scores": [9, 9], "extra_logs": {"a": [1, 2]}}))]
    found = ask(server.url, 3, token="secret", batch_samples=2)
    assert [result.value for result in found] == [0.5, None, 1.0]
    path, headers, body = server.requests[0]
    assert path == "/get_reward"
    assert headers["Authorization"] == "Bearer secret"
    columns = [{}, {"answer": "1"}]
    assert body == {
        "query": ["p0 r0", "p1 r1"], "prompts": ["p0 ", "p1 "], "labels": [None, "1"], "columns": columns
    }  # fmt: skip
    assert len(server.requests) == 2


def test_columns_and_conversations_reach_the_server_and_no_line_is_logged(server, caplog):
    """Whatever a record has: what JSON cannot hold as text, what is no number as null."""
    asked = [[{"role": "user", "content": "p0"}], None]
    keywords = {
        "keywords": ["a"],
        "weight": math.nan,
        "day": datetime.date(2026, 1, 2),
        "reward_model": {"ground_truth": 7},
    }
    rows = replace(batch(2), fields=[keywords, {"answer": "1"}], messages=asked, turns=[["a", "b"], ["c"]])
    reward = HttpReward(server.url, **FAST)
    with caplog.at_level(logging.INFO):
        assert [result.value for result in reward.start(rows).wait()] == [1.0, 1.0]
    reward.close()
    ((_, _, body),) = server.requests
    assert body["columns"] == [{**keywords, "weight": None, "day": "2026-01-02"}, {"answer": "1"}]
    assert (body["labels"], body["messages"]) == ([7, "1"], asked)
    assert body["turns"] == [["a", "b"], ["c"]]
    assert "HTTP Request" not in caplog.text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((503, "busy"), "answered with status 503: 'busy' (tried 3 times)"),
        ((200, "<html>"), "answered with no JSON: '<html>' (tried 3 times)"),
        ((200, "[1, 2]"), 'answered [1, 2], expected {"rewards": [...]} (tried 3 times)'),
        ((200, "[" * 100000), "answered with no JSON: '[[[["),
        ((200, '{"rewards": [1]}'), "answered with 1 rewards for 2 responses (tried 3 times)"),
        ((200, '{"score": [1, 2]}'), 'expected {"rewards": [...]} (tried 3 times)'),
        (("late", "2"), "did not answer in time (0.5 s) (tried 3 times)"),
    ],
    ids=["status", "no json", "no object", "deep json", "wrong length", "other key", "late"],
)
def test_a_failure_is_tried_again_and_then_said(server, answer, words):
    """Two failures and a third try that succeeds; then three failures."""
    timeout_seconds = 0.5 if answer[0] == "late" else 5.0
    server.answers = [answer] * 2
    assert [result.value for result in ask(server.url, timeout_seconds=timeout_seconds)] == [1.0, 1.0]
    assert len(server.requests) == 3
    server.answers = [answer] * 3
    for result in ask(server.url, timeout_seconds=timeout_seconds):
        assert words in result.error
        assert server.url in result.error
        assert result.late


def test_a_value_that_is_no_number_is_said_of_its_sample(server):
    server.answers = [(200, '{"rewards": [1.0, "high"]}')]
    first, second = ask(server.url)
    assert first.value == 1.0
    assert "returned 'high', expected a number" in second.error
    assert not second.late


@pytest.mark.parametrize("text", ["HTTP/1.0 200 OK\r\n" + "X: y\r\n" * 30, "HTTP/1.0 200 OK\r\n\r\n" + "[" * 160])
def test_the_limit_is_of_the_whole_answer(server, text):
    """Each byte comes soon after the one before; all of them would take 18 seconds or more."""
    server.answers = [("slow", text)] * 2
    begun = time.monotonic()
    (found,) = ask(server.url, 1, retries=1, timeout_seconds=0.6)
    assert "did not answer in time (0.6 s) (tried 2 times)" in found.error
    assert found.late
    assert time.monotonic() - begun < 5.0


def test_an_answer_that_is_too_large_is_not_read(server, monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 100)
    server.answers = [(200, json.dumps({"rewards": [1.0], "logs": "x" * 200}))]
    (found,) = ask(server.url, 1, retries=0)
    assert found.error == f"{server.url} answers with more than 100 bytes (tried 1 times)"


def test_a_server_that_says_which_of_its_rewards_failed(server):
    """As serve-reward does; null alone means that no reward applies."""
    server.answers = [(200, json.dumps({"rewards": [None, None], "failed": {"1": "reward 'a' took longer than 1 s"}}))]
    first, second = ask(server.url)
    assert (first.value, first.error) == (None, "")
    assert second.error.endswith("says: \"reward 'a' took longer than 1 s\"")


@pytest.mark.parametrize("token", ["secret\n", " secret", "sécret", "sec\x00ret"])
def test_a_token_that_no_header_can_hold_is_refused_without_its_text(token):
    with pytest.raises(ValueError, match="environment variable JUDGE_TOKEN holds white space") as raised:
        http.require_plain_token("JUDGE_TOKEN", token)
    assert "cret" not in str(raised.value)
    http.require_plain_token("JUDGE_TOKEN", "secret-1.2/=")
    http.require_plain_token(None, None)


def test_the_end_of_a_run_does_not_wait_for_an_answer(server):
    server.answers = [("late", "8")]
    reward = HttpReward(server.url, **FAST)
    reward.start(batch(1))
    while not server.requests:
        time.sleep(0.01)
    begun = time.monotonic()
    reward.close()
    assert time.monotonic() - begun < 4


def test_nobody_there():
    (found,) = ask("http://127.0.0.1:9/x", 1, retries=0)
    assert "cannot be reached" in found.error


def test_the_circuit_opens_after_failures_and_closes_again(monkeypatch):
    """With a clock: five failed requests, none for 30 seconds, then one that may close it."""
    now = [0.0]
    circuit = Circuit(lambda: now[0])
    for number in range(http.OPENS_AFTER):
        assert circuit.reason() == "", number
        circuit.note("no answer")
    assert "the last 5 requests failed, and none is sent for 30 s; the last one: no answer" in circuit.reason()
    now[0] = 29.9
    assert circuit.reason()
    now[0] = 30.1
    assert not circuit.reason()
    assert circuit.reason(), "one request finds out, the others wait"
    circuit.note("again none")
    assert "6 requests" in circuit.reason()
    now[0] = 61.0
    circuit.note("")
    circuit.note("once")
    assert not circuit.reason()


def test_a_server_that_is_down_is_not_asked_for_every_sample(server):
    """Twenty requests of one sample: after five failures the others are not sent."""
    server.answers = [(500, "x")] * 100
    found = ask(server.url, 20, batch_samples=1, retries=0)
    assert len(server.requests) == http.OPENS_AFTER
    assert sum("not sent: " in result.error for result in found) == 15
