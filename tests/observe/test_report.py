"""Figures and pages of reports. Not covered: how they look (seen in a browser when they were written)."""

import errno
import json
import re
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest

from megarlhf.observe.records.metrics import MetricsWriter
from megarlhf.observe.records.sample_tables import ShownTables
from megarlhf.observe.report.chart_list import CHARTS, REWARD, Chart
from megarlhf.observe.report.charts import Key, charts_of, draw, figure
from megarlhf.observe.report.html_page import write_whole
from megarlhf.observe.report.page import MAX_ROWS, report_page, write_report
from megarlhf.observe.report.recorded_run import RecordedRun, read_runs, run_kind
from megarlhf.observe.report.result import model_of, sentence
from tests.refuses import refuses

RL_ROWS = [
    {"step": 1, "reward_mean": 0.0, "kl": 0.0, "eval_accuracy": 0.5, "seconds_rollout": 2.0, "seconds_train": 1.0},
    {"step": 2, "reward_mean": 1.0, "kl": 0.1, "eval_accuracy": 0.75, "seconds_rollout": 2.0, "seconds_train": 1.0},
    {"step": 3, "reward_mean": 2.0, "kl": None, "seconds_rollout": 2.0, "seconds_train": 1.0},
    {"step": 4, "reward_mean": 3.0, "kl": 0.3, "eval_accuracy": 0.25, "seconds_rollout": 4.0, "novel": 9.0},
]
NASTY = '</script><script>alert("x")</script>'


def run_of(rows, name="run", config=None, kind=None, **tables):
    return RecordedRun(name=name, kind=kind or run_kind(rows), rows=rows, config=config, tables=ShownTables(**tables))


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


class Page(HTMLParser):
    """Rows of tables and other texts of a page, as a browser shows them; what it would fetch; open tags."""

    def __init__(self, page):
        super().__init__()
        self.fetched, self.depth, self.rows, self.texts, self.tags = [], {}, [], [], set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        self.depth[tag] = self.depth.get(tag, 0) + 1
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.depth[tag] -= 1

    def handle_data(self, data):
        if self.depth.get("script") or self.depth.get("style") or not data.strip():
            return
        if self.depth.get("td") or self.depth.get("th"):
            self.rows[-1][-1] = " ".join([*self.rows[-1][-1].split(), *data.split()])
        else:
            self.texts.append(" ".join(data.split()))


def shown(page):
    """The page, which is one self-contained file of well-formed HTML."""
    parsed = Page(page)
    assert parsed.fetched == []
    assert {tag: depth for tag, depth in parsed.depth.items() if depth} == {"meta": 2}
    assert parsed.depth["script"] == page.count("<script>") - 2 == 0
    return parsed


def test_only_a_report_is_replaced(tmp_path):
    run, notes, out = make_run_dir(tmp_path / "run", RL_ROWS), tmp_path / "notes.txt", tmp_path / "deep/report.html"
    notes.write_text("mine")
    for taken in (notes, tmp_path / "run"):
        with refuses(str(taken), "report", "-o FILE"):
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
    with refuses("no space left", error=OSError):
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
    assert run_kind([{"step": 0, "seconds": 1.0}, row]) == kind


def test_reward_and_accuracy_on_two_axes_and_a_value_that_is_not_finite_is_a_gap():
    result = figure(REWARD, [run_of(RL_ROWS)])
    by_name = {trace["name"]: trace for trace in result["data"]}
    assert by_name["reward_mean"]["y"] == [0.0, 1.0, 2.0, 3.0]
    assert "yaxis" not in by_name["reward_mean"]
    assert (by_name["eval_accuracy"]["x"], by_name["eval_accuracy"]["y"]) == ([1, 2, 4], [0.5, 0.75, 0.25])
    assert by_name["eval_accuracy"]["yaxis"] == "y2"
    assert result["layout"]["yaxis2"]["side"] == "right"
    assert [shape["x0"] for shape in result["layout"]["shapes"]] == [2]
    assert result["layout"]["annotations"][0]["text"] == "best eval_accuracy 0.75, step 2"
    for not_marked in ([run_of(RL_ROWS[:2])], [run_of(RL_ROWS)] * 2):  # the best step is the last; several runs
        assert "shapes" not in figure(REWARD, not_marked)["layout"]
    (kl,) = figure(Chart("KL", ("kl",)), [run_of(RL_ROWS)])["data"]
    assert (kl["x"], kl["y"]) == ([1, 2, 3, 4], [0.0, 0.1, None, 0.3])


