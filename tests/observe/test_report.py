"""The report's figures and page. Not covered: how it looks (seen in a browser when it was written)."""

import errno
import json
import re
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest

from megarlhf.observe.records.metrics import MetricsWriter
from megarlhf.observe.report.chart_list import CHARTS, REWARD, Chart
from megarlhf.observe.report.charts import RecordedRun, charts_of, figure, kind_of
from megarlhf.observe.report.html_page import write_whole
from megarlhf.observe.report.page import render, write_report

RL_ROWS = [
    {
        "step": 1,
        "reward_mean": 0.0,
        "kl": 0.0,
        "eval_accuracy": 0.5,
        "seconds_rollout": 2.0,
        "seconds_train": 1.0,
    },
    {
        "step": 2,
        "reward_mean": 1.0,
        "kl": 0.1,
        "eval_accuracy": 0.75,
        "seconds_rollout": 2.0,
        "seconds_train": 1.0,
    },
    {"step": 3, "reward_mean": 2.0, "kl": None, "seconds_rollout": 2.0, "seconds_train": 1.0},
    {"step": 4, "reward_mean": 3.0, "kl": 0.3, "eval_accuracy": 0.25, "seconds_rollout": 4.0, "novel": 9.0},
]


def run_of(rows, name="run", config=None):
    return RecordedRun(name=name, kind=kind_of(rows), rows=rows, config=config)


def make_run_dir(path, rows, config=None):
    with MetricsWriter(path, tensorboard=False) as writer:
        for row in rows:
            writer.log(row["step"], {name: value for name, value in row.items() if name != "step"})
    if config is not None:
        (path / "config.yaml").write_text(config)
    return path


def figures_of(page):
    return json.loads(re.search(r"const FIGURES = (.*);\n", page).group(1))


def traces(page):
    return [trace["name"] for figure in figures_of(page) for trace in figure["data"]]


def test_only_a_report_is_replaced(tmp_path):
    run, notes, out = make_run_dir(tmp_path / "run", RL_ROWS), tmp_path / "notes.txt", tmp_path / "report.html"
    notes.write_text("mine")
    for taken in (notes, tmp_path / "run"):
        with pytest.raises(ValueError, match="is there and is no report of megarlhf; nothing is replaced"):
            write_report([run], taken, title="first")
    assert notes.read_text() == "mine"
    write_report([run], out, title="first")
    write_report([run], out, title="second")
    assert "<h1>second</h1>" in out.read_text()


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    out, tried = tmp_path / "page.html", []

    def full(source, target):
        tried.append(source.read_text())
        raise OSError(errno.ENOSPC, "no space left")

    write_whole(out, "first")
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(out, "second")
    assert tried == ["second"]
    assert out.read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"step": 1, "loss": 1.0, "eval_perplexity": 3.0}, "sft"),
        ({"step": 1, "loss": 1.0, "pair_accuracy": 0.5}, "rm"),
        ({"step": 1, "loss": 1.0, "pair_accuracy": 0.5, "reward_margin": 0.1}, "dpo"),
        ({"step": 1, "reward_mean": 1.0}, "rl"),
    ],
)
def test_kind_follows_from_the_metrics(row, kind):
    assert kind_of([{"step": 0, "seconds": 1.0}, row]) == kind


def test_reward_and_accuracy_on_two_axes_with_the_peak_marked():
    result = figure(REWARD, [run_of(RL_ROWS)])
    by_name = {trace["name"]: trace for trace in result["data"]}
    assert by_name["reward_mean"]["y"] == [0.0, 1.0, 2.0, 3.0]
    assert "yaxis" not in by_name["reward_mean"]
    assert (by_name["eval_accuracy"]["x"], by_name["eval_accuracy"]["y"]) == ([1, 2, 4], [0.5, 0.75, 0.25])
    assert by_name["eval_accuracy"]["yaxis"] == "y2"
    assert result["layout"]["yaxis2"]["side"] == "right"
    assert [shape["x0"] for shape in result["layout"]["shapes"]] == [2]
    assert result["layout"]["annotations"][0]["text"] == "best eval_accuracy 0.75, step 2"


def test_a_peak_at_the_end_is_not_marked():
    assert figure(REWARD, [run_of(RL_ROWS[:2])])["layout"].get("shapes", []) == []


def test_what_was_not_finite_is_a_gap_and_what_was_not_logged_is_none():
    (trace,) = figure(Chart(title="KL", metrics=("kl",)), [run_of(RL_ROWS)])["data"]
    assert (trace["x"], trace["y"]) == ([1, 2, 3, 4], [0.0, 0.1, None, 0.3])


