"""Recording steps of one rank: where a recording begins and ends, and what a start that cannot record says.

Not covered: what torch itself writes on a GPU; a whole run (tests/distributed/test_profile.py).
"""

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.config import ProfileConfig
from megarlhf.observe.watch import profile as recording
from megarlhf.observe.watch.phases import OpenPhase, Phases
from megarlhf.observe.watch.profile import CURVE, FOLDER, ProfileRecorder, memory_curve
from megarlhf.runtime import Runtime
from tests.refuses import missing_names


class Told:
    """Observer and sharing of a run without a recorder."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def entered(self, phase: OpenPhase) -> None:
        self.events.append(f"into {phase.name}")

    def left(self, phase: OpenPhase, failure: BaseException | None) -> None:
        self.events.append(f"out of {phase.name}" + (" by an error" if failure else ""))

    def end_step(self, step: int, local_seconds: Any) -> Exception | None:
        self.events.append(f"end {step}")
        return KeyError(step)


@pytest.fixture
def phases() -> Phases:
    made = Phases()
    made.observer = made.sharing = Told()
    return made


def recorder(phases: Phases, run_dir: Path, **keys: Any) -> ProfileRecorder:
    runtime = Runtime(device=torch.device("cpu"), backend="gloo")
    made = ProfileRecorder(ProfileConfig.model_validate(keys), phases, run_dir / FOLDER, runtime)
    phases.observer = phases.sharing = made
    return made


def make_step(phases: Phases, step: int) -> None:
    """Outer and inner phase, each with an operation of its own; and a phase between this step and the next one."""
    phases.begin_step(step)
    with phases("rollout"):
        torch.ones(3).sin()
        with phases("train/actor"):
            torch.ones(1000).cos()
    phases.end_step(step)
    with phases("checkpoint"):
        torch.ones(3).exp()


def ranges(trace: dict[str, Any]) -> dict[str, set[str]]:
    """Operations of torch that lie inside each range, by its name; each name once."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    named = [event for event in events if event.get("cat") == "user_annotation"]
    assert len({event["name"] for event in named}) == len(named)
    return {
        outer["name"]: {each["name"] for each in operations if outer["ts"] <= each["ts"] <= outer["ts"] + outer["dur"]}
        for outer in named
    }


def test_a_trace_is_of_its_step_and_phases_stand_inside_each_other(phases, tmp_path) -> None:
    told, made = phases.observer, recorder(phases, tmp_path, steps=[2], memory_snapshot=2)
    with phases("build"):
        torch.ones(3).tan()
    for step in (1, 2, 3):
        make_step(phases, step)
    made.close()
    trace = json.loads((tmp_path / FOLDER / "step_000002_rank_00000.trace.json").read_text())
    within = ranges(trace)
    assert within.keys() == {"rollout", "train/actor"}
    assert {"aten::sin", "aten::cos"} <= within["rollout"]
    assert "aten::cos" in within["train/actor"]
    assert "aten::sin" not in within["train/actor"]
    operations = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert operations.count("aten::cos") == 1, "of one step only"
    assert {"aten::exp", "aten::tan"}.isdisjoint(operations), "of no phase between steps"
    assert isinstance(told, Told)
    assert told.events[:2] == ["into build", "out of build"]
    plain = ["into rollout", "into train/actor", "out of train/actor", "out of rollout"]
    saving = ["into checkpoint", "out of checkpoint"]
    steps = [[*plain, *(saving if step == 2 else []), f"end {step}", *saving] for step in (1, 2, 3)]
    assert told.events[2:] == [event for step in steps for event in step]
    assert isinstance(phases._failure, KeyError), "what the ranks have told each other comes through"
    curve = json.loads((tmp_path / FOLDER / "step_000002_rank_00000.memory.json").read_text())
    held = [event["args"]["bytes"] for event in curve["traceEvents"] if event.get("name") == CURVE]
    assert max(held) >= 4000, "the thousand cosines"
    assert held[-1] == 0, "all of it was freed"
    assert {"rollout", "train/actor"} <= {event.get("name") for event in curve["traceEvents"]}
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [
        "step_000002_rank_00000.memory.json",
        "step_000002_rank_00000.trace.json",
    ]


