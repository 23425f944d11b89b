"""What a run shows: tables of samples at TP2, PP2 and DP2, after a kill as without one, in the report; what each step
took; and the accuracy that the configured rule says. Not covered: the server of Weights & Biases.
"""

import html
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from megarlhf.commands.cli import main
from megarlhf.observe.records.cost_metrics import reproducible
from megarlhf.observe.records.jsonl import read_lines
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.records.sample_tables import read_table, steps_of
from megarlhf.observe.records.step_records import LENGTHS_FILE
from megarlhf.rehearsal.fakes.lengths import Given, parse_lengths
from tests.command import argv_of
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.test_rl_layouts import config as rl_config

Paths = dict[str, Path]
REWARDS = [
    {"kind": "model", "shift": 0.5},
    {"kind": "rule", "rule": "tests.distributed.user_rewards:short", "name": "short", "weight": 2.0},
]


def config(models: Paths, data: Paths, parallel: dict[str, Any]) -> dict[str, Any]:
    """GRPO of three steps; a reward model, and a rule that says 0, 1 or nothing."""
    made = rl_config({**models, "other": models["scorer"]}, data["prompts"], parallel, advantage="group_relative")
    del made["critic"]
    made["rewards"] = REWARDS
    made["data"]["validation"], made["eval"] = str(data["prompts"]), {"every": 2, "max_samples": 8, "accuracy": "short"}
    made["samples"] = {"every": 1, "count": 3}
    made["train"] |= {"num_steps": 3, "micro_batch_samples": 4, "epochs_per_step": 1}
    made["checkpoint"] = {"every_updates": 1, "every_minutes": 0, "background": False}
    return made


def command_line(folder: Path, cfg: dict[str, Any]) -> list[str]:
    folder.mkdir(exist_ok=True)
    return argv_of("rl", {**cfg, "run": {"dir": str(folder / "run")}}, folder / "cfg.yaml")


def tables(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((run / "samples").iterdir())}


@pytest.fixture(scope="module")
def whole(ranks, two_layers, data, tmp_path_factory) -> Path:
    """At TP2, and nothing happens to it."""
    folder = tmp_path_factory.mktemp("shown")
    ranks.run(2, "command", *command_line(folder, config(two_layers, data, {"tp": 2})))
    return folder / "run"


def test_each_evaluation_and_step_has_a_table_of_the_figures_that_are_logged(whole, data) -> None:
    """With as many rows as there are samples their means would be the metrics; of one row the parts add up."""
    assert list(tables(whole)) == [
        "eval_step_000000.jsonl", "eval_step_000002.jsonl", "eval_step_000003.jsonl",
        "step_000001.jsonl", "step_000002.jsonl", "step_000003.jsonl",
    ]  # fmt: skip
    records = [json.loads(line) for line in data["prompts"].read_text().splitlines()]
    for kind, samples in (("train", [0, 5, 10]), ("eval", [0, 2, 5])):
        for step in steps_of(whole, kind):
            rows = read_table(whole, kind, step)
            assert [row["sample"] for row in rows] == samples
            for row in rows:
                assert row["step"] == step
                assert {"prompt": row["prompt"], "answer": row["answer"]} in records
                said = row["rewards"]
                assert said.keys() == {"model", "short"}
                assert row["reward"] == pytest.approx(said["model"] - 0.5 + 2 * (said["short"] or 0), abs=1e-6)
                assert row["length"] <= 6
                assert row["finished"] or row["length"] == 6
        if kind == "eval":
            assert [row["prompt"] for row in rows] == [records[n]["prompt"] for n in samples]
    for kind, steps in (("train", (1, 2, 3)), ("eval", (0, 2, 3))):
        kls = [row["kl"] for step in steps for row in read_table(whole, kind, step)]
        assert kls[:3] == [0.0] * 3, "before the first update actor and reference are equal"
        assert all(kl != 0 for kl in kls[3:])


def test_a_killed_run_has_the_tables_of_one_that_was_not(ranks, whole, two_layers, data, tmp_path) -> None:
    """Cut off after the tables of step 2 and before a point has them; what it has left of that step is made unlike what
    is to come, and none of it may stay. The resumed step takes its samples from a point inside the step."""
    argv, run = command_line(tmp_path, config(two_layers, data, {"tp": 2})), tmp_path / "run"
    assert ranks.run(2, command_until, 2, "megarlhf.trainers.run.session:Session", "export", *argv)[0][0] == "killed"
    stale = [run / "samples" / name for name in ("step_000002.jsonl", "eval_step_000002.jsonl")]
    assert all(path.exists() for path in stale)
    assert [row["step"] for row in read_lines(run / LENGTHS_FILE)] == [1, 2]
    for path in (*stale, run / "samples/eval_step_000009.jsonl", run / "samples/.step_000002.jsonl.partial"):
        path.write_text('{"stale": true}\n')
    said = ranks.run(2, "command", *argv)[0]
    assert "from resume/step_000001_update_0001" in said
    assert tables(run) == tables(whole)
    assert (run / LENGTHS_FILE).read_bytes() == (whole / LENGTHS_FILE).read_bytes()
    assert [reproducible(row) for row in read_metrics(run)] == [reproducible(row) for row in read_metrics(whole)]
    for tag, steps in (("samples/train", [1, 2, 3]), ("samples/eval", [0, 2, 3])):
        texts = [events_of(each).Tensors(f"{tag}/text_summary") for each in (run, whole)]
        assert [event.step for event in texts[0]] == steps
        assert [event.tensor_proto.string_val for event in texts[0]] == [e.tensor_proto.string_val for e in texts[1]]


