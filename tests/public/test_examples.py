"""The scripts of examples/ on a tiny model, as far as they import megarlhf only."""

import http.server
import importlib
import json
import runpy
import sys
import threading
from pathlib import Path

import pytest

import megarlhf

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def judge(monkeypatch):
    """A judge behind HTTP, whose grade is the number of characters of the answer; the questions that it was asked."""
    questions: list[str] = []

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            questions.append(body["messages"][0]["content"])
            grade = len(questions[-1].partition("Answer to grade: ")[2])
            answer = json.dumps({"choices": [{"message": {"content": f"Grade: {grade}"}}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_address[1]}/v1/chat/completions")
    monkeypatch.setenv("JUDGE_MODEL", "judge")
    yield questions
    server.shutdown()
    server.server_close()


KILLS = """
import os, signal

def kill(step):
    if step.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_advantage_judge_and_curriculum_are_killed_and_go_on(rl, judge, tmp_path, monkeypatch, capfd):
    """The three examples in one run of two ranks. A rank is killed in step 2; the same call on one rank goes on, with
    the metrics of a run that was not killed. A changed example is noted."""
    code = tmp_path / "code"
    code.mkdir()
    for name in ("own_advantage", "own_judge", "own_curriculum"):
        (code / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text())
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
    (code / "kills.py").write_text(KILLS)
    monkeypatch.syspath_prepend(code)

    def config(name, **observe):
        sections = rl("own_judge:grade", name)
        sections["train"] = sections["train"] | {"num_steps": 3, "sampler": "own_curriculum:HalfSolved"}
        sections["algo"] = {"advantage": "own_advantage:rank_in_group"}
        sections["checkpoint"] = {"every": 1, "background": False}
        return sections | {"observe": {"metrics": ["own_curriculum:hardest"], **observe}}

    whole = megarlhf.run("rl", config("whole"))
    assert all("Right answer, if known: " in question for question in judge)
    assert len(judge) == 3 * 4
    with pytest.raises(megarlhf.RunFailed, match="SIGKILL"):
        megarlhf.run("rl", config("killed", observers=["kills:kill"]), nproc=2)
    assert megarlhf.RunResult.of(tmp_path / "killed").steps == 1
    (code / "own_advantage.py").write_text((code / "own_advantage.py").read_text() + "# changed\n")
    with pytest.raises(ValueError, match=r"own_advantage.py has changed.*importlib\.reload"):
        megarlhf.run("rl", config("killed"))
    importlib.reload(sys.modules["own_advantage"])
    capfd.readouterr()
    again = megarlhf.run("rl", config("killed"))
    for name in ("reward_mean", "lowest_reward", "length_of_lowest", "policy_loss"):
        assert again.column(name)[1:] == pytest.approx(whole.column(name)[1:], rel=1e-4, abs=1e-6), name
    assert "advantage own_advantage:rank_in_group has another source" in capfd.readouterr().out.replace("\n", " ")


def test_the_own_loop(model, data, tmp_path, monkeypatch, capfd):
    words = ["--model", model, "--data", data["prompts"], "--run-dir", tmp_path / "loop", "rollout.engine=megatron"]
    monkeypatch.setattr(sys, "argv", ["own_loop.py", *map(str, words), "train.num_steps=2"])
    runpy.run_path(str(EXAMPLES / "own_loop.py"))
    result = megarlhf.RunResult.of(tmp_path / "loop")
    assert result.finished
    assert "step 2: " in capfd.readouterr().out
    assert len(result.column("right")) == 3
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) < 60


def test_the_notebook(model, data, tmp_path, monkeypatch):
    """As a script, without a display; its plot has both curves."""
    for name, value in {"MODEL": model, "DATA": data["sft"], "RUNS": tmp_path, "WORDS": "train.num_steps=3"}.items():
        monkeypatch.setenv(name, str(value))
    cells = runpy.run_path(str(EXAMPLES / "notebook.py"))
    assert cells["result"].steps == 3
    assert len(cells["answers"].read("responses.jsonl")) == 5
    page = (tmp_path / "loss.html").read_text()
    assert '"name":"loss"' in page
    assert '"name":"eval_loss"' in page