def values_of(**metrics):
    """Rows of steps 1, 2, ... with these values."""
    rows = zip(*metrics.values(), strict=True)
    return [{"step": step, **dict(zip(metrics, row, strict=True))} for step, row in enumerate(rows, 1)]


LEARNED = "rewards: [{kind: model}, {kind: classifier}]"


def titles(layout):
    return {axis: layout[axis]["title"]["text"] for axis in ("yaxis", "yaxis2") if axis in layout}


def test_one_quantity_is_drawn_once_and_on_one_axis():
    """The held-out reward of `grpo` is its accuracy, rounded to fp32; that of `ppo` is not. A metric has the same axis
    for all runs. Zeros are no evidence."""
    grpo = run_of(values_of(reward_mean=[0.4, 0.6], eval_reward_mean=[0.5, 0.85833335], eval_accuracy=[0.5, 0.8583333]))
    ppo = run_of(
        values_of(reward_mean=[-1.0, 2.0], eval_reward_mean=[0.0, 1.0], eval_accuracy=[0.5, 0.9]), "ppo", LEARNED
    )
    alone = figure(REWARD, [grpo])
    assert [trace["name"] for trace in alone["data"]] == ["reward_mean", "eval_accuracy"]
    assert not any("yaxis" in trace for trace in alone["data"])
    assert titles(alone["layout"]) == {"yaxis": "share of right answers"}
    both = figure(REWARD, [grpo, ppo])
    axes = {trace["name"]: trace.get("yaxis", "y") for trace in both["data"]}
    assert axes == {
        "run · reward_mean": "y", "run · eval_accuracy": "y2",
        "ppo · reward_mean": "y", "ppo · eval_reward_mean": "y", "ppo · eval_accuracy": "y2",
    }  # fmt: skip
    assert titles(both["layout"]) == {"yaxis": "reward", "yaxis2": "share of right answers"}
    assert titles(figure(REWARD, [ppo])["layout"])["yaxis"] == "learned reward"
    with_rules = run_of(ppo.rows, config="rewards: [{kind: model}, {kind: rule}]")
    assert titles(figure(REWARD, [with_rules])["layout"])["yaxis"] == "reward"
    assert titles(figure(REWARD, [ppo, with_rules])["layout"])["yaxis"] == "reward"
    assert draw([], REWARD, [grpo, ppo]).remarks == ["eval_reward_mean is the same as eval_accuracy (run)"]
    zeros = run_of(values_of(reward_mean=[0.5, 0.5], eval_reward_mean=[0.0, 0.0], eval_accuracy=[0.0, 0.0]))
    assert "yaxis2" in figure(REWARD, [zeros])["layout"]


def test_a_legend_has_an_entry_for_each_run_and_each_metric():
    chart = Chart("gap", ("mean", "max", "absent"))
    runs = [run_of(values_of(mean=[1.0, 2.0], max=[2.0, 3.0]), name) for name in ("a", "b")]
    figures = []
    one, several = draw(figures, chart, runs[:1]), draw(figures, chart, runs)
    colours = [trace["marker"]["color"] for trace in figures[0]["data"]]
    assert list(one.keys) == [Key("metric", "mean", colours[0]), Key("metric", "max", colours[1])]
    assert [(key.part, key.name, key.dashes) for key in several.keys] == [
        ("run", "a", ""), ("run", "b", ""), ("metric", "mean", ""), ("metric", "max", "2 3")
    ]  # fmt: skip
    assert [key.name for key in draw(figures, Chart("mean", ("mean",)), runs).keys] == ["a", "b"]
    names = [(trace["meta"]["run"], trace["meta"]["metric"]) for trace in figures[1]["data"]]
    assert names == [("a", "mean"), ("a", "max"), ("b", "mean"), ("b", "max")]
    assert not any(drawn["layout"]["showlegend"] for drawn in figures)