def test_the_lengths_of_all_samples_are_kept_as_a_rehearsal_reads_them(whole) -> None:
    """Four prompts and four responses to each, all in one table of samples' terms: its rows are some of them."""
    kept = read_lines(whole / LENGTHS_FILE)
    assert [row["step"] for row in kept] == [1, 2, 3]
    for row, logged in zip(kept, read_metrics(whole)[1:], strict=True):
        assert len(row["prompts"]) == len(row["responses"]) == 16
        assert all(row["prompts"][n : n + 4] == row["prompts"][n : n + 1] * 4 for n in range(0, 16, 4))
        assert sum(row["responses"]) / 16 == pytest.approx(logged["response_length_mean"])
        for sample in read_table(whole, "train", row["step"]):
            assert row["responses"][sample["sample"]] == sample["length"]
    drawn = parse_lengths(str(whole), "prompts")
    assert isinstance(drawn, Given)
    assert list(drawn.values) == [length for row in kept for length in row["prompts"]]


def events_of(run: Path) -> EventAccumulator:
    """As TensorBoard itself reads them: what a resumed run repeats is purged, texts too."""
    return EventAccumulator(str(run / "tensorboard"), tensor_size_guidance={}).Reload()


@pytest.mark.parametrize("parallel", [{"pp": 2}, {}], ids=["pp2", "dp2"])
def test_other_layouts_show_the_same(parallel, ranks, whole, two_layers, data, tmp_path) -> None:
    """Of the first step and the evaluation before it, whose weights are the same; numbers up to rounding."""
    argv = command_line(tmp_path, config(two_layers, data, parallel))
    ranks.run(2, "command", *argv, "train.num_steps=1", "train.micro_batch_samples=2")
    assert list(tables(tmp_path / "run")) == ["eval_step_000000.jsonl", "eval_step_000001.jsonl", "step_000001.jsonl"]
    for kind, step in (("eval", 0), ("train", 1)):
        for row, expected in zip(read_table(tmp_path / "run", kind, step), read_table(whole, kind, step), strict=True):
            for numbers in (row.pop("rewards"), row), (expected.pop("rewards"), expected):
                numbers[1]["model"] = numbers[0]["model"]
                numbers[1]["short"] = numbers[0]["short"] or 0.0
            texts = [name for name, value in row.items() if not isinstance(value, float)]
            assert {name: row[name] for name in texts} == {name: expected[name] for name in texts}
            for name in row.keys() - set(texts):
                assert row[name] == pytest.approx(expected[name], abs=1e-5), name


def test_what_a_step_took_is_logged(whole) -> None:
    """Tokens per second times seconds are the tokens: sampled ones, and prompts with responses of the one pass."""
    rows = read_metrics(whole)
    assert all(0.05 < row["peak_memory_gib"] < 50 for row in rows)
    assert all(later["wall_clock"] > earlier["wall_clock"] > 1.7e9 for earlier, later in itertools.pairwise(rows))
    for row in rows[1:]:
        assert row["rollout_tokens_per_second"] * row["seconds_rollout"] == pytest.approx(row["tokens"])
        trained = row["tokens_per_second"] * row["seconds_train"]
        assert trained == pytest.approx(round(trained))
        assert row["tokens"] < trained <= row["tokens"] + 16 * 16
    assert "tokens_per_second" not in rows[0]
    tags = events_of(whole).Tags()["tensors"]
    assert "peak_memory_gib" in tags
    assert "wall_clock" not in tags


def test_the_accuracy_is_what_the_configured_rule_says(ranks, whole, two_layers, data, tmp_path) -> None:
    """In rl, and in `eval` on what it has saved: the share of 1 among those of which the rule says anything; by a
    rule that is no reward, in `eval` too."""
    last = read_metrics(whole)[-1]
    prompts = [json.loads(line)["prompt"] for line in data["prompts"].read_text().splitlines()][:8]
    assert last["eval_accuracy_none"] == sum("7" in prompt for prompt in prompts) > 0
    tree: dict[str, Any] = {
        "actor": {"model": {"path": str(whole / "checkpoints/latest/actor")}, "parallel": {"tp": 2}},
        "data": {"train": str(data["prompts"]), "max_prompt_tokens": 16},
        "rollout": {"engine": "megatron", "max_response_tokens": 6},
        "rewards": [{**REWARDS[1], "weight": 1.0}],
        "max_samples": 8,
    }
    found = {}
    for name, accuracy in (("by_reward", "short"), ("by_rule", "exact_match")):
        tree |= {"run": {"dir": str(tmp_path / name)}, "eval": {"accuracy": accuracy}}
        ranks.run(2, "command", *argv_of("eval", tree, tmp_path / "eval.yaml"))
        (found[name],) = read_metrics(tmp_path / name)
    for name in ("eval_accuracy", "eval_accuracy_none"):
        assert found["by_reward"][name] == last[name], name
    assert found["by_reward"]["eval_accuracy"] == found["by_reward"]["eval_short"]
    assert found["by_reward"]["eval_short_none"] == last["eval_accuracy_none"]
    assert (found["by_rule"]["eval_accuracy"], found["by_rule"]["eval_accuracy_none"]) == (0.0, 0)
    assert found["by_rule"]["eval_exact_match"] == 0.0


def test_a_report_shows_the_tables(whole, tmp_path) -> None:
    assert main(["report", str(whole), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<th>step ") >= 3
    for step in (0, 2, 3):
        for row in read_table(whole, "eval", step):
            assert f"<pre>{html.escape(row['response'])}</pre>" in page
    assert "step 3" in page
