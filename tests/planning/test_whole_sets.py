"""What a dry run finds behind the first rows of a set, and what it says that it did not look at."""

import json

import pytest

from megarlhf.data.tokenize.cache import VARIABLE
from megarlhf.planning.data import whole_sets
from megarlhf.planning.preflight import preflight
from tests.planning.configs import sft
from tests.refuses import missing_names, refuses

GOOD = {"prompt": "1+1=", "response": "2"}


def checked(paths, rows, **data):
    (paths["root"] / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"max_prompt_tokens": 16, "max_response_tokens": 8}
    cfg = sft({**paths, "train": data.pop("train", paths["root"] / "rows.jsonl")}, **{**limits, **data})
    run = cfg.run.model_copy(update={"dir": paths["root"] / "run"})
    return preflight("sft", cfg.model_copy(update={"run": run}), 1, all_records=True).notes


@pytest.mark.parametrize("row, names", [
    ({"prompt": "1+1=", "response": None}, "field 'response'|null"),
    ({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}, "texts|conversations"),
    ({**GOOD, "images": ["x.png"]}, "'images'"),
])  # fmt: skip
def test_a_row_behind_the_first_ones_is_refused(paths, row, names):
    with refuses("data.train", "rows.jsonl, line 101", *names.split("|")):
        checked(paths, [GOOD] * 100 + [row])


def test_all_records_are_counted_and_too_many_skipped_are_refused(paths):
    rows = [GOOD] * 80 + [{"prompt": "1" * 50, "response": "2"}] * 20
    with refuses("20 of 100 records", "20 %", "data.max_skipped = 0.1", "10 %", "data.max_skipped=0.2"):
        checked(paths, rows)
    notes = checked(paths, rows, max_skipped=0.2)
    assert any(not missing_names(note, "data.train", "all records", "WARNING", "20 %") for note in notes)
    assert not (paths["root"] / "run").exists()


def test_rows_that_an_adapter_leaves_out_are_not_skipped(paths, monkeypatch):
    (paths["root"] / "leaves_out.py").write_text("def most(row):\n    return row if row['prompt'] != 'no' else None\n")
    monkeypatch.syspath_prepend(str(paths["root"]))
    rows = [GOOD] * 20 + [{**GOOD, "prompt": "no"}] * 80
    source = {"path": paths["root"] / "rows.jsonl", "adapter": "leaves_out:most"}
    (note,) = (each for each in checked(paths, rows, train=source) if "all records" in each)
    assert not missing_names(note, "80 of 100 records", "adapter leaves_out:most: 80")


def test_a_large_set_is_not_read_and_that_is_said(paths, monkeypatch):
    monkeypatch.setattr(whole_sets, "WHOLE_MIB", 0.001)
    notes = checked(paths, [GOOD] * 100 + [{"prompt": "1", "response": None}])
    assert any(not missing_names(note, "0.001 MiB", "first records") for note in notes)


def test_nothing_is_kept_in_the_run_directory(paths, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(paths["root"] / "cache"))
    checked(paths, [GOOD] * 100, cache="none")
    assert not (paths["root"] / "cache").exists()
    assert not (paths["root"] / "run").exists()
    checked(paths, [GOOD] * 100)
    assert list((paths["root"] / "cache").glob("*/MANIFEST.json")), "kept for the run"


def test_what_does_not_fit_the_model_is_refused(paths):
    """Its positions are 64."""
    with refuses("takes 64", "max_position_embeddings"):
        checked(paths, [GOOD] * 100 + [{"prompt": "1" * 80, "response": "2"}], max_prompt_tokens=99)
