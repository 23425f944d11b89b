"""A rehearsal's result on a terminal. Not covered: colours."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from megarlhf.rehearsal.report.console import print_result
from tests.refuses import missing_names
from tests.rehearsal.results import a_result, too_small

PLAIN = a_result(points=1)


def printed(result, width=140):
    console = Console(file=StringIO(), width=width)
    print_result(result, console)
    return console.file.getvalue()


def rows(text):
    """Cells of the lines of all tables."""
    return [
        [cell.strip() for cell in line.strip("│ ").split("│")] for line in text.splitlines() if line.startswith("│")
    ]


def test_the_verdict_comes_first_then_tables_and_what_is_left_out():
    text = printed(replace(PLAIN, notes=[f"note {number}" for number in range(9)]))
    assert not missing_names(text.splitlines()[0], "fits", "4.80 GiB")
    assert 40 < len(text.splitlines()) < 66
    found = rows(text)
    # Peaks before the first step, in step 1 and in step 2; cache, activations, engine's weights, parameters; seconds.
    assert ["reshard", "60.68", "60.80", "68.96", "22.50", "-", "16.40", "8.55", "2.5"] in found
    assert ["train/actor", "-", "42.36", "50.52", "-", "21.40", "-", "8.55", "96"] in found
    assert ["0", "stage 0 of all roles", "reshard in step 2", "68.96", "5.40", "74.36", "4.80"] in found
    assert ["2", "442", "8,123", "37.2%", "18.7%", "10.0%", "15.0%", "204", "166"] in found
    assert ["train/actor", "all_gather", "tp", "8", "inside a node", "4160", "540 GB"] in found
    names = ("estimates", "3 lower phases", "note 4", "4 others", "8 rehearsed ranks", "of 64", "16 numbers", "assumed")
    assert not missing_names(text, *names)
    assert "note 5" not in text


def test_a_run_that_does_not_fit():
    result = too_small(PLAIN, gib=74.0)
    text = printed(replace(result, refusals=["no room for [bold]weights[/bold]"], faults=["rank 0 waits for rank 8"]))
    first, second, third = text.splitlines()[:3]
    assert not missing_names(first, "not start", "1 reason")
    assert not missing_names(second, "1 fault")
    assert not missing_names(third, "not fit", "0.36 GiB", "4 of 8")
    assert "no room for [bold]weights[/bold]" in text  # no markup of rich's
    assert "rank 0 waits for rank 8" in text


@pytest.mark.parametrize("width", [80, 140])
def test_phases_are_not_cut_where_it_is_narrow(width):
    text = printed(PLAIN, width)
    assert max(map(len, text.splitlines())) <= width
    assert any(row[:1] == ["score/reward_model"] for row in rows(text))


def test_one_step_without_times_and_messages():
    ranks = [
        replace(rank, memory=[row for row in rank.memory if row.step < 2], peak_at=(1, "reshard"), messages=[])
        for rank in PLAIN.ranks
    ]
    text = printed(replace(PLAIN, ranks=ranks, times=[], rollouts=[], assumptions=[], notes=[]))
    assert ["reshard", "60.68", "60.80", "22.50", "-", "16.40", "8.55", "-"] in rows(text)
    assert "step 2" not in text
    assert "Largest messages" not in text
    assert "no step was replayed" in text
