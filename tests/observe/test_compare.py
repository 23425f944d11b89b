"""Several runs on one page: final figures with intervals, what configurations differ in, curves.

Not covered: how it looks.
"""

import json
from pathlib import Path

import pytest

from megarlhf.commands import cli
from megarlhf.observe.report.compare import (
    Comparison,
    Final,
    differing_keys,
    final_figures,
    intervals_of,
    keys_of_some_commands,
    write_comparison,
)
from megarlhf.observe.report.recorded_run import read_runs
from tests.observe.test_report import figures_of, make_run_dir, shown
from tests.refuses import missing_names, refuses

SFT = [{"step": 1, "loss": 2.0, "eval_loss": 3.0, "grad_norm": 1.0}, {"step": 2, "loss": 1.5, "eval_loss": None}]
OTHER = [{"step": 1, "loss": 2.5, "eval_loss": 2.5}, {"step": 3, "loss": 1.25, "eval_loss": 2.0, "test_loss": 2.1}]
RM = [{"step": 1, "loss": 0.5, "eval_pair_accuracy": 0.75, "wall_clock": 1.0}]


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    first = make_run_dir(
        tmp_path / "a" / "run", SFT, "run: {dir: a, seed: 0}\nactor: {optim: {lr: 0.1}}\nrewards: []\n"
    )
    other = make_run_dir(
        tmp_path / "b" / "run", OTHER, "run: {dir: b, seed: 1}\nactor: {optim: {lr: 0.1}}\nloss: <b>\n"
    )
    return [first, other, make_run_dir(tmp_path / "rm", RM)]


def test_final_figures_are_the_last_finite_values_and_losses_are_of_one_command(runs) -> None:
    rows = final_figures(read_runs(runs), [{}, {"eval_loss": (1.9, 2.1)}, {}])
    assert rows == [
        Comparison("eval_loss", "eval_loss", [Final(3.0, 1), Final(2.0, 3, (1.9, 2.1)), None]),
        Comparison("loss (sft)", "loss", [Final(1.5, 2), Final(1.25, 3), None]),
        Comparison("loss (rm)", "loss", [None, None, Final(0.5, 1)]),
        Comparison("test_loss", "test_loss", [None, Final(2.1, 3), None]),
        Comparison("eval_pair_accuracy", "eval_pair_accuracy", [None, None, Final(0.75, 1)]),
        Comparison("grad_norm", "grad_norm", [Final(1.0, 1), None, None]),
    ]
    assert [row.label for row in rows if row.is_shared] == ["eval_loss", "loss (sft)"]
    assert str(Final(2.0, 3, (1.9, 2.1))) == "2 [1.9, 2.1]"
    assert str(Final(1e-9, 3, largest=1.0)) == "~0"


def test_a_loss_of_dpo_is_compared_with_the_same_loss_only(tmp_path) -> None:
    rows = [{"step": 1, "loss": 0.5, "reward_margin": 1.0}]
    paths = [make_run_dir(tmp_path / name, rows, f"loss: {name}\n") for name in ("dpo", "ipo")]
    finals = final_figures(read_runs(paths), [{}, {}])
    assert [row.label for row in finals] == ["loss (dpo)", "loss (ipo)", "reward_margin"]


def test_intervals_are_those_that_the_run_has_written(runs) -> None:
    figures = {
        "eval_win_rate": {"value": 0.5, "low": 0.4, "high": 0.6},
        "num_prompts": {"value": 3, "low": None, "high": None},
    }
    (runs[0] / "eval.json").write_text(json.dumps({"figures": figures}))
    (runs[2] / "calibration.json").write_text(json.dumps({"accuracy_interval": [0.7, 0.8]}))
    assert intervals_of(runs[0]) == {"eval_win_rate": (0.4, 0.6)}
    assert intervals_of(runs[1]) == {}
    assert intervals_of(runs[2]) == {"eval_pair_accuracy": (0.7, 0.8)}
    (runs[1] / "eval.json").write_text("{")
    with refuses("eval.json"):
        intervals_of(runs[1])


def test_the_keys_that_differ(runs) -> None:
    assert differing_keys([run.config for run in read_runs(runs)]) == {
        "run.seed": ["0", "1", "-"], "actor.optim.lr": ["0.1", "0.1", "-"], "rewards": ["[]", "-", "-"],
        "loss": ["-", "<b>", "-"],
    }  # fmt: skip
    assert differing_keys(["run: {dir: a}", "run: {dir: b}"]) == {}
    sft, rm = "# megarlhf sft: the\nrun: {seed: 0}\nactor: 1\n", "# megarlhf rm: the\nrun: {seed: 1}\nreward_model: 1\n"
    assert differing_keys([sft, rm, None]) == {"run.seed": ["0", "1", "-"]}, "of different commands"
    other = sft.replace("actor: 1", "actor: 2")
    expected = {"run.seed": ["0", "0", "1"], "actor": ["1", "2", "-"]}
    assert differing_keys([sft, other, rm]) == expected, "of two runs beside another command"
    assert list(differing_keys([sft, sft.replace("actor", "critic")])) == ["actor", "critic"]
    assert keys_of_some_commands([sft, sft]) == {}
    expected = {"actor": ["1", "-", "-"], "reward_model": ["-", "1", "-"]}
    assert keys_of_some_commands([sft, rm, None]) == expected
    assert keys_of_some_commands([sft, other, rm]) == {"reward_model": ["-", "-", "1"]}


