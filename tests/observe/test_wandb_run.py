"""Weights & Biases: what is asked for, what is sent, and that it is never what ends a run.

With a stand-in that notes what it is called with; where the real package is installed (`pip install wandb`), also with
that, offline. Not covered: its server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from typing import Any

import pytest

from megarlhf.config import RunConfig, WandbConfig
from megarlhf.observe.records.metrics import MetricsWriter
from megarlhf.observe.records.wandb_run import WandbRun, require_wandb
from tests.refuses import missing_names, refuses

ROWS = [
    {"step": 1, "sample": 0, "prompt": "1+1=", "response": "<b>2", "length": 2, "finished": True, "reward": 2.0}
    | {"rewards": {"exact_match": 1.0, "judge": None}}
]


class StandIn(types.ModuleType):
    """The part of wandb's interface that is called."""

    class Error(Exception):
        pass

    def __init__(self, *, logged_in: bool = True, fails: str = "") -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []
        self._logged_in, self._fails = logged_in, fails

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert (prompt, verify) == (False, False)
        return self._logged_in

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def Table(self, **content: Any) -> dict[str, Any]:
        return {"table": content}

    def init(self, **options: Any) -> StandIn:
        if self._fails == "init":
            raise self.Error("no such entity")
        self.calls.append(("init", options))
        return self

    def define_metric(self, name: str, **options: Any) -> None:
        self.calls.append(("define_metric", name, options))

    def log(self, values: dict[str, Any]) -> None:
        if self._fails == "log":
            raise BrokenPipeError("the service is gone")
        self.calls.append(("log", values))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def wandb(monkeypatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_the_package_and_a_key_are_asked_for_before_anything_is_written(tmp_path, monkeypatch) -> None:
    online, offline = WandbConfig(project="mine"), WandbConfig(project="mine", mode="offline")
    monkeypatch.setitem(sys.modules, "wandb", StandIn(logged_in=False))
    with refuses("project 'mine'", "key", "`wandb login`", "WANDB_API_KEY", "run.wandb.mode=offline"):
        require_wandb(online)
    require_wandb(offline)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for cfg in (online, offline):
        with refuses("project 'mine'", "wandb is not installed", "pip install"):
            require_wandb(cfg)
        with refuses("wandb is not installed"):
            WandbRun(tmp_path / "run", cfg, {})
    assert not (tmp_path / "run").exists()


def test_names_and_steps_are_those_of_metrics_jsonl_and_a_resume_continues_the_run(tmp_path, wandb) -> None:
    cfg = WandbConfig(project="mine", entity="us", group="seeds", tags=("a",), mode="offline", timeout_seconds=7)
    for resume_step, step in ((None, 1), (0, 1)):  # step 1 is repeated after a kill
        with MetricsWriter(
            tmp_path, tensorboard=False, tracker=WandbRun(tmp_path, cfg, {"a": 1}), resume_step=resume_step
        ) as writer:
            writer.log_samples("samples/train", step, ROWS)
            writer.log(step, {"loss": 0.5, "kl": None, "wall_clock": 1.5e9})
    inits = [call[1] for call in wandb.calls if call[0] == "init"]
    assert inits[0] == inits[1], "the same id"
    assert inits[0]["id"] == (tmp_path / "wandb_id").read_text()
    assert inits[0] == {
        "project": "mine",
        "entity": "us",
        "name": tmp_path.name,
        "group": "seeds",
        "tags": ("a",),
        "mode": "offline",
        "dir": str(tmp_path),
        "id": inits[0]["id"],
        "resume": "allow",
        "config": {"a": 1},
        "allow_val_change": True,
        "settings": {"console": "off", "init_timeout": 7, "finish_timeout": 7},
    }
    once = [
        ("define_metric", "step", {}),
        ("define_metric", "*", {"step_metric": "step"}),
        ("log", {"step": 1, "samples/train": {"table": table_of_rows()}}),
        ("log", {"step": 1, "loss": 0.5, "wall_clock": 1.5e9}),
        ("finish",),
    ]
    assert [call for call in wandb.calls if call[0] != "init"] == once * 2


def table_of_rows() -> dict[str, Any]:
    columns = ["step", "sample", "prompt", "response", "length", "finished", "reward"]
    columns += ["reward/exact_match", "reward/judge"]
    data = [[1, 0, "1+1=", "<b>2", 2, True, 2.0, 1.0, None]]
    return {"columns": columns, "data": data, "allow_mixed_types": True}


def test_a_run_that_is_not_opened_is_refused_and_one_that_fails_later_is_left(tmp_path, monkeypatch, caplog) -> None:
    cfg = WandbConfig(project="mine")
    monkeypatch.setitem(sys.modules, "wandb", StandIn(fails="init"))
    with refuses("no such entity", "project", "run.wandb.mode=offline"):
        WandbRun(tmp_path, cfg, {})
    monkeypatch.setitem(sys.modules, "wandb", broken := StandIn(fails="log"))
    with MetricsWriter(tmp_path, tensorboard=False, tracker=WandbRun(tmp_path, cfg, {})) as writer:
        writer.log(1, {"loss": 0.5})
        writer.log(2, {"loss": 0.25})
    (record,) = caplog.records
    assert missing_names(record.getMessage(), "Weights & Biases", "the service is gone", "metrics.jsonl") == []
    assert ("finish",) not in broken.calls
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_older_key_and_keys_without_a_project_are_refused() -> None:
    with refuses("logger = wandb", "run.wandb={project: NAME}"):
        RunConfig.model_validate({"dir": "x", "logger": "wandb"})
    with refuses("tags", "mode", "project"):
        RunConfig.model_validate({"dir": "x", "wandb": {"mode": "offline", "tags": ["a"]}})
    with refuses("project"):
        WandbConfig(project="a/b")


SCRIPT = """
import sys
from pathlib import Path
from megarlhf.config import WandbConfig
from megarlhf.observe.records.metrics import MetricsWriter
from megarlhf.observe.records.wandb_run import WandbRun, require_wandb
run, resume = Path(sys.argv[1]), None if sys.argv[2] == "new" else int(sys.argv[2])
cfg = WandbConfig(project="mine", mode="offline")
require_wandb(cfg)
writer = MetricsWriter(run, tracker=WandbRun(run, cfg, {"train": {"num_steps": 3}}), resume_step=resume)
for step in range((resume or 0) + 1, 4):
    writer.log_samples("samples/train", step, __import__("json").loads(sys.argv[3]))
    writer.log(step, {"reward_mean": step / 2})
if resume is None:
    __import__("os").kill(__import__("os").getpid(), 9)
writer.close()
"""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_real_package_offline_after_a_kill(tmp_path) -> None:
    """Killed by SIGKILL and resumed: two files with one id, and the second is whole."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    for resume, status in (("new", -9), ("1", 0)):
        argv = [sys.executable, "-c", SCRIPT, str(tmp_path), resume, json.dumps(ROWS)]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
    run_id = (tmp_path / "wandb_id").read_text()
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert [run.name.rpartition("-")[2] for run in runs] == [run_id] * 2
    content = (runs[1] / f"run-{run_id}.wandb").read_bytes()
    assert content.count(b"reward_mean") >= 2
    assert b"samples/train" in content
    tables = [json.loads(path.read_text()) for path in sorted(runs[1].rglob("*.table.json"))]
    assert [table["columns"] for table in tables] == [table_of_rows()["columns"]] * 2
    assert tables[0]["data"] == table_of_rows()["data"]
