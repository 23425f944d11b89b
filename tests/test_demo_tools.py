"""The tools demo: its task, its stages on fake runs, and the page. `-m slow` runs all of it on a tiny model.

Not covered: that the real model learns (`make demo-tools-seeds`).
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from megarlhf.commands.cli import COMMANDS
from megarlhf.config import load_config
from megarlhf.observe.records.run_directory import FINISHED_FILE
from megarlhf.rollout.tools.described import describe_function
from tests.chat_model import write_chat_model
from tests.refuses import missing_names, refuses
from tools.demo_tools import run as demo_run
from tools.demo_tools import seeds as demo_seeds
from tools.demo_tools import weather
from tools.demo_tools.figures import REWARD, conversations, figures, shown
from tools.demo_tools.run import MODELS, Demo
from tools.demo_tools.tables import PAGE, filled, of_models, places_of


def test_no_city_is_in_two_files():
    """Also with another seed, which divides them otherwise; the example's city is in none."""
    for seed in (0, 1):
        parts = [set(weather.cities_of(name, seed)) for name in weather.SHARES]
        assert sum(map(len, parts)) == len(set.union(*parts)) >= len(weather.CITIES) - 2
        assert weather.SHOWN not in set.union(*parts)
    assert weather.cities_of("test", 0) != weather.cities_of("test", 1)


def test_records_end_with_a_question_and_give_its_answer():
    for record in weather.records("test", 96, 5):
        asked = record["messages"][-1]["content"]
        (city,) = [city for city in weather.CITIES if city in asked]
        values = {str(weather.weather(city, quantity)) for quantity in weather.QUESTIONS}
        assert record["answer"] in values
        assert city in weather.cities_of("test", 5)
        assert record["messages"][2]["content"] in record["messages"][3]["content"]


def test_values_cannot_be_guessed():
    """Two digits, none of them frequent; white space and case of the city do not count."""
    assert weather.weather(" oSLO ", "wind") == weather.weather("Oslo", "wind")
    values = [weather.weather(city, quantity) for city in weather.CITIES for quantity in weather.QUESTIONS]
    assert 10 <= min(values) <= max(values) <= 99
    assert max(map(values.count, values)) / len(values) < 0.05


def test_files_that_are_there_stay(tmp_path):
    """A start that goes on has the data of the first one, and the same records come from the same seed."""
    weather.write(tmp_path, 5, {"test": 3})
    assert [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()] == weather.records(
        "test", 3, 5
    )
    (tmp_path / "test.jsonl").write_text("mine")
    weather.write(tmp_path, 5, {"test": 3, "train": 2})
    assert (tmp_path / "test.jsonl").read_text() == "mine"
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 2


def test_the_tool_is_described():
    function = describe_function("tools.demo_tools.weather:weather")["function"]
    assert function["parameters"]["properties"]["quantity"]["enum"] == list(weather.QUESTIONS)


ASKED = [{"role": "user", "content": "old"}, {"role": "tool", "content": "48"}, {"role": "user", "content": "How?"}]


@pytest.mark.parametrize("response, results, reward", [
    ("It is 48.", ["48"], 1.0),
    ("48", [], 1.0),
    ("It is 48 or 49.", ["48"], 0.5),
    ("No idea.", ["error: x", "48"], 0.5),
    ("It is 47.", ["47"], 0.2),
    ("It is 47.", ["error: there is no tool 48"], 0.0),
    ("It is 47.", [], 0.0),
])  # fmt: skip
def test_rewards(response, results, reward):
    """Results of the prompt's own example do not count."""
    messages = [*ASKED, *({"role": "tool", "content": result} for result in results)]
    assert weather.reward(response, {"answer": "48"}, messages) == reward


def spoken(question: str, said: str, result: str | None, reward: float) -> str:
    example = weather.example(weather.SHOWN, "temperature")
    example[1] = {"role": "assistant", "content": "<tool_call>"}
    messages = [*example, {"role": "user", "content": question}]
    messages += [{"role": "assistant", "content": "<call>"}, {"role": "tool", "content": result}] if result else []
    messages.append({"role": "assistant", "content": said})
    row = {"messages": messages, "answer": "48", "rewards": {REWARD: reward}, "ended_by": "model"}
    return json.dumps(row) + "\n"


