"""Progress with and without a terminal. Not covered: how the bar looks."""

import io

import pytest
from rich.console import Console

from megarlhf.observe.terminal.progress import Progress, format_duration, format_number, table
from tests.refuses import missing_names, refuses


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain_console():
    return Console(file=io.StringIO(), width=200, force_terminal=False)


def printed(console):
    return console.file.getvalue()


def test_without_a_terminal_one_line_every_interval_and_the_last():
    """A step every 10 s, a line every 30 s: steps 1, 4, 7, 10, and 11 because it is the last."""
    clock, console = Clock(), plain_console()
    with Progress("sft", 11, console=console, clock=clock, interval_seconds=30) as progress:
        for step in range(1, 12):
            clock.now += 10
            progress.step(step, {"loss": 1 / step})
    lines = printed(console).splitlines()
    assert [line.split()[1] for line in lines] == ["1/11", "4/11", "7/11", "10/11", "11/11"]
    assert not missing_names(lines[0], "sft", "9%", "elapsed 0:00:10", "left 0:01:40", "loss 1")
    assert not missing_names(lines[-1], "100%", "elapsed 0:01:50", "left 0:00:00", "loss 0.09091")


def test_time_left_counts_the_steps_of_this_process_only():
    """Resumed at 100 of 110; two steps took 20 s, so the other eight take 80 s."""
    clock, console = Clock(), plain_console()
    with Progress("rl", 110, start=100, console=console, clock=clock) as progress:
        clock.now += 20
        progress.step(102, {})
    assert not missing_names(printed(console), "rl 102/110", "elapsed 0:00:20", "left 0:01:20")


def test_metrics_are_chosen_in_order_and_evaluations_stay():
    clock, console = Clock(), plain_console()
    options = {"headline": ("reward_mean", "eval_accuracy"), "interval_seconds": 0.0}
    with Progress("rl", 2, console=console, clock=clock, **options) as progress:
        progress.step(1, {"eval_accuracy": 0.5, "unlisted": 3.0, "reward_mean": 0.1})
        progress.step(2, {"reward_mean": 0.2})
    first, second = printed(console).splitlines()
    assert first.endswith("reward_mean 0.1  eval_accuracy 0.5")
    assert second.endswith("reward_mean 0.2  eval_accuracy 0.5")


def test_other_ranks_are_silent(capsys):
    with Progress("sft", 1, enabled=False) as progress:
        progress.step(1, {"loss": 1.0})
        progress.note("saved")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_bar_with_step_total_and_metrics():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, force_interactive=True)
    with Progress("rm", 4, console=console) as progress:
        progress.step(4, {"pair_accuracy": 0.875})
        progress.note("saved [1/2] here")
    text = printed(console)
    assert "4/4" in text
    assert "pair_accuracy 0.875" in text
    assert "saved [1/2] here" in text  # brackets are text, not rich's markup


def test_the_live_bar_is_taken_down_when_the_run_fails():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)

    def fail():
        with Progress("rm", 4, console=console):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert printed(console).endswith("\x1b[?25h")  # the cursor is shown again


def test_table_shows_every_cell():
    console = plain_console()
    console.print(table("before and after", [("perplexity", 9.87654, None), ("[a]", 3, 0.25)], ("", "x", "y")))
    text = printed(console)
    for cell in ("before and after", "perplexity", "9.877", "-", "[a]", "0.25"):
        assert cell in text


def test_table_refuses_a_row_of_another_length():
    with refuses("1 cells", "expected 2"):
        table("t", [("a",)], ("x", "y"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (float("nan"), "nan"), (0, "0"), (0.0, "0"), (1234567, "1,234,567"), (3.14159, "3.142"),
        (1e-5, "1.00e-05"), (-0.25, "-0.25"), (54321.0, "54,321"), (1e9, "1.00e+09"),
        (1.02e-14, "~0"), (-1e-13, "~0"), (2e-12, "2.00e-12"),
    ],
)  # fmt: skip
def test_format_number(value, text):
    assert format_number(value) == text


def test_noise_beside_larger_numbers():
    assert [format_number(-4.64e-9, largest) for largest in (0.1, 1e-3)] == ["~0", "-4.64e-09"]


@pytest.mark.parametrize(("seconds", "text"), [(None, "-:--:--"), (59.6, "0:01:00"), (90061, "25:01:01")])
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


class FullDisk(io.StringIO):
    def flush(self):
        raise OSError(28, "No space left on device")


def test_output_to_a_full_disk_costs_a_line_and_not_the_run():
    with Progress("sft", 2, console=Console(file=FullDisk())) as progress:
        progress.note("nobody reads this")
        progress.step(2, {"loss": 1.0})
