"""metrics.jsonl: what stands in it, and what a resume leaves. Weights & Biases: test_wandb_run.py."""

import resource
import threading
import time

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarlhf.observe.records.metrics import MetricsWriter, read_metrics
from tests.refuses import missing_names, refuses


def lines(run_dir):
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def write_steps(run_dir, steps, **options):
    with MetricsWriter(run_dir, tensorboard=False, **options) as writer:
        for step in steps:
            writer.log(step, {"loss": step / 2})


def test_a_line_a_step_step_first_names_sorted_nan_and_infinity_null(tmp_path):
    writer = MetricsWriter(tmp_path / "new", tensorboard=False)
    writer.log(1, {"loss": 0.5, "grad_norm": float("nan"), "tokens": 7, "kl": None})
    # flushed: a reader sees the line before the writer is closed
    assert lines(tmp_path / "new") == ['{"step": 1, "grad_norm": null, "kl": null, "loss": 0.5, "tokens": 7}']
    values = {"loss": float("-inf"), "tokens": np.int64(8), "kl": np.float32(0.25), "eval_loss": np.float64("nan")}
    writer.log(2, values)
    writer.close()
    assert lines(tmp_path / "new")[1] == '{"step": 2, "eval_loss": null, "kl": 0.25, "loss": null, "tokens": 8}'
    assert read_metrics(tmp_path / "new")[1] == {"step": 2, "eval_loss": None, "kl": 0.25, "loss": None, "tokens": 8}


@pytest.mark.parametrize(
    ("step", "metrics", "names"),
    [
        (3, {"loss": 1.0}, ("step 3", "resume_step")),
        (2, {"loss": 1.0}, ("step 2", "step 3", "resume_step")),
        (4, {"loss": torch.tensor(1.0)}, ("metric loss", "Tensor", ".item()")),
        (4, {"loss": "1.0"}, ("metric loss", "str")),
        (4, {"step": 4}, ("metric", "`step`")),
    ],
)
def test_what_cannot_be_logged_is_refused_and_leaves_no_line(tmp_path, step, metrics, names):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.log(3, {"loss": 1.0})
        with refuses(*names):
            writer.log(step, metrics)
    assert [row["step"] for row in read_metrics(tmp_path)] == [3]


def test_resume_cuts_later_steps_and_the_torn_last_line(tmp_path):
    write_steps(tmp_path, [1, 2, 3, 4])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    kept = lines(tmp_path)[:2]

    write_steps(tmp_path, [3, 4], resume_step=2)
    assert lines(tmp_path)[:2] == kept
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_torn_line_of_the_resumed_step_itself_is_dropped_too(tmp_path):
    write_steps(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 1.0}')  # complete JSON, but the newline never came
    write_steps(tmp_path, [3], resume_step=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    write_steps(tmp_path, [1, 2, 3])
    first, _, third = lines(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(f"{first}\n%%%\n{third}\n")
    with refuses("metrics.jsonl, line 2", "b'%%%'"):
        read_metrics(tmp_path)
    with refuses("line 2"):
        MetricsWriter(tmp_path, tensorboard=False, resume_step=3)


def test_a_new_record_never_touches_an_earlier_one(tmp_path):
    write_steps(tmp_path, [1, 2])
    before = lines(tmp_path)
    with refuses("metrics.jsonl", "earlier run"):
        write_steps(tmp_path, [1])
    assert lines(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_after_a_resume_steps_continue_behind_it(tmp_path):
    write_steps(tmp_path, [1, 2])
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=2) as writer, refuses("step 2", "resume_step"):
        writer.log(2, {"loss": 1.0})


def test_tensorboard_gets_the_finite_scalars(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"loss": 0.5, "kl": float("nan")})
        writer.log(2, {"loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path, monkeypatch, caplog):
    """Two of four steps meet a limit of the size of a file, in the middle of a line: no line and no event is lost."""
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # TensorBoard's thread dies of it
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"loss": 1.0})
        time.sleep(1.01)  # names of events' files have seconds, and are read in the order of their names
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, limits[1]))
            writer.log(2, {"loss": 2.0})
            assert lines(tmp_path)[1] == '{"ste'
            writer.log(3, {"loss": 3.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        time.sleep(1.01)
        writer.log(4, {"loss": 4.0})
    said = [record.getMessage() for record in caplog.records]
    assert sum("metrics.jsonl" in message and "bytes" in message for message in said) == 2
    assert sum("TensorBoard" in message for message in said) == 2
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(n, float(n)) for n in (1, 2, 3, 4)]


def test_tensorboard_after_a_resume_shows_only_the_second_attempt(tmp_path):
    for resume_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        with MetricsWriter(tmp_path, resume_step=resume_step) as writer:
            for step in steps:
                writer.log(step, {"loss": step if resume_step is None else -step})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, -2.0)]


def test_reading_a_directory_without_metrics_says_so(tmp_path):
    with refuses("no metrics.jsonl", str(tmp_path), "run.dir"):
        read_metrics(tmp_path)


def test_a_hole_in_the_record_is_said(tmp_path, caplog):
    """Lines that a machine took with it, of steps that a resume point has."""
    write_steps(tmp_path, range(3))
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=2):
        assert "lines are lost" not in caplog.text
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=4):
        assert missing_names(caplog.text, "step 2", "step 4", "lines are lost") == []