class FakeRuns:
    """Runs that leave what a stage leaves."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []
        self.fails = ""

    def __call__(self, command: Sequence[str]) -> int:
        self.commands.append(command)
        folder = Path(next(each.partition("=")[2] for each in command if each.startswith("run.dir=")))
        folder.mkdir(parents=True, exist_ok=True)
        if folder.name == self.fails:
            return 3
        learnt = folder.name == "test-grpo"
        rows = [
            spoken(f"How <b> {n}?", "It is 48.", "48", 1.0 if learnt or n < 2 else 0.5) for n in range(10) for _ in "ab"
        ]
        (folder / "responses.jsonl").write_text("".join(rows))
        lines = [{"step": step, "reward_mean": 0.1 * step, "seconds": 1.0} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = yaml.safe_load((demo_run.ROOT / command[command.index("-c") + 1]).read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / FINISHED_FILE).touch()
        return 0


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return tmp_path / "model"


def test_a_demo_that_was_stopped_goes_on(model, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_run, "write_report", lambda runs, out, title, first: out.write_text("".join(first)))
    fake = FakeRuns()
    demo = Demo(tmp_path / "root", model, 5, ["grpo:train.num_steps=3"], fake)
    fake.fails = "grpo"
    with pytest.raises(SystemExit) as stopped:
        demo_run.run(demo)
    assert stopped.value.code == 3
    fake.fails = ""
    kept = {"commits": {"test-released": "old", "grpo": "old"}, "seconds": {"test-released": 1.0, "grpo": 100.0}}
    for what, each in kept.items():
        (tmp_path / f"root/{what}.json").write_text(json.dumps(each))
    found = demo_run.run(demo)
    assert found["commits"]["test-released"] == "old"
    assert found["commits"]["grpo"].startswith("old, "), "of both starts"
    assert found["seconds"]["grpo"] >= 100.0, "of both starts"
    names = [next(each.rpartition("/")[2] for each in c if each.startswith("run.dir=")) for c in fake.commands]
    assert names == ["test-released", "grpo", "grpo", "test-grpo"]
    assert "train.num_steps=3" in fake.commands[1]
    assert f"actor.model.path={tmp_path}/root/grpo/checkpoints/latest/actor" in fake.commands[3]
    assert "train.num_steps=3" not in fake.commands[3]
    assert found["models"]["released"]["right answers"]["value"] == pytest.approx(0.2)
    assert found["models"]["grpo"]["right answers"]["value"] == 1.0
    assert found["rewards"]["grpo"] == pytest.approx([0.1, 0.2])
    report = (tmp_path / "root/report.html").read_text()
    assert "How &lt;b&gt; 3?" in report
    assert "reward 0.5" in report
    with pytest.raises(ValueError, match=r"holds another demo \(seed 5, now 6"):
        Demo(tmp_path / "root", model, 6, ["grpo:train.num_steps=3"], fake).begin()


def test_an_actor_that_was_trained_again_is_tested_again(model, tmp_path, monkeypatch):
    """And an actor that has not changed is not."""
    monkeypatch.setattr(demo_run, "write_report", lambda *given, **named: None)
    fake = FakeRuns()
    demo = Demo(tmp_path / "root", model, call=fake)
    demo_run.run(demo)
    fake.commands.clear()
    demo_run.run(demo)
    assert not fake.commands
    shutil.rmtree(tmp_path / "root/grpo")
    demo_run.run(demo)
    names = [Path(each).name for command in fake.commands for each in command if each.startswith("run.dir=")]
    assert names == ["grpo", "test-grpo"]


def test_mistakes_start_nothing(model, tmp_path, capsys):
    """The commands end with 2, say what is wrong, and leave no folder that a corrected command would trip over."""
    root, fake = tmp_path / "root", FakeRuns()
    for wrong, names in (
        ("grop:train.num_steps=9", ["grop:train.num_steps=9", "grpo:section.key=value"]),
        ("train.num_steps=9", ["grpo:section.key=value", "test:section.key=value"]),
        ("grpo:run.seed=9", ["grpo:run.seed=9", "--seed"]),
        ("test:run.dir=mine", ["test:run.dir=mine", "--root"]),
        ("--model=nowhere", ["nowhere", "config.json", "--model"]),
    ):
        assert demo_run.main(["--root", str(root), "--model", str(model), wrong]) == 2
        assert not missing_names(capsys.readouterr().err, *names)
    given = ["--root", str(root), "--out", str(tmp_path / "result.json"), "--model", str(model)]
    assert demo_seeds.main([*given, "--set", "grop:train.num_steps=9"], fake) == 2
    assert not fake.commands
    assert not root.exists()
    Demo(root, model, call=fake).begin()
    with refuses("overrides", "now", "--root"):
        Demo(root, model, overrides=["grpo:train.num_steps=9"]).begin()
    (model / "config.json").write_text('{"other": 1}')
    with refuses("another demo", "model_sha256"):
        Demo(root, model).begin()


def test_seeds_are_added_to_the_file(model, tmp_path, monkeypatch):
    """A seed that was measured elsewhere stays; figures of other settings are refused. The page has all."""
    monkeypatch.setattr(demo_run, "write_report", lambda *given, **named: None)
    out, fake = tmp_path / "result.json", FakeRuns()
    for seed in ("6", "5"):
        given = ["--seeds", seed, "--root", str(tmp_path / "root"), "--out", str(out), "--model", str(model)]
        assert demo_seeds.main(given, fake) == 0
    assert any("algo.shuffle_rewards=true" in command for command in fake.commands)
    result = json.loads(out.read_text())
    assert list(result["seeds"]) == ["5", "6"]
    assert set(result["summary"]) == {*MODELS, "control"}
    page = filled(PAGE.read_text(encoding="utf-8"), result)
    assert "| control | 20.0% (20.0, 20.0) | 100.0% (100.0, 100.0) |" in page
    (model / "config.json").write_text('{"other": 1}')
    given = ["--seeds", "7", "--root", str(tmp_path / "root"), "--out", str(out), "--model", str(model)]
    fake.commands.clear()
    assert demo_seeds.main(given, fake) == 2
    assert not fake.commands, "refused before hours of runs"
    assert json.loads(out.read_text()) == result
    of_grpo = {"value": 0.5, "low": 0.25, "high": 1.25, "seeds": [0.25, 0.5, 0.75]}
    row = of_models({"summary": {"grpo": dict.fromkeys(result["summary"]["grpo"], of_grpo)}})[2]
    assert row.startswith("| grpo | 50.0% [25.0 to 100.0] (25.0, 50.0, 75.0) |")


def test_the_page_has_the_figures_of_the_result():
    result = json.loads(demo_seeds.RESULTS.read_text()) if demo_seeds.RESULTS.exists() else {}
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, result) == page
    assert set(places_of(result)) == {"about", "models", "time"}


def test_intervals_are_shown_in_per_cent():
    for low, high, words in (
        (0.5301, 0.712, "62.5% [53.0 to 71.2]"),
        (-0.1, 1.3, "62.5% [0.0 to 100.0]"),
        (None, None, "62.5%"),
        (0.625, 0.625, "62.5%"),
    ):
        assert shown("right answers", {"value": 0.625, "low": low, "high": high}) == words


@pytest.mark.parametrize("stage", [demo_run.GRPO, demo_run.TEST])
def test_configurations_are_valid(stage):
    cfg = load_config(COMMANDS[stage.command].config, stage.config, [])
    assert cfg.environment.tools[0].function == "tools.demo_tools.weather:weather"
    assert cfg.rollout.temperature == 1.0


def test_the_test_has_the_conversations_of_training():
    """And the control is GRPO but for the order of its rewards."""
    grpo, test = (load_config(COMMANDS[s.command].config, s.config, []) for s in (demo_run.GRPO, demo_run.TEST))
    assert (test.environment, test.rewards) == (grpo.environment, grpo.rewards)
    assert test.rollout.max_response_tokens == grpo.rollout.max_response_tokens
    assert not test.greedy
    changes = ["algo.shuffle_rewards=true"]
    control = load_config(COMMANDS[demo_run.GRPO.command].config, demo_run.GRPO.config, changes)
    assert control.algo.shuffle_rewards
    assert not grpo.algo.shuffle_rewards
    assert control.model_copy(update={"algo": grpo.algo}) == grpo
    assert not control.algo.needs_critic, "a critic that knows the rewards would enter the control's advantages"


@pytest.mark.slow
def test_all_of_it_on_a_tiny_model(tmp_path, monkeypatch):
    """Nothing is learnt, and every stage runs."""
    model = write_chat_model(tmp_path / "model", max_position_embeddings=4096)
    small = [
        "data.max_prompt_tokens=2000",
        "train.num_steps=1",
        "train.max_tokens_per_micro_batch=8192",
        "eval.every=0",
    ]
    overrides = [*(f"grpo:{each}" for each in small), "test:data.max_prompt_tokens=2000"]
    demo_run.run(Demo(tmp_path / "root", model, 5, overrides))
    assert set(figures(tmp_path / "root", MODELS)["models"]) == set(MODELS)
    assert "reward 0" in conversations(tmp_path / "root", MODELS)
    assert (tmp_path / "root/report.html").stat().st_size > 10_000