@pytest.mark.parametrize(("num_steps", "dtick"), [(1, 1), (3, 1), (10, 1), (11, None)])
def test_ticks_are_at_whole_steps(num_steps, dtick):
    """From ten steps on plotly's own ticks are."""
    chart = figure(Chart("x", ("x",)), [run_of(values_of(x=[1.0] * num_steps))])
    assert chart["layout"]["xaxis"].get("dtick") == dtick


def test_phases_are_stacked_for_one_run_and_averaged_for_several():
    (chart,) = (chart for chart in CHARTS if chart.stacked)
    alone = figure(chart, [run_of(RL_ROWS)])
    assert [trace["stackgroup"] for trace in alone["data"]] == ["phases", "phases"]
    equal_parts = run_of(values_of(seconds_rollout=[1.0, 2.0], seconds_train=[1.0, 2.0]))
    assert len(figure(chart, [equal_parts])["data"]) == 2
    several = figure(chart, [run_of(RL_ROWS, "a"), run_of(RL_ROWS[:2], "b")])
    assert several["layout"]["barmode"] == "stack"
    rollout = next(trace for trace in several["data"] if trace["name"] == "seconds_rollout")
    assert (rollout["y"], rollout["x"]) == (["a", "b"], [2.5, 2.0])


def test_a_log_axis_only_when_every_value_is_positive():
    chart = Chart("gap", ("gap",), log_if_positive=True)
    rows = [{"step": 1, "gap": 1e-6}, {"step": 2, "gap": 1e-3}]
    assert figure(chart, [run_of(rows)])["layout"]["yaxis"]["type"] == "log"
    assert "type" not in figure(chart, [run_of([*rows, {"step": 3, "gap": 0.0}])])["layout"]["yaxis"]


@pytest.mark.parametrize("num_runs", [1, 2])
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_plotly_accepts_every_figure(chart, num_runs):
    """graph_objects checks every property's name and value."""
    names = chart.metrics + chart.right
    rows = [{"step": step, **{name: step + index for index, name in enumerate(names)}} for step in range(1, 6)]
    runs = [run_of(rows, f"run {index}") for index in range(num_runs)]
    assert len(go.Figure(figure(chart, runs)).data) == len(names) * (1 if chart.stacked else num_runs)


def test_every_axis_has_a_label():
    metrics = dict.fromkeys(name for chart in CHARTS for name in chart.metrics + chart.right)
    names = {name: 1.0 + index for index, name in enumerate(metrics)}
    for kind in ("sft", "rm", "dpo", "rl", "eval"):
        run = run_of([{"step": 1, **names, "novel": 1.0, "seconds_novel": 1.0}], kind=kind)
        listed, more = charts_of([run])
        assert {chart.title: chart.axis for chart in more}.items() >= {("novel", "novel"), ("seconds_novel", "seconds")}
        for chart in listed + more:
            for runs in ([run], [run, run]):
                layout = figure(chart, runs)["layout"]
                assert all(titles(layout).values()), chart.title
                assert layout["xaxis"]["title"]["text"], chart.title
                assert set(titles(layout)) == ({"yaxis", "yaxis2"} if chart.right else {"yaxis"}), chart.title


def test_no_metric_is_hidden():
    listed, more = charts_of([run_of(RL_ROWS)])
    assert [chart.title for chart in more] == ["novel"]
    drawn = {name for chart in listed + more for name in chart.metrics + chart.right}
    assert drawn >= {name for row in RL_ROWS for name in row} - {"step"}


def sample(number, step=1, **changes):
    row = {"step": step, "sample": number, "prompt": f"{number}+1=", "response": f"at {step}", "length": 2}
    return {**row, "finished": True, "reward": 0.5, "rewards": {"a": 1.0, "b": None}, **changes}