def test_phases_are_stacked_for_one_run_and_averaged_for_several():
    chart = next(chart for chart in CHARTS["rl"] if chart.stacked)
    alone = figure(chart, [run_of(RL_ROWS)])
    assert [trace["stackgroup"] for trace in alone["data"]] == ["phases", "phases"]
    several = figure(chart, [run_of(RL_ROWS, "a"), run_of(RL_ROWS[:2], "b")])
    assert several["layout"]["barmode"] == "stack"
    rollout = next(trace for trace in several["data"] if trace["name"] == "seconds_rollout")
    assert (rollout["y"], rollout["x"]) == (["a", "b"], [2.5, 2.0])


def test_a_log_axis_only_when_every_value_is_positive():
    chart = Chart(title="gap", metrics=("gap",), log_if_positive=True)
    rows = [{"step": 1, "gap": 1e-6}, {"step": 2, "gap": 1e-3}]
    assert figure(chart, [run_of(rows)])["layout"]["yaxis"]["type"] == "log"
    assert "type" not in figure(chart, [run_of([*rows, {"step": 3, "gap": 0.0}])])["layout"]["yaxis"]


@pytest.mark.parametrize("num_runs", [1, 2])
def test_plotly_accepts_every_figure(num_runs):
    """graph_objects checks every property's name and value."""
    checked = 0
    for kind, charts in CHARTS.items():
        names = [name for chart in charts for name in chart.metrics + chart.right]
        rows = [{"step": step, **dict.fromkeys(names, float(step % 3 + 1))} for step in range(1, 6)]
        runs = [RecordedRun(name=f"run {index}", kind=kind, rows=rows, config=None) for index in range(num_runs)]
        for chart in charts:
            assert len(go.Figure(figure(chart, runs)).data) >= len(chart.metrics)
            checked += 1
    assert checked == sum(len(charts) for charts in CHARTS.values())


def test_no_metric_is_hidden():
    own, more = charts_of("rl", [run_of(RL_ROWS)])
    assert [chart.title for chart in more] == ["novel"]
    drawn = {name for chart in own + more for name in chart.metrics + chart.right}
    assert drawn >= {name for row in RL_ROWS for name in row} - {"step"}
    assert "novel" in traces(render([run_of(RL_ROWS)], title="t"))


class _Links(HTMLParser):
    """Collects what a browser would fetch, and how often each tag opens and closes."""

    def __init__(self):
        super().__init__()
        self.fetched, self.depth = [], {}

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        self.depth[tag] = self.depth.get(tag, 0) + 1

    def handle_endtag(self, tag):
        self.depth[tag] -= 1


def test_one_self_contained_file_from_run_directories(tmp_path):
    sft = [{"step": 1, "loss": 2.0, "eval_perplexity": 7.5}, {"step": 2, "loss": 1.0, "eval_perplexity": 2.5}]
    runs = [
        make_run_dir(tmp_path / "rl", RL_ROWS, "note: '</script><b>bold</b>'\n"),
        make_run_dir(tmp_path / "sft", sft),
    ]
    out = tmp_path / "deep" / "report.html"
    write_report(runs, out, title="A <title>")
    page = out.read_text()
    assert page.count("const FIGURES") == 1

    parser = _Links()
    parser.feed(page)
    assert parser.fetched == []
    assert {tag: depth for tag, depth in parser.depth.items() if depth} == {"meta": 2}
    assert parser.depth["table"] == 0

    assert "A &lt;title&gt;" in page
    assert "&lt;/script&gt;&lt;b&gt;bold" in page  # the configuration is text, not markup
    assert page.index("Supervised fine-tuning") < page.index("Reinforcement learning")
    assert "not finite: kl at 1 steps" in page
    assert '<td>eval_perplexity</td><td class="n">7.5</td><td class="n"><b>2.5</b></td>' in page
    assert '<td class="n">0.75</td><td class="n">2</td>' in page  # best eval_accuracy and its step
    assert "no config.yaml in the run directory" in page


def test_runs_of_one_kind_share_charts_and_equal_names_are_numbered(tmp_path):
    runs = [make_run_dir(tmp_path / part / "rl", RL_ROWS) for part in ("a", "b")]
    write_report(runs, tmp_path / "out.html", title="t")
    names = traces((tmp_path / "out.html").read_text())
    assert {"rl (1) · reward_mean", "rl (2) · reward_mean"} <= set(names)


def test_a_name_cannot_end_the_script():
    rows = [{"step": 1, "loss": 1.0, "</script>": 2.0}]
    page = render([run_of(rows)], title="t")
    assert "</script>" in traces(page)
    assert '"</script>"' not in page


def test_errors_say_what_to_give(tmp_path):
    with pytest.raises(ValueError, match="a report of no run"):
        write_report([], tmp_path / "out.html", title="t")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has not finished a step"):
        write_report([tmp_path], tmp_path / "out.html", title="t")