def test_a_step_that_is_left_by_an_error_is_not_written(phases, tmp_path, caplog) -> None:
    """And torch's profiler is free for the next run in this process."""
    made = recorder(phases, tmp_path, steps=[1, 7])
    phases.begin_step(1)
    with pytest.raises(ZeroDivisionError), phases("rollout"), phases("train/actor"):
        raise ZeroDivisionError
    made.close()
    assert not (tmp_path / FOLDER).exists()
    assert missing_names(caplog.messages[0], "profile", "step 1, 7") == []
    make_step(phases, 1)
    second = recorder(phases, tmp_path, memory_snapshot=1)
    make_step(phases, 1)
    second.close()
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step_000001_rank_00000.memory.json"]


def test_a_folder_that_cannot_be_written_ends_no_run(phases, tmp_path, caplog) -> None:
    (tmp_path / FOLDER).write_text("a file")
    recorder(phases, tmp_path, steps=[1])
    with caplog.at_level(logging.WARNING):
        make_step(phases, 1)
    assert missing_names(caplog.messages[0], "profile", "step_000001_rank_00000") == []
    assert (tmp_path / FOLDER).read_text() == "a file"


def test_a_gpu_s_snapshot_is_of_its_step(phases, tmp_path, monkeypatch) -> None:
    """With a pretended GPU: the allocator records from the step's first phase to its end. torch's functions, private
    ones, still take what they are given."""
    seen: list[str] = []
    monkeypatch.setattr(recording, "synchronize", lambda device: seen.append("wait"))
    monkeypatch.setattr(recording, "record_allocations", lambda device: seen.append("record"))
    monkeypatch.setattr(recording, "write_allocations", lambda device, path: seen.append("write") or path.touch())
    made = ProfileRecorder(
        ProfileConfig(memory_snapshot=2), phases, tmp_path / FOLDER,
        Runtime(device=torch.device("cuda"), backend="nccl"),
    )  # fmt: skip
    phases.observer = phases.sharing = made
    for step, said in ((1, []), (2, ["wait", "record", "wait", "write"]), (3, [])):
        make_step(phases, step)
        assert seen == said, step
        seen.clear()
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step_000002_rank_00000.memory.pickle"]
    history, snapshot = torch.cuda.memory._record_memory_history, torch.cuda.memory._dump_snapshot
    inspect.signature(history).bind(stacks="python", device=torch.device("cuda"))
    inspect.signature(history).bind(enabled=None, device=torch.device("cuda"))
    inspect.signature(snapshot).bind("a path")


def test_the_curve_of_memory_by_hand() -> None:
    """In the order of time: +8, +2, -8, of which the trace lists the last first."""
    at = {"pid": 1, "tid": 2, "cat": "cpu_instant_event", "name": "[memory]"}
    memory = [{**at, "ts": ts, "args": {"Bytes": size}} for ts, size in ((3.0, -8), (1.0, 8), (2.0, 2))]
    others = [{"ph": "M", "name": "process_name"}, {"cat": "user_annotation", "name": "rollout", "ts": 0.5}]
    operation = {"cat": "cpu_op", "name": "aten::sin", "ts": 0.7}
    curve = memory_curve({"schemaVersion": 1, "traceEvents": [*memory, *others, operation]})
    assert curve["schemaVersion"] == 1
    assert curve["traceEvents"][:2] == others
    assert [(each["ts"], each["args"]["bytes"]) for each in curve["traceEvents"][2:]] == [(1.0, 8), (2.0, 10), (3.0, 2)]


def test_which_ranks_record() -> None:
    chosen = ProfileConfig(steps=(3,), memory_snapshot=5, ranks=(1,))
    assert chosen.recorded == {3, 5}
    assert [chosen.records_on(rank) for rank in range(3)] == [False, True, False]
    assert ProfileConfig(memory_snapshot=5).records_on(7)
    assert not ProfileConfig(ranks=(1,)).records_on(1), "nothing to record"