def test_what_a_report_shows(tmp_path):
    """Figures, warnings, charts, samples and configurations, in the order of training. Texts are no markup."""
    rl = make_run_dir(tmp_path / "rl", RL_ROWS, f"note: '{NASTY}'\n")
    sft = [{"step": 1, "loss": 2.0, "wall_clock": 0.0, "seconds": 60.0}, {"step": 2, "loss": 1.0, NASTY: 2.0}]
    (rl / "samples").mkdir()
    (rl / "checkpoints/latest/actor").mkdir(parents=True)
    for name, rows in {
        "eval_step_000000": [sample(0, 0), sample(7, 0)],
        "eval_step_000004": [sample(0, 4, response=NASTY, answer=NASTY), sample(1, 4)],
        "step_000004": [sample(0, 4)],
    }.items():
        (rl / f"samples/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(
        [rl, make_run_dir(tmp_path / "sft", sft)], tmp_path / "report.html", title="A <title>", first=["<i></i>"]
    )
    text = (tmp_path / "report.html").read_text()
    page = shown(text)
    rewards = "reward 0.5, a 1, b -, length 2, finished"
    of_rl = "Reinforcement learning, 4 steps, 0:00:13 in steps not finite: kl at 1 steps"
    facts = "Supervised fine-tuning, 2 steps, 0:01:00 in steps, 1970-01-01 00:00 to 1970-01-01 00:00 UTC"
    assert page.rows == [
        ["figure", "first", "last", "best", "at step"],
        [f"sft {facts}"],
        ["loss", "2", "1", "1", "2"],
        [f"rl {of_rl}"],
        ["reward_mean", "0", "3", "3", "4"],
        ["eval_accuracy", "0.5", "0.25", "0.75", "2"],
        ["kl", "0", "0.3", "-", "-"],
        ["prompt", "step 0", "step 4"],
        [f"0+1= answer: {NASTY}", f"at 0 {rewards}", f"{NASTY} {rewards}"],
        ["1+1=", "-", f"at 4 {rewards}"],
        ["prompt", "response"],
        ["0+1=", f"at 4 {rewards}"],
    ]
    for words in (
        "A <title>",
        f"note: '{NASTY}'",
        "Samples of training, step 4",
        "no config.yaml in the run directory",
        ": Training loss went from 2 to 1 from step 1 to 2 of SFT.",
        ": Right answers on held-out prompts went from 50.0% to 25.0% from step 1 to 4 of reinforcement learning.",
        f"Model: {rl / 'checkpoints/latest/actor'}",
    ):
        assert words in page.texts, words
    assert page.texts.index("Supervised fine-tuning") < page.texts.index("Reinforcement learning")
    assert {NASTY, "loss", "reward_mean", "eval_accuracy", "novel"} <= set(traces(text))


GAE = "algo: {advantage: gae, policy_loss: clip, ratio: token, scale_by_group_std: true}\n"
GRPO = GAE.replace("gae", "group_relative")


