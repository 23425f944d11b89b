"""The scripts of examples/ on a tiny model, as far as they import megarlhf only."""

import runpy
import sys
from pathlib import Path

import megarlhf

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_own_loop(model, data, tmp_path, monkeypatch, capsys):
    words = ["--model", model, "--data", data["prompts"], "--run-dir", tmp_path / "loop", "rollout.engine=megatron"]
    monkeypatch.setattr(sys, "argv", ["own_loop.py", *map(str, words), "train.num_steps=2"])
    runpy.run_path(str(EXAMPLES / "own_loop.py"))
    result = megarlhf.RunResult.of(tmp_path / "loop")
    assert result.finished
    assert "step 2: " in capsys.readouterr().out
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
