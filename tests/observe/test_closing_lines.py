"""Last lines of a training run. Not covered: the sentence of the result (test_report.py)."""

import pytest

from megarlhf.observe.records.run_directory import CONFIG_HEADER
from megarlhf.observe.report.result import closing_lines
from tests.observe.test_report import make_run_dir


@pytest.mark.parametrize(("command", "export", "use"), [
    ("sft", "actor", "megarlhf generate --model"), ("rm", "reward_model", "reward_model.model.path="),
    ("sft", "actor_adapter", "actor.lora.path="), ("sft", None, None),
])  # fmt: skip
def test_the_end_of_a_run_tells_result_model_and_what_can_follow(tmp_path, command, export, use):
    rows = [{"step": 1, "loss": 3.0}, {"step": 4, "loss": 1.5}]
    run_dir = make_run_dir(tmp_path / "run", rows, CONFIG_HEADER.format(command=command) + "train: {num_steps: 4}\n")
    model = run_dir / "checkpoints" / "latest" / str(export)
    if export is not None:
        model.mkdir(parents=True)
    lines = closing_lines(run_dir)
    assert "from 3 to 1.5" in lines[0]
    assert f"megarlhf report {run_dir}" in lines[-1]
    if export is None:
        assert len(lines) == 2
    else:
        assert lines[1] == f"model: {model}"
        assert use + ("" if use.endswith("=") else " ") + str(model) in lines[2]