def test_a_path_alone_and_a_path_among_keys_are_one_key() -> None:
    short, long = "data: {train: a.jsonl, test: null}\n", "data: {train: {path: b.jsonl, share: 1}, test: {path: c}}\n"
    expected = {"data.train": ["a.jsonl", "b.jsonl"], "data.test": ["null", "c"], "data.train.share": ["-", "1"]}
    assert differing_keys([short, long]) == expected
    assert differing_keys([long, short]) == {key: row[::-1] for key, row in expected.items()}
    assert list(differing_keys([long, long.replace("b.", "d.")])) == ["data.train.path"]


def test_the_page_of_runs_of_different_commands(runs, tmp_path, capsys) -> None:
    out = tmp_path / "page.html"
    (runs[1] / "eval.json").write_text(json.dumps({"figures": {"eval_loss": {"low": 1.9, "high": 2.1}}}))
    assert cli.main(["compare", *map(str, runs), "-o", str(out), "--title", "A <title>"]) == 0
    page, printed = out.read_text(), capsys.readouterr().out
    parsed = shown(page)
    assert parsed.rows == [
        ["metric", "run (1)", "run (2)", "rm"], ["eval_loss", "3 step 1", "2 [1.9, 2.1] step 3", "-"],
        ["loss (sft)", "1.5 step 2", "1.25 step 3", "-"], ["loss (rm)", "-", "-", "0.5 step 1"],
        ["eval_pair_accuracy", "-", "-", "0.75 step 1"],
        ["metric", "run (1)", "run (2)", "rm"], ["test_loss", "-", "2.1 step 3", "-"],
        ["grad_norm", "1 step 1", "-", "-"], ["key", "run (1)", "run (2)", "rm"],
        ["run.seed", "0", "1", "-"], ["actor.optim.lr", "0.1", "0.1", "-"], ["rewards", "[]", "-", "-"],
        ["loss", "-", "<b>", "-"],
    ]  # fmt: skip
    assert "A <title>" in parsed.texts
    assert "More: 2 other metrics, which only one run has" in parsed.texts
    drawn = figures_of(page)
    names = [[trace["name"] for trace in each["data"]] for each in drawn]
    assert names == [
        ["run (1) · eval_loss", "run (2) · eval_loss"], ["run (1) · loss", "run (2) · loss"], ["rm · loss"],
        ["rm · eval_pair_accuracy"],
    ]  # fmt: skip
    colours = {trace["name"].split(" · ")[0]: trace["line"]["color"] for each in drawn for trace in each["data"]}
    assert len(set(colours.values())) == 3
    assert all(colours[t["meta"]["run"]] == t["line"]["color"] for each in drawn for t in each["data"])
    assert [each["layout"]["yaxis"]["title"]["text"] for each in drawn] == [
        "nats per response token", "nats per response token", "nats per pair", "share of pairs"
    ]  # fmt: skip
    for words in ("Losses of different commands measure different things", "On the page only: 2 metrics"):
        assert words in printed
    for word in ("eval_loss", "2 [1.9, 2.1]", "actor.optim.lr", f"wrote {out}"):
        assert word in printed
    write_comparison(runs[:2], out, title="again")
    assert "<h1>again</h1>" in out.read_text()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda runs, tmp: runs[:1], "megarlhf report"),
        (lambda runs, tmp: [runs[0], runs[0]], "2 times"),
        (lambda runs, tmp: [runs[0], tmp / "nowhere"], "nowhere"),
        (lambda runs, tmp: [make_run_dir(tmp / "c", [{"step": 1, "alone": 1.0}]), runs[0]], "metric"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, name, runs, tmp_path, capsys) -> None:
    out = tmp_path / "page.html"
    assert cli.main(["compare", *map(str, change(runs, tmp_path)), "-o", str(out)]) == 2
    message = capsys.readouterr().err
    assert missing_names(message, "megarlhf compare", name) == []
    assert "Traceback" not in message
    assert not out.exists()


def test_a_file_of_the_users_is_not_replaced(runs, tmp_path) -> None:
    (tmp_path / "mine.html").write_text("mine")
    with refuses("mine.html", "comparison", "-o FILE"):
        write_comparison(runs, tmp_path / "mine.html", title="t")