@pytest.mark.parametrize(
    ("config", "metrics", "expected"),
    [
        (GRPO, {"eval_accuracy": [0.52, None, 0.856], "eval_reward_mean": [1, 2, 3], "reward_mean": [0, 1, 2]},
         "Right answers on held-out prompts went from 52.0% to 85.6% in 2 steps of GRPO."),
        (GAE + LEARNED, {"eval_reward_mean": [-1.0, 0.5, 2.0], "reward_mean": [1, 2, 3], "loss": [1, 2, 3]},
         "Mean learned reward on held-out prompts went from -1 to 2 in 2 steps of PPO."),
        (GRPO.replace("clip", "cispo"), {"reward_mean": [2.13e-14, 0.2, 0.3], "loss": [1, 2, 3]},
         "Mean reward of the samples went from ~0 to 0.3 in 2 steps of reinforcement learning."),
        (None, {"loss": [3.0, 2.0, 1.0], "eval_loss": [4.0, 2.0, None]},
         "Held-out loss went from 4 to 2 from step 0 to 1, of 2 steps of SFT."),
        (None, {"loss": [3.0, 2.0, 1.0], "seconds": [1, 1, 1]}, "Training loss went from 3 to 1 in 2 steps of SFT."),
        (None, {"loss": [None, 2.0, None], "seconds": [1, 1, 1]}, "Training loss: 2 at step 1 of 2 of SFT."),
        (None, {"pair_accuracy": [1, 1, 1], "eval_pair_accuracy": [0.5, 0.7, 0.9]},
         "Held-out pairs ranked rightly went from 50.0% to 90.0% in 2 steps of reward-model training."),
        ("loss: ipo\n", {"eval_reward_margin": [0.0, 1.0, 2.0], "eval_pair_accuracy": [0.0, 0.7, 0.9]},
         "Held-out pairs ranked rightly went from 70.0% to 90.0% from step 1 to 2 of IPO."),
        (None, {"seconds": [1, 1, 1]}, ""),
    ],
)  # fmt: skip
def test_the_result_in_a_sentence(config, metrics, expected):
    """The first figure of merit that is logged. DPO's implicit rewards are 0 before the first step."""
    rows = [{**row, "step": row["step"] - 1} for row in values_of(**metrics)]
    assert sentence(run_of(rows, config=config)) == expected


def test_an_evaluation_is_no_training(tmp_path):
    """The configuration names the command; the metrics alone would look like supervised fine-tuning."""
    header = "# megarlhf eval: the resolved configuration of this run\n"
    directory = make_run_dir(tmp_path / "eval", [{"step": 1, "eval_accuracy": 0.75}], header)
    (directory / "checkpoints/latest/actor").mkdir(parents=True)
    (run,) = read_runs([directory])
    assert (run.kind, sentence(run), model_of(run)) == ("eval", "Right answers on held-out prompts: 75.0%.", None)
    (directory / "config.yaml").write_text(f"{header}a: [")
    (damaged,) = read_runs([directory])
    with refuses("config.yaml", "damaged"):
        sentence(damaged)


def test_rounding_noise_is_about_zero():
    rows = values_of(reward_mean=[1.0, 1.0], kl=[5.73e-9, 0.17], rollout_logprob_gap_max=[5.25e-6, 1.1e-5])
    cells = {row[0]: row[1:] for row in Page(report_page([run_of(rows)], title="t")).rows}
    assert cells["kl"] == ["~0", "0.17", "-", "-"]
    assert cells["rollout_logprob_gap_max"][:2] == ["5.25e-06", "1.10e-05"]


def test_runs_of_one_kind_share_charts_and_equal_names_are_numbered(tmp_path):
    runs = [make_run_dir(tmp_path / part / "rl", RL_ROWS) for part in ("a", "b")]
    write_report(runs, tmp_path / "out.html", title="t")
    names = traces((tmp_path / "out.html").read_text())
    assert {"rl (1) · reward_mean", "rl (2) · reward_mean"} <= set(names)


def test_a_report_with_many_samples_stays_small_and_one_without_has_no_section():
    long = "x" * 100_000
    rows = [sample(n, prompt=long, response=long, answer=long) for n in range(500)]
    plain = report_page([run_of(RL_ROWS)], title="t")
    page = report_page([run_of(RL_ROWS, evaluations={1: rows, 2: rows}, training={2: rows})], title="t")
    assert len(page) - len(plain) < 60 * MAX_ROWS * 200
    texts = [cell for row in Page(page).rows for cell in row if "[... 98800 characters ...]" in cell]
    assert len(texts) == MAX_ROWS * (3 + 2)
    assert ("<h2>Samples" in page, "<h2>Samples" in plain) == (True, False)


def test_errors_say_what_to_give(tmp_path):
    with refuses("run.dir"):
        write_report([], tmp_path / "out.html", title="t")
    (tmp_path / "metrics.jsonl").write_text("")
    with refuses(str(tmp_path), "metrics.jsonl", "step"):
        write_report([tmp_path], tmp_path / "out.html", title="t")
